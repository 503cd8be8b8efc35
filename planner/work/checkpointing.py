"""Tensors that activation checkpointing saves, and work that it repeats.

It is derived from the same list of operations that gives the time.
Letters: U rows of a batch; a mode is the pair of columns (ac_kind, ac_value).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch, in_order
from planner.columns.table import Table
from planner.specs.layout import AC_KINDS, CORE_ATTN_BIT
from planner.work.liveness import (
    backward_peak,
    recomputation_peak,
    saved_tensors,
    tensor_bytes,
    weight_gradients,
)
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op, Tensor
from planner.work.recompute_modules import Recomputed, layer_input, recomputed

(
    NONE, FULL, SELECTIVE_OP, SELECTIVE_LAYER, SELECTIVE_ATTENTION, MEMORY_BUDGET, BLOCK, UNIFORM,
    MODULES,
) = range(len(AC_KINDS))  # fmt: skip
BY_MODULE = (SELECTIVE_ATTENTION, MODULES)  # recompute parts of a layer, of which each is whole
Listed = Gemm | Attention | Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(Table):
    """Bytes that the modes of one layer choose between, (U,).

    Modes change none of them but those of modules, which are of the row's own set.

    every_bytes: all that its operations save for backward.
    layer_input_bytes: what full checkpointing saves.
    selective_bytes: what selective-op saves.
    module_bytes: what the recomputation of modules saves.
    backward_peak_bytes: most alive in its backward.
    recomputation_peak_bytes: the same while its forward is repeated.
    module_peak_bytes: most alive in its backward where modules are recomputed, all of them at once.
    unsaved_input_bytes: its input, where no operation saves it.
    unread_bytes: outputs that selective-op saves and recomputation does not reach before it stops.
    gradient_bytes: of its input and its weights.
    passing_bytes: outputs of GEMMs that backward never reads.
    """

    every_bytes: FloatColumn
    layer_input_bytes: FloatColumn
    selective_bytes: FloatColumn
    module_bytes: FloatColumn
    backward_peak_bytes: FloatColumn
    recomputation_peak_bytes: FloatColumn
    module_peak_bytes: FloatColumn
    unsaved_input_bytes: FloatColumn
    unread_bytes: FloatColumn
    gradient_bytes: FloatColumn
    passing_bytes: FloatColumn

    @classmethod
    def nothing(cls, size: int) -> "Choices":
        return Choices(**{field.name: np.zeros(size) for field in fields(Choices)})


# share of each operation: one number where all layouts have the same, 0 or 1, else (U,)
Shares = tuple[FloatColumn | float, ...]


def choices_of(
    ops: tuple[Op, ...],
    batch: LayoutBatch,
    bytes_of: Callable[[Tensor], FloatColumn],
    listed: Callable[[Listed], FloatColumn],
    fused: BoolColumn,
    early_stop: bool,
) -> Choices:
    """Choices between which the modes of a layer of these operations choose.

    bytes_of: bytes (U,) of a tensor.
    fused (U,): kernels are fused, so that eager-only tensors are not saved.
    listed, early_stop: see `shares_of`.
    Sources: torchtitan 0.2.2 distributed/activation_checkpoint.py (save list and every second
        matmul), Korthikanti 2022 (selective attention).
    """
    stops = np.asarray(batch.compile | early_stop)
    again, nothing = needed_again(ops), np.zeros(len(batch))
    saved = saved_tensors(ops)
    entering = layer_input(ops)
    input_bytes, read = bytes_of(entering), nothing
    if entering.name in saved:
        read = tensor_bytes(saved[entering.name], bytes_of, fused)
    kept = _kept_outputs(ops, batch, bytes_of)
    outputs = [(index, size * listed(op)) for index, op, size in kept]
    unread = [size for index, size in outputs if again[index] == 0.0]
    gradients = (entering, *weight_gradients(ops))
    modules = modules_at(ops, batch)
    by_module = [
        in_order([nothing, *(tensor_bytes(one, bytes_of, fused) for one in those.saves)])
        for _, those in modules
    ]
    backward = backward_peak(ops, bytes_of, fused)
    again_peak = recomputation_peak(ops, bytes_of, fused, stops)
    return Choices(
        every_bytes=in_order([tensor_bytes(one, bytes_of, fused) for one in saved.values()]),
        layer_input_bytes=input_bytes,
        selective_bytes=in_order([input_bytes, *(size for _, size in outputs)]),
        module_bytes=np.select([rows for rows, _ in modules], by_module),
        backward_peak_bytes=backward,
        recomputation_peak_bytes=again_peak,
        module_peak_bytes=np.where(
            np.any([rows & those.holds_routed for rows, those in modules], axis=0),
            np.maximum(backward, again_peak),
            backward,
        ),
        unsaved_input_bytes=input_bytes - read,
        unread_bytes=np.where(stops, in_order([nothing, *unread]), 0.0),
        gradient_bytes=in_order([bytes_of(gradient) for gradient in gradients]),
        passing_bytes=in_order([nothing, *map(bytes_of, _passing(ops))]),
    )


def shares_of(
    ops: tuple[Op, ...],
    batch: LayoutBatch,
    bytes_of: Callable[[Tensor], FloatColumn],
    listed: Callable[[Listed], FloatColumn],
    early_stop: bool,
) -> dict[str, Shares]:
    """Shares of a layer's operations that each mode repeats.

    "needed", "selective", "module": under full checkpointing, selective-op and recomputed modules.

    TorchTitan's selective-op saves the outputs of some operations (`_kept_outputs`).
    bytes_of: bytes (U,) of a tensor.
    listed: share of the layers (U,) in which an operation's kernel is on selective-op's list.
    early_stop: eager recomputation ends once the last tensor that backward needs is there
        (`needed_again`); compiled recomputation always does.
    """
    stops = np.asarray(batch.compile | early_stop)
    behind = 0.0 if stops.all() else np.where(stops, 0.0, 1.0)
    needed = tuple(1.0 if again else behind for again in needed_again(ops))
    selective = list(needed)
    for index, op, kept_bytes in _kept_outputs(ops, batch, bytes_of):
        saved = np.where(kept_bytes > 0, listed(op), 0.0)
        selective[index] = (1.0 - saved) * needed[index]
    modules = modules_at(ops, batch)
    module = (_where_repeated(modules, index, share) for index, share in enumerate(needed))
    return {"needed": needed, "selective": tuple(selective), "module": tuple(module)}


def modules_at(ops: tuple[Op, ...], batch: LayoutBatch) -> list[tuple[BoolColumn, Recomputed]]:
    """(its rows (U,), what it changes in a layer of these operations), of each set of modules.

    Rows that recompute no modules count as those that recompute the core attention, since the
    work of a unit is the same for all other modes.
    """
    by_module = batch.ac_kind == MODULES
    if not by_module.any():
        return [(~by_module, recomputed(ops, CORE_ATTN_BIT))]
    bits = np.where(by_module, batch.ac_value, CORE_ATTN_BIT).astype(np.int64)
    return [(bits == one, recomputed(ops, int(one))) for one in np.unique(bits)]


def _where_repeated(
    modules: list[tuple[BoolColumn, Recomputed]], index: int, share: FloatColumn | float
) -> FloatColumn | float:
    """The share of one operation that is repeated, at the rows whose modules have it; else 0."""
    rows = [these for these, those in modules if those.repeats[index]]
    if len(rows) in (0, len(modules)):
        return share if rows else 0.0
    return np.asarray(np.any(rows, axis=0) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Tensors of a layer that modes save; all have one shape.

    saved: from forward to backward, the mean over layers for selective-layer-N.
    transient: needed besides while the last layer runs backward: what is recomputed, gradients,
        kernels' buffers.
    done, following: when it is done, and while the layer before it runs backward, less what the
        last one saved.
    second: while the second layer runs backward, with all that it and the first one save.
    working: what its forward computes and frees again.
    """

    saved: FloatColumn
    transient: FloatColumn
    done: FloatColumn
    following: FloatColumn
    second: FloatColumn
    working: FloatColumn


