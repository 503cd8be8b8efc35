"""Work of one layer, the embedding or the head, before checkpointing is chosen.

Layouts that differ in checkpointing alone share their operations. These are summed up once here, so
that `unit_costs` needs only what a mode saves and repeats. Q quantities add up over the operations
that a backward repeats: see `QUANTITIES`.
Letters: U layouts that differ in the fields of `unit_costs.key` but for checkpointing, K distinct
layers, Q quantities, M most operations whose results a memory budget can save. Units are the
model's distinct layers in the order of `ModelSpec.distinct_layers()`, then the embedding, then the
head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch, in_order
from planner.columns.table import Table
from planner.cost.layer.context import CostContext, OpCost
from planner.cost.layer.gemm import amax_seconds, kept_weights_bytes
from planner.cost.layer.host_time import launches, replays
from planner.cost.layer.op_costs import op_costs
from planner.cost.layer.tp_hidden import hidden_shares
from planner.cost.layer.trainer_kernels import (
    chunks_loss,
    compiled_loss,
    fuses_cross_entropy,
    trainer_code,
)
from planner.cost.layer.weight_grads import incoming_bytes, input_bytes, repeats
from planner.specs.model import ModelSpec
from planner.work import blocks
from planner.work.axes import loss_is_parallel
from planner.work.checkpointing import (
    MEMORY_BUDGET,
    Choices,
    Mode,
    Shares,
    choices_of,
    makers,
    shares_of,
)  # fmt: skip
from planner.work.hyper_connections import stream_dims
from planner.work.ops import Collective, Op
from planner.work.pieces import HIDDEN, LOSS_CHUNKS

# forward seconds, their flops, exposed communication by axis, launches of the host, its waits
QUANTITIES = ("seconds", "flops", "tp", "cp", "ep", "launches", "waits")
# Layout fields that say how results travel. `Savings` do not depend on them, since no budget saves
# communication; but for Ulysses, under which attention runs in one piece, and HybridEP, which pads.
TRAVEL_FIELDS = ("async_tp", "cp_method", "moe_dispatcher")

# judgement: bytes per logit that the compiled loss of a model with experts takes besides. Reserved
# memory of ttc-042 and ao-013 to -016 has them, that of the dense ao-008 to -012 has not; no cause
# is known.
BESIDE_EXPERTS_BYTES = 4.0


@dataclass(frozen=True, kw_only=True)  # slots are those of the classes that have them
class EndBytes(Table):
    """Bytes at the ends of a stage, (U,): of the loss, and of what is handed on.

    logits_bytes: at the peak of the loss.
    leftover_bytes: of logits freed by then and still cached.
    chunks_bytes: hidden states of a chunked loss, and their gradient; 0 for a whole one.
    chunk_logits_bytes: gradient of one chunk's logits.
    boundary_bytes: activation handed to the next stage.
    """

    logits_bytes: FloatColumn
    leftover_bytes: FloatColumn
    chunks_bytes: FloatColumn
    chunk_logits_bytes: FloatColumn
    boundary_bytes: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork(Choices, EndBytes):
    """One microbatch of each unit on one rank; (K + 2, U) unless said otherwise.

    Bytes that modes choose between are those of `Choices`, those of ends are (U,).
    input_grad_seconds, weight_grad_seconds: kernels alone.
    exposed_backward (3 axes tp, cp, ep; K + 2; U): seconds of communication that nothing hides.
    launch_backward_seconds, replay_seconds: of the host (`host_time`).
    again_all (Q, K + 2, U): of all operations, which is the forward.
    again_needed, again_selective, again_module (Q, K, U): of those of layers that a full and a
        selective-op checkpoint and recomputed modules repeat.
    weight_bytes: quantised weights that autograd saves.
    incoming_bytes, input_bytes, weight_groups: of weight gradients that are computed later
        (`weight_grads`).
    """

    input_grad_seconds: FloatColumn
    weight_grad_seconds: FloatColumn
    exposed_backward: FloatColumn
    launch_backward_seconds: FloatColumn
    replay_seconds: FloatColumn
    again_all: FloatColumn
    again_needed: FloatColumn
    again_selective: FloatColumn
    again_module: FloatColumn
    weight_bytes: FloatColumn
    incoming_bytes: FloatColumn
    input_bytes: FloatColumn
    weight_groups: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings(Table):
    """Savings of a memory budget in each layer, most flops per byte first.

    bytes (M, K, U): of each operation's result; 0 behind the last.
    again (M, Q, K, U): what repeating it takes.
    """

    bytes: FloatColumn
    again: FloatColumn


def unit_work(context: CostContext, model: ModelSpec) -> UnitWork:
    """The work of every unit of the model at the U layouts of `context`."""
    parts = [_summed(unit) for unit in units_of(context, model)]
    stacked = {
        name: np.stack([part[name] for part in (parts[:-2] if name in _OF_LAYERS else parts)], -2)
        for name in parts[0]
    }
    logits, leftover = _logits_bytes(context)
    chunks, chunk_logits = _chunks_bytes(context)
    return UnitWork(
        **stacked,
        logits_bytes=logits,
        leftover_bytes=leftover,
        chunks_bytes=chunks,
        chunk_logits_bytes=chunk_logits,
        boundary_bytes=context.product(stream_dims(model)) * context.width_bytes("compute"),
    )


def savings(context: CostContext, model: ModelSpec) -> Savings:
    found = [_sorted_by_worth(unit) for unit in units_of(context, model) if unit.is_layer]
    most, size = max(len(sizes) for sizes, _ in found), len(context.batch)
    bytes_ = np.zeros((most, len(found), size))
    again = np.zeros((most, len(QUANTITIES), len(found), size))
    for place, (sizes, repeated) in enumerate(found):
        bytes_[: len(sizes), place] = sizes
        again[: len(sizes), :, place] = repeated
    return Savings(bytes=bytes_, again=again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Operations of one unit, and what they are priced with."""

    context: CostContext
    model: ModelSpec
    ops: tuple[Op, ...]
    is_layer: bool

    def repeats(self, rows: LayoutBatch) -> list[FloatColumn]:
        """Repeats of each operation in the backward at these rows, (U,) each."""
        nothing = [np.zeros(len(rows)) for _ in self.ops]
        if not (self.is_layer and _saves(self.ops)):
            return nothing
        mode = Mode(rows.ac_kind, rows.ac_value, self.model.num_hidden_layers)
        shares = _shares_of(self.context, self.ops)
        under_budget = (rows.ac_kind == MEMORY_BUDGET) & (mode.budget < 1.0)
        times = {**dict(mode.repeats()), "budget": under_budget.astype(np.float64)}
        of_ops = {**shares, "budget": shares["needed"], "all": (1.0,) * len(nothing)}
        return [
            in_order([often * of_ops[name][index] for name, often in times.items()])
            for index in range(len(nothing))
        ]

    def costs(self) -> list[OpCost]:
        return op_costs(self.context, self.ops, self.model)


