"""What activation checkpointing saves and recomputes.

It is derived from the same list of operations that gives the time.
Letters: U rows of a batch; a mode is the pair of columns (ac_kind, ac_value).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch, in_order
from planner.specs.layout import AC_KINDS
from planner.work.liveness import (
    backward_peak,
    recomputation_peak,
    saved_tensors,
    tensor_bytes,
    weight_gradients,
)
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op, Tensor

(
    NONE, FULL, SELECTIVE_OP, SELECTIVE_LAYER, SELECTIVE_ATTENTION, MEMORY_BUDGET, BLOCK, UNIFORM,
) = range(len(AC_KINDS))  # fmt: skip
LAYER_INPUT = Tensor(name="x", dims=("tokens_sp", "hidden"))
CORE_ATTENTION = frozenset({"attention", "softmax_dropout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a mode does to one layer.

    saved_bytes (U,): saved from forward to backward, the mean over layers for selective-layer-N.
    transient_bytes (U,): needed besides while the last layer runs backward: what is recomputed,
        gradients, kernels' buffers.
    done_bytes, next_bytes (U,): when it is done, and while the layer before it runs backward, less
    what
        the last one saved.
    second_bytes (U,): while the second layer runs backward, with all that it and the first one
    save. working_bytes (U,): what its forward computes and frees again.
    redone: share of each op's forward that backward repeats, (len(ops), U).
    """

    saved_bytes: FloatColumn
    transient_bytes: FloatColumn
    done_bytes: FloatColumn
    next_bytes: FloatColumn
    second_bytes: FloatColumn
    working_bytes: FloatColumn
    redone: FloatColumn


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How a trainer recomputes.

    early_stop: eager recomputation ends once the last tensor that backward needs is there
        (`needed_again`); compiled recomputation always does.
    num_layers: of the model.
    """

    early_stop: bool
    num_layers: int


def kept(
    ops: Sequence[Op],
    batch: LayoutBatch,
    bytes_of: Callable[[Tensor], FloatColumn],
    seconds: FloatColumn,
    fused: BoolColumn,
    recomputation: Recomputation,
) -> Kept:
    """What each row's mode saves of a layer and what it recomputes.

    block-N is no mode of a layer: some of a stage's layers have none and the others full
    checkpointing (`cost_inputs`). uniform-N saves the input of every N-th layer and recomputes N
    layers at once, so that backward holds what N layers save.

    bytes_of: bytes (U,) of a tensor.
    seconds (len(ops), U): forward seconds of each op, for the memory budget.
    fused (U,): kernels are fused, so that eager-only tensors are not saved.
    Sources: torchtitan 0.2.2 distributed/activation_checkpoint.py (save list and every second
        matmul),
    Korthikanti 2022 (selective attention), torch._functorch.partitioners
    (activation_memory_budget); Megatron-LM core 0.14 transformer/transformer_block.py
    (_checkpointed_forward) for uniform-N.
    """
    size = len(batch)
    zero, one = np.zeros(size), np.ones(size)
    every = _union_bytes(ops, bytes_of, fused)
    layer_input = bytes_of(LAYER_INPUT)
    saved_op, redone_op = _selective_op(ops, batch, bytes_of)
    saved_budget, redone_budget = layer_input, redone_op
    if np.any(batch.ac_kind == MEMORY_BUDGET):
        saved_budget, redone_budget = _memory_budget(
            ops, bytes_of, seconds, fused, np.clip(batch.ac_value, 0, 1), layer_input
        )
    core = np.array([1.0 if op.name in CORE_ATTENTION else 0.0 for op in ops])[:, None]
    kind, period = batch.ac_kind, np.maximum(batch.ac_value, 1.0)
    checkpointed = np.floor(recomputation.num_layers / period) / recomputation.num_layers
    saved = np.select(
        [
            kind == NONE,
            kind == FULL,
            kind == SELECTIVE_OP,
            kind == SELECTIVE_LAYER,
            kind == SELECTIVE_ATTENTION,
            kind == UNIFORM,
        ],
        [
            every,
            layer_input,
            saved_op,
            every + (layer_input - every) * checkpointed,
            every - _core_bytes(ops, bytes_of),
            layer_input / period,
        ],
        saved_budget,
    )
    redone = np.select(
        [
            (kind == NONE)[None],
            ((kind == FULL) | (kind == UNIFORM))[None],
            (kind == SELECTIVE_OP)[None],
            (kind == SELECTIVE_LAYER)[None],
            (kind == SELECTIVE_ATTENTION)[None],
        ],
        [
            zero[None] * core,
            one[None] + zero[None] * core,
            redone_op,
            checkpointed[None] + zero[None] * core,
            core * one[None],
        ],
        redone_budget,
    )
    stops = _stops_early(batch, recomputation.early_stop)
    needed = needed_again(ops)[:, None]
    # of layers that are recomputed together, only the last one's recomputation stops early
    needed = np.where(kind == UNIFORM, 1.0 + (needed - 1.0) / period, needed)
    redone = redone * np.where(stops, needed, 1.0)
    backward = backward_peak(tuple(ops), bytes_of, fused)
    again = recomputation_peak(tuple(ops), bytes_of, fused, stops)
    peak = np.where(kind == NONE, backward, np.maximum(backward, again))
    peak = peak + np.where(kind == UNIFORM, (period - 1.0) * every, 0.0)
    peak = peak + _held_besides(ops, batch, bytes_of, fused, stops)
    last, before, first = (
        np.select([kind == SELECTIVE_LAYER, kind == UNIFORM], [own, together], saved)
        for own, together in zip(
            _by_place(period, layer_input, every, recomputation),
            # `peak` has all layers that were recomputed together: their one input is saved, the
            # last one is freed when the one before it runs, and two are left for the second
            (layer_input, every, (2.0 - period) * every),
            strict=True,
        )
    )
    gradients = in_order([bytes_of(gradient) for gradient in (LAYER_INPUT, *weight_gradients(ops))])
    return Kept(
        saved_bytes=saved,
        transient_bytes=np.maximum(peak - last, 0.0),
        done_bytes=gradients - last,
        next_bytes=peak - before - last,
        second_bytes=peak + first,
        working_bytes=np.maximum(every + _passing_bytes(ops, bytes_of) - saved, 0.0),
        redone=redone,
    )


def _stops_early(batch: LayoutBatch, early_stop: bool) -> BoolColumn:
    """Rows whose recomputation runs no further than backward needs, (U,): compiled ones always."""
    return np.asarray(batch.compile | early_stop)


def _by_place(
    period: FloatColumn, layer_input: FloatColumn, every: FloatColumn, recomputation: Recomputation
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """What the last layer, the one before it and the first save under selective-layer-N, (U,) each.

    selective-layer-N checkpoints every N-th layer.
    Source: torchtitan distributed/activation_checkpoint.py (_apply_layer_sac counts from one).
    """
    places = (recomputation.num_layers, max(recomputation.num_layers - 1, 1), 1)
    last, before, first = (np.where(place % period == 0, layer_input, every) for place in places)
    return last, before, first


def _held_besides(
    ops: Sequence[Op],
    batch: LayoutBatch,
    bytes_of: Callable[[Tensor], FloatColumn],
    fused: BoolColumn,
    stops: BoolColumn,
) -> FloatColumn:
    """What a checkpoint holds through the layer's backward though backward does not read it, (U,).

    They are the layer's input where no operation saves it, and saved outputs that recomputation
    does not reach before it stops.
    """
    every = saved_tensors(ops)
    read = (
        tensor_bytes(every[LAYER_INPUT.name], bytes_of, fused)
        if LAYER_INPUT.name in every
        else np.zeros(len(batch))
    )
    held = np.where(batch.ac_kind == NONE, 0.0, bytes_of(LAYER_INPUT) - read)
    never = needed_again(ops) == 0.0
    unread = [
        kept_bytes for index, kept_bytes in _kept_outputs(ops, batch, bytes_of) if never[index]
    ]
    early = stops & (batch.ac_kind == SELECTIVE_OP)
    return np.asarray(held + np.where(early, in_order(unread), 0.0))


def graph_share(batch: LayoutBatch) -> FloatColumn:
    """Share of a layer's autograd graph that stays from forward to backward, (U,).

    It applies to what operations save besides their inputs.
    """
    kind, value = batch.ac_kind, batch.ac_value
    whole = (kind == NONE) | (kind == SELECTIVE_ATTENTION)
    period, budget = np.maximum(value, 1.0), np.clip(value, 0.0, 1.0)
    return np.select(
        [whole, kind == SELECTIVE_LAYER, kind == MEMORY_BUDGET],
        [np.ones(len(batch)), 1.0 - 1.0 / period, budget],
        0.0,
    )


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
    keepers = [index for index, op in enumerate(ops) if not isinstance(op, Collective) and op.saves]
    last = ops[keepers[-1]]
    runs = (
        not isinstance(last, Collective)
        and last.output is not None
        and last.output.name in {tensor.name for tensor in last.saves}
    )
    return np.array([1.0 if index < keepers[-1] + runs else 0.0 for index in range(len(ops))])


def _union_bytes(
    ops: Sequence[Op], bytes_of: Callable[[Tensor], FloatColumn], fused: BoolColumn
) -> FloatColumn:
    return in_order(
        [tensor_bytes(tensor, bytes_of, fused) for tensor in saved_tensors(ops).values()]
    )


def _passing_bytes(ops: Sequence[Op], bytes_of: Callable[[Tensor], FloatColumn]) -> FloatColumn:
    """Bytes of GEMM outputs that backward never reads, such as partial sums that TP reduces."""
    read = saved_tensors(ops)
    return in_order(
        [bytes_of(op.output) for op in ops if isinstance(op, Gemm) and op.output.name not in read]
    )


def _core_bytes(ops: Sequence[Op], bytes_of: Callable[[Tensor], FloatColumn]) -> FloatColumn:
    """Bytes that only the core attention saves: probabilities and masks, or flash's statistics."""
    cores = [op for op in ops if isinstance(op, Attention)]
    inner = [t for op in cores for t in op.saves if t.name not in ("q", "k", "v", "attention_out")]
    return in_order([bytes_of(t) for t in inner])