@dataclass(frozen=True, slots=True)
class Mode:
    """How rows checkpoint: (ac_kind, ac_value), and the layers of the model.

    block-N is no mode of a layer: some of a stage's layers have none and the others full
    checkpointing (`cost_inputs`). uniform-N saves the input of every N-th layer and recomputes N
    layers at once, so that backward holds what N layers save.
    Source: Megatron-LM core 0.14 transformer/transformer_block.py (_checkpointed_forward).
    """

    kind: IntColumn
    value: FloatColumn
    num_layers: int

    @property
    def period(self) -> FloatColumn:
        """N of selective-layer-N and uniform-N."""
        return np.maximum(self.value, 1.0)

    @property
    def checkpointed(self) -> FloatColumn:
        """The share of layers that selective-layer-N checkpoints."""
        return np.floor(self.num_layers / self.period) / self.num_layers

    @property
    def budget(self) -> FloatColumn:
        """The share of what could be saved that a memory budget saves."""
        return np.clip(self.value, 0.0, 1.0)

    @property
    def graph_share(self) -> FloatColumn:
        """Share of a layer's autograd graph that stays from forward to backward.

        It applies to what operations save besides their inputs.
        """
        whole = (self.kind == NONE) | np.isin(self.kind, BY_MODULE)
        cases = [whole, self.kind == SELECTIVE_LAYER, self.kind == MEMORY_BUDGET]
        return np.select(cases, [1.0, 1.0 - 1.0 / self.period, self.budget], 0.0)

    def kept(self, of: Choices) -> Kept:
        """Tensors that the modes save; `of` has their shape."""
        kind, period, by_module = self.kind, self.period, np.isin(self.kind, BY_MODULE)
        every, layer_input = of.every_bytes, of.layer_input_bytes
        some_layers, blocks = kind == SELECTIVE_LAYER, kind == UNIFORM
        cases = [
            (kind == NONE, every),
            (kind == FULL, layer_input),
            (kind == SELECTIVE_OP, of.selective_bytes),
            (some_layers, every + (layer_input - every) * self.checkpointed),
            (by_module, of.module_bytes),
            (blocks, layer_input / period),
        ]
        saved = np.select(
            [case for case, _ in cases],
            [value for _, value in cases],
            room(layer_input, every, self.budget),
        )
        whole = np.maximum(of.backward_peak_bytes, of.recomputation_peak_bytes)
        peak = np.where(by_module, of.module_peak_bytes, whole) + of.unsaved_input_bytes
        peak = np.where(kind == NONE, of.backward_peak_bytes, peak)
        peak = peak + np.where(kind == UNIFORM, (period - 1.0) * every, 0.0)
        peak = peak + np.where(kind == SELECTIVE_OP, of.unread_bytes, 0.0)
        # `peak` has all layers that were recomputed together: their one input is saved, the last
        # one is freed when the one before it runs, and two are left for the second
        together = (layer_input, every, (2.0 - period) * every)
        last, before, first = (
            np.select([some_layers, blocks], [own, several], saved)
            for own, several in zip(self._by_place(of), together, strict=True)
        )
        return Kept(
            saved=saved,
            transient=np.maximum(peak - last, 0.0),
            done=of.gradient_bytes - last,
            following=peak - before - last,
            second=peak + first,
            working=np.maximum(every + of.passing_bytes - saved, 0.0),
        )

    def _by_place(self, of: Choices) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
        """Tensors saved by the last layer, the one before it and the first, for selective-layer-N.

        selective-layer-N checkpoints every N-th layer.
        Source: torchtitan distributed/activation_checkpoint.py (_apply_layer_sac counts from one).
        """
        places = (self.num_layers, max(self.num_layers - 1, 1), 1)
        last, before, first = (
            np.where(place % self.period == 0, of.layer_input_bytes, of.every_bytes)
            for place in places
        )
        return last, before, first

    def repeats(self) -> Iterator[tuple[str, FloatColumn]]:
        """(sum over operations, how often the backward repeats it), but for memory budgets.

        The sums are over those that a full and a selective-op checkpoint and recomputed modules
        repeat, and over all: of layers that are recomputed together, only the last one's
        recomputation stops early.
        """
        kind = self.kind
        yield (
            "needed",
            np.select(
                [kind == FULL, kind == SELECTIVE_LAYER, kind == UNIFORM],
                [1.0, self.checkpointed, 1.0 / self.period],
                0.0,
            ),
        )
        yield "all", np.where(kind == UNIFORM, 1.0 - 1.0 / self.period, 0.0)
        yield "selective", (kind == SELECTIVE_OP).astype(np.float64)
        yield "module", np.isin(kind, BY_MODULE).astype(np.float64)