def units_of(context: CostContext, model: ModelSpec) -> Iterator[Unit]:
    flash = context.training.attention_kernel != "unfused"
    code = trainer_code(context.training, context.rules)
    layers = [blocks.layer_ops(model, kind, flash, code) for kind, _ in model.distinct_layers()]
    ends = [blocks.embedding_ops(model, code), blocks.head_ops(model, code)]
    context = replace(context, amax_seconds=amax_seconds(context), tp_hidden=hidden_shares(context))
    for place, ops in enumerate([*layers, *ends]):
        is_layer = place < len(layers)
        if place > len(layers) and context.training.fused_cross_entropy is not None:
            loss = compiled_loss(context.fused, context.training, context.rules)
            context = replace(context, fused=loss)
        yield Unit(context=context, model=model, ops=ops, is_layer=is_layer)


def quantities(costs: Sequence[OpCost], launched: FloatColumn, waited: FloatColumn) -> FloatColumn:
    """(Q, operations, U), in the order of QUANTITIES; launched, waited: as `launches` has them."""
    return np.concatenate(
        [
            np.array([[c.forward for c in costs], [c.flops for c in costs]]),
            np.array([c.exposed_forward for c in costs]).swapaxes(0, 1),
            np.array([launched, waited]),
        ]
    )


def _summed(unit: Unit) -> dict[str, FloatColumn]:
    """Parts of one unit's columns, (U,), (3, U) or (Q, U)."""
    context = unit.context
    if _saves(unit.ops):
        choices = choices_of(
            unit.ops,
            context.batch,
            context.bytes_of,
            context.listed,
            context.fused,
            context.rules.early_stop,
        )
        weights = kept_weights_bytes(context, unit.ops)
    else:
        choices = Choices.nothing(len(context.batch))
        weights = np.zeros(len(context.batch))
    return {
        **_sums(unit),
        "replay_seconds": replays(context, is_layer=unit.is_layer),
        "weight_bytes": weights,
        "incoming_bytes": incoming_bytes(context, unit.ops),
        "input_bytes": input_bytes(context, unit.ops),
        "weight_groups": np.full(len(context.batch), float(repeats(context.rules, unit.ops))),
        **{field.name: getattr(choices, field.name) for field in fields(Choices)},
    }


_OF_LAYERS = ("again_needed", "again_selective", "again_module")  # ends are never checkpointed


