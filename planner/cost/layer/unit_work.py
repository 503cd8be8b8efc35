"""What one layer, the embedding or the head takes, before checkpointing is chosen.

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

from planner.columns import FloatColumn, IntColumn, in_order
from planner.cost.layer.context import CostContext, OpCost
from planner.cost.layer.gemm import amax_seconds, kept_weights_bytes
from planner.cost.layer.host_time import Launches, launches
from planner.cost.layer.op_costs import op_costs
from planner.cost.layer.tp_hidden import hidden_shares
from planner.cost.layer.trainer_kernels import chunks_loss, trainer_code
from planner.cost.layer.weight_grads import incoming_bytes, input_bytes, repeats
from planner.specs.model import ModelSpec
from planner.trainers.registry import training_release
from planner.work import blocks
from planner.work.axes import loss_is_parallel
from planner.work.checkpointing import Choices, choices_of, makers
from planner.work.ops import Collective, Op
from planner.work.pieces import HIDDEN, HIDDEN_SP, LOSS_CHUNKS

# forward seconds, their flops, exposed communication by axis, launches of the host, its waits
QUANTITIES = ("seconds", "flops", "tp", "cp", "ep", "launches", "waits")
COMMUNICATION = slice(2, 5)


@dataclass(frozen=True, kw_only=True)  # slots are those of the classes that have them
class EndBytes:
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
    forward_seconds, input_grad_seconds, weight_grad_seconds: kernels alone.
    exposed_forward, exposed_backward (3 axes tp, cp, ep; K + 2; U): seconds of communication that
        nothing hides.
    launch_forward_seconds, launch_backward_seconds, replay_seconds, wait_seconds: of the host; see
        `host_time.Launches`.
    again_all, again_needed, again_selective, again_core (Q, K + 2, U): of all operations; of those
        that a full, a selective-op and a selective-attention checkpoint repeats.
    weight_bytes: quantised weights that autograd saves.
    incoming_bytes, input_bytes, weight_groups: of weight gradients that are computed later
        (`weight_grads`).
    """

    forward_seconds: FloatColumn
    input_grad_seconds: FloatColumn
    weight_grad_seconds: FloatColumn
    exposed_forward: FloatColumn
    exposed_backward: FloatColumn
    launch_forward_seconds: FloatColumn
    launch_backward_seconds: FloatColumn
    replay_seconds: FloatColumn
    wait_seconds: FloatColumn
    again_all: FloatColumn
    again_needed: FloatColumn
    again_selective: FloatColumn
    again_core: FloatColumn
    weight_bytes: FloatColumn
    incoming_bytes: FloatColumn
    input_bytes: FloatColumn
    weight_groups: FloatColumn

    def layers_at(self, rows: IntColumn) -> Choices:
        """What the modes of layers at some rows choose between, (K, their U) each."""
        return Choices(
            **{field.name: getattr(self, field.name)[:-2, rows] for field in fields(Choices)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What a memory budget can save of each layer, what costs most to repeat per byte first.

    bytes (M, K, U): of each operation's result; 0 behind the last.
    again (M, Q, K, U): what repeating it takes.
    """

    bytes: FloatColumn
    again: FloatColumn

    def take(self, rows: IntColumn) -> "Savings":
        """That of some layouts."""
        return Savings(bytes=self.bytes[..., rows], again=self.again[..., rows])


def unit_work(context: CostContext, model: ModelSpec) -> UnitWork:
    """The work of every unit of the model at the U layouts of `context`."""
    parts = [_summed(*unit) for unit in _units(context, model)]
    stacked = {name: np.stack([part[name] for part in parts], axis=-2) for name in parts[0]}
    logits, leftover = _logits_bytes(context)
    chunks, chunk_logits = _chunks_bytes(context)
    return UnitWork(
        **stacked,
        logits_bytes=logits,
        leftover_bytes=leftover,
        chunks_bytes=chunks,
        chunk_logits_bytes=chunk_logits,
        boundary_bytes=context.product(HIDDEN_SP) * context.width_bytes("compute"),
    )


def savings(context: CostContext, model: ModelSpec) -> Savings:
    """What memory budgets can save at the U layouts of `context`."""
    found = [_sorted_by_worth(*unit) for unit in _units(context, model) if unit[-1]]
    most, size = max(len(sizes) for sizes, _ in found), len(context.batch)
    bytes_ = np.zeros((most, len(found), size))
    again = np.zeros((most, len(QUANTITIES), len(found), size))
    for place, (sizes, repeated) in enumerate(found):
        bytes_[: len(sizes), place] = sizes
        again[: len(sizes), :, place] = repeated
    return Savings(bytes=bytes_, again=again)


def _units(
    context: CostContext, model: ModelSpec
) -> Iterator[tuple[CostContext, Sequence[Op], list[OpCost], bool]]:
    """(context, operations, their costs, whether it is a layer) of each unit."""
    flash = context.training.attention_kernel != "unfused"
    code = trainer_code(context.training, context.rules)
    context = replace(context, amax_seconds=amax_seconds(context), tp_hidden=hidden_shares(context))
    for kind, _ in model.distinct_layers():
        ops = blocks.layer_ops(model, kind, flash, code)
        yield context, ops, op_costs(context, ops, model), True
    for ops in (blocks.embedding_ops(), blocks.head_ops(model, code)):
        yield context, ops, op_costs(context, ops, model), False


def _quantities(costs: Sequence[OpCost], host: Launches) -> FloatColumn:
    """(Q, operations, U), in the order of QUANTITIES."""
    return np.concatenate(
        [
            np.array([[c.forward for c in costs], [c.flops for c in costs]]),
            np.array([c.exposed_forward for c in costs]).swapaxes(0, 1),
            np.array([host.forward_OU, host.waits_OU]),
        ]
    )


def _summed(
    context: CostContext, ops: Sequence[Op], costs: list[OpCost], is_layer: bool
) -> dict[str, FloatColumn]:
    """The columns of one unit, (U,), (3, U) or (Q, U)."""
    host = launches(context, ops, costs, is_layer=is_layer)
    quantities = _quantities(costs, host)
    each = [quantities[:, index] for index in range(len(ops))]
    everything = in_order(each)
    if any(not isinstance(op, Collective) and op.saves for op in ops):
        choices, shares = choices_of(
            ops, context.batch, context.bytes_of, context.fused, context.rules.early_stop
        )
        weights = kept_weights_bytes(context, ops)
        again = [
            in_order([one * share for one, share in zip(each, those, strict=True)])
            for those in (shares.needed, shares.selective, shares.core)
        ]
    else:
        choices = Choices.nothing(len(context.batch))
        weights, again = np.zeros(len(context.batch)), [np.zeros_like(everything)] * 3
    return {
        "forward_seconds": everything[0],
        "input_grad_seconds": in_order([c.input_grad for c in costs]),
        "weight_grad_seconds": in_order([c.weight_grad for c in costs]),
        "exposed_forward": everything[COMMUNICATION],
        "exposed_backward": in_order([c.exposed_backward for c in costs]),
        "launch_forward_seconds": in_order(host.forward_OU),
        "launch_backward_seconds": host.backward,
        "replay_seconds": host.replays,
        "wait_seconds": in_order(host.waits_OU),
        "again_all": everything,
        "again_needed": again[0],
        "again_selective": again[1],
        "again_core": again[2],
        "weight_bytes": weights,
        "incoming_bytes": incoming_bytes(context, ops),
        "input_bytes": input_bytes(context, ops),
        "weight_groups": np.full(len(context.batch), float(repeats(context.rules, ops))),
        **{field.name: getattr(choices, field.name) for field in fields(Choices)},
    }


def _sorted_by_worth(
    context: CostContext, ops: Sequence[Op], costs: list[OpCost], is_layer: bool
) -> tuple[FloatColumn, FloatColumn]:
    """(bytes (M, U), what repeating takes (M, Q, U)) of what one layer's budget can save."""
    host = launches(context, ops, costs, is_layer=is_layer)
    made = makers(ops)
    places = [index for index, _ in made]
    sizes = np.array([context.bytes_of(tensor) for _, tensor in made])
    again = _quantities(costs, host)[:, places].swapaxes(0, 1)
    worth = again[:, 0] / np.maximum(sizes, 1.0)
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
    if chunks_loss(context.training, rules):
        elements = elements / LOSS_CHUNKS
    sharded = (context.batch.tp > 1) & loss_is_parallel(context.training, rules)
    month = training_release(context.training).named.month
    compiled = len(month) <= len("2025") or month > rules.eager_loss_until
    fused = context.fused & (~sharded | rules.framework.fuses_sharded_loss) & compiled
    whole = np.where(fused, rules.fused_loss_bytes, rules.loss_bytes)
    return elements * np.where(sharded, rules.sharded_loss_bytes, whole), elements * np.where(
        fused, 0.0, rules.loss_leftover_bytes
    )


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