def room(least: FloatColumn, every: FloatColumn, budget: FloatColumn) -> FloatColumn:
    """Bytes that a memory budget lets a layer save, between its input and all: of `Choices`."""
    return np.asarray(least + budget * np.maximum(every - least, 0.0))


def makers(ops: Sequence[Op]) -> list[tuple[int, Tensor]]:
    """(index, result) of the operations whose results a memory budget can save.

    What backward does not read (`needed_again`) is never recomputed, so it is not worth saving.
    """
    needed = needed_again(ops)
    return [
        (index, op.output)
        for index, op in enumerate(ops)
        if isinstance(op, Gemm | Attention | Elementwise)
        and op.output is not None
        and needed[index]
    ]


def saved_by_budget(
    sizes: FloatColumn, again: FloatColumn, least: FloatColumn, most: FloatColumn
) -> FloatColumn:
    """Work not repeated where `most` bytes are saved: a fractional knapsack, (Q, ...).

    sizes (M, ...), again (M, Q, ...): bytes of results and what repeating them takes, those first
        that take most flops per byte.
    least, most (...): bytes that are saved in any case, and with these.
    Source: torch._functorch.partitioners (activation_memory_budget).
    """
    saved, spared = least.copy(), np.zeros(again.shape[1:])
    for size, one in zip(sizes, again, strict=True):
        share = np.clip((most - saved) / np.maximum(size, 1.0), 0.0, 1.0)
        saved += share * size
        spared += share * one
    return spared