def _saves(ops: Sequence[Op]) -> bool:
    return any(not isinstance(op, Collective) and op.saves for op in ops)


def _sums(unit: Unit) -> dict[str, FloatColumn]:
    """Sums over the operations, in order."""
    context, ops, costs = unit.context, unit.ops, unit.costs()
    *forward, backward = launches(context, ops, costs, is_layer=unit.is_layer)
    each = list(quantities(costs, *forward).swapaxes(0, 1))
    summands: dict[str, list[FloatColumn]] = {
        "again_all": each,
        "input_grad_seconds": [c.input_grad for c in costs],
        "weight_grad_seconds": [c.weight_grad for c in costs],
        "exposed_backward": [c.exposed_backward for c in costs],
        "launch_backward_seconds": list(backward),
    }
    if _saves(ops):
        for name, those in _shares_of(context, ops).items():
            summands[f"again_{name}"] = _repeated(each, those)
    else:
        summands |= {name: [] for name in _OF_LAYERS}
    nothing = np.zeros_like(each[0])
    return {name: in_order(columns or [nothing]) for name, columns in summands.items()}


def _shares_of(context: CostContext, ops: tuple[Op, ...]) -> dict[str, Shares]:
    early_stop = context.rules.early_stop
    return shares_of(ops, context.batch, context.bytes_of, context.listed, early_stop)


def _repeated(each: Sequence[FloatColumn], shares: Shares) -> list[FloatColumn]:
    """These quantities times their shares, without what is 0 times as much."""
    pairs = zip(each, shares, strict=True)
    return [
        one if isinstance(share, float) else one * share
        for one, share in pairs
        if not (isinstance(share, float) and share == 0.0)
    ]


def _sorted_by_worth(unit: Unit) -> tuple[FloatColumn, FloatColumn]:
    """(bytes (M, U), what repeating takes (M, Q, U)) of what one layer's budget can save.

    Source: torch._functorch.partitioners.estimate_runtime: flops, 1 for an operation without.
    """
    costs = unit.costs()
    *forward, _ = launches(unit.context, unit.ops, costs, is_layer=unit.is_layer)
    made = makers(unit.ops)
    places = [index for index, _ in made]
    sizes = np.array([unit.context.bytes_of(tensor) for _, tensor in made])
    again = quantities(costs, *forward)[:, places].swapaxes(0, 1)
    worth = np.maximum(again[:, 1], 1.0) / np.maximum(sizes, 1.0)
    order = np.argsort(-worth, axis=0, kind="stable")
    return (
        np.take_along_axis(sizes, order, axis=0),
        np.take_along_axis(again, order[:, None], axis=0),
    )


def _logits_bytes(context: CostContext) -> tuple[FloatColumn, FloatColumn]:
    """(bytes at the peak of the loss, bytes freed before it that serve nothing larger), (U,) each.

    They depend on the trainer's kernels. The vocabulary is local under a vocabulary-parallel loss.
    """
    elements, rules = context.product(("tokens", "vocab_loss")), context.rules
    if fuses_cross_entropy(context.training, rules):
        return elements * context.width_bytes("compute"), np.zeros_like(elements)
    if chunks_loss(context.training, rules):
        elements = elements / LOSS_CHUNKS
    sharded = (context.batch.tp > 1) & loss_is_parallel(context.training, rules)
    fused = compiled_loss(context.fused, context.training, rules)
    beside = BESIDE_EXPERTS_BYTES if rules.compiles_loss and "experts" in context.sizes else 0.0
    whole = np.where(fused, rules.fused_loss_bytes + beside, rules.loss_bytes)
    part = np.where(fused, rules.fused_sharded_loss_bytes, rules.sharded_loss_bytes)
    leftover = np.where(fused, 0.0, rules.loss_leftover_bytes)
    return elements * np.where(sharded, part, whole), elements * leftover


def _chunks_bytes(context: CostContext) -> tuple[FloatColumn, FloatColumn]:
    """(bytes that a chunked loss holds besides logits, gradient of a chunk's logits), (U,) each.

    Held are the fp32 gradient of all hidden states and their copies in chunks: views where a
    microbatch is one sequence.
    Source: torchtitan 0.3.0 components/loss.py (ChunkedLossWrapper.__call__).
    """
    if not chunks_loss(context.training, context.rules):
        return np.zeros(len(context.batch)), np.zeros(len(context.batch))
    compute = context.width_bytes("compute")
    copies = np.where(context.batch.micro_batch_size > 1, compute, 0.0)
    return (
        context.product(HIDDEN) * (4.0 + copies),
        context.product(("tokens", "vocab")) / LOSS_CHUNKS * compute,
    )