def _selective_op(
    ops: Sequence[Op], batch: LayoutBatch, bytes_of: Callable[[Tensor], FloatColumn]
) -> tuple[FloatColumn, FloatColumn]:
    """TorchTitan's policy, which saves the outputs of some operations.

    They are the first, third, fifth and so on of the matmuls, attention, and reduce-scattered sums.
    Grouped expert GEMMs are not in its save list, so they are recomputed.
    """
    saved = bytes_of(LAYER_INPUT)
    redone = np.ones((len(ops), len(batch)))
    for index, kept_bytes in _kept_outputs(ops, batch, bytes_of):
        saved = saved + kept_bytes
        redone[index] = np.where(kept_bytes > 0, 0.0, 1.0)
    return saved, redone


def _kept_outputs(
    ops: Sequence[Op], batch: LayoutBatch, bytes_of: Callable[[Tensor], FloatColumn]
) -> Iterator[tuple[int, FloatColumn]]:
    """(index of an operation on the save list, bytes of its output that are saved (U,))."""
    num_matmuls = 0
    scattered = batch.sequence_parallel & (batch.tp > 1)
    for index, op in enumerate(ops):
        if isinstance(op, Gemm) and op.role != "expert":
            num_matmuls += 1
            if num_matmuls % 2 == 1:
                yield index, bytes_of(op.output)
        elif isinstance(op, Attention):
            yield index, bytes_of(op.output) + bytes_of(op.statistics)
        elif isinstance(op, Collective) and op.site == "tp_exit":
            yield index, np.where(scattered, bytes_of(op.tensor) / batch.tp, 0.0)