def needed_again(ops: Sequence[Op]) -> FloatColumn:
    """1 for operations that recomputation runs before it stops, 0 from then on, (len(ops),).

    It stops at the last operation that saves a tensor. Autograd saves an operation's inputs before
    it runs the kernel, and the non-reentrant checkpoint stops when the last saved tensor is there.
    So the layer's last GEMM, what follows it, and its collectives are never recomputed.
    torch.compile's partitioner recomputes only what backward reads, which is the same. An operation
    that saves its own output has to run.
    Source: torch/utils/checkpoint.py (set_checkpoint_early_stop, _StopRecomputationError); the
    reentrant form runs the whole layer.
    """
    keepers = [(i, op) for i, op in enumerate(ops) if not isinstance(op, Collective) and op.saves]
    last, op = keepers[-1]
    runs = op.output is not None and op.output.name in {tensor.name for tensor in op.saves}
    return np.array([1.0 if index < last + runs else 0.0 for index in range(len(ops))])


def _passing(ops: Sequence[Op]) -> list[Tensor]:
    """Outputs of GEMMs that backward never reads, such as partial sums that TP reduces."""
    read = saved_tensors(ops)
    return [op.output for op in ops if isinstance(op, Gemm) and op.output.name not in read]


def _kept_outputs(
    ops: Sequence[Op], batch: LayoutBatch, bytes_of: Callable[[Tensor], FloatColumn]
) -> Iterator[tuple[int, Listed, FloatColumn]]:
    """(index, operation on selective-op's list, bytes of its output that are saved (U,)).

    They are the first, third, fifth and so on of the matmuls, attention, reduce-scattered sums, and
    what EP sends to the experts and back.
    Grouped expert GEMMs are not in TorchTitan's save list, so they are recomputed.
    """
    num_matmuls = 0
    scattered = batch.sequence_parallel & (batch.tp > 1)
    for index, op in enumerate(ops):
        if isinstance(op, Gemm):
            num_matmuls += op.role != "expert"
            if op.role != "expert" and num_matmuls % 2 == 1:
                yield index, op, bytes_of(op.output)
        elif isinstance(op, Attention):
            yield index, op, bytes_of(op.output) + bytes_of(op.statistics)
        elif isinstance(op, Collective) and op.site == "tp_exit":
            yield index, op, np.where(scattered, bytes_of(op.tensor) / batch.tp, 0.0)
        elif isinstance(op, Collective) and op.site == "ep_exchange":
            yield index, op, bytes_of(op.exchanged[0])