def _memory_budget(
    ops: Sequence[Op],
    bytes_of: Callable[[Tensor], FloatColumn],
    seconds: FloatColumn,
    fused: BoolColumn,
    budget: FloatColumn,
    least: FloatColumn,
) -> tuple[FloatColumn, FloatColumn]:
    """Fractional knapsack: save the tensors that cost most seconds per byte to recompute.

    Tensors are saved until least + X (all - least) bytes are used, where X is the budget. What
    backward does not read (`needed_again`) is never recomputed, so it is not worth saving.
    """
    needed = needed_again(ops)
    redone = np.ones((len(ops), len(budget)))
    makers = [
        (i, op.output)
        for i, op in enumerate(ops)
        if isinstance(op, Gemm | Attention | Elementwise) and op.output is not None and needed[i]
    ]
    total = _union_bytes(ops, bytes_of, fused)
    room = least + budget * np.maximum(total - least, 0.0)
    saved = least.copy()
    sizes = np.array([bytes_of(tensor) for _, tensor in makers])
    worth = np.array([seconds[i] for i, _ in makers]) / np.maximum(sizes, 1.0)
    order = np.argsort(-worth, axis=0, kind="stable")
    places = np.array([i for i, _ in makers])
    columns = np.arange(len(budget))
    for rank in range(len(makers)):
        pick = order[rank]
        size = sizes[pick, columns]
        share = np.clip((room - saved) / np.maximum(size, 1.0), 0.0, 1.0)
        saved = saved + share * size
        redone[places[pick], columns] = 1.0 - share
    return room, np.where((budget >= 1.0)[None], 0.0, redone)
