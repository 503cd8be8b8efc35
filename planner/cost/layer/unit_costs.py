"""Seconds and bytes of one layer, the embedding or the head, for one microbatch on one rank.

They are priced operation by operation (`work.blocks`).
Letters: U layouts that differ in the fields of `key`, K distinct layers. Arrays are (U,) or
(K + 2, U). Units are the model's distinct layers in the order of `ModelSpec.distinct_layers()`,
then the embedding, then the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch, in_order
from planner.cost.layer.context import AXES, CostContext, OpCost, cost
from planner.cost.layer.exchange import exchange_cost, under_shared_experts
from planner.cost.layer.gemm import amax_seconds, gemm_cost, kept_weights_bytes
from planner.cost.layer.host_time import host_time
from planner.cost.layer.tp_hidden import Cover, covers, hidden_seconds, hidden_shares
from planner.cost.layer.weight_grads import held_bytes, redone_seconds
from planner.cost.machine.device import SINGLE, Device
from planner.precision import PRECISIONS, Recipe
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.trainers.registry import training_release
from planner.trainers.release import torch_release
from planner.work import axes, blocks
from planner.work.axes import loss_is_parallel
from planner.work.checkpointing import NONE, Recomputation, graph_share, kept
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op
from planner.work.pieces import HIDDEN, HIDDEN_SP, LOSS_CHUNKS, Code

_KEY = (
    "tp", "cp", "ep", "etp", "sequence_parallel", "async_tp", "cp_method", "micro_batch_size",
    "ac_kind", "ac_value",
    "precision", "float8_all_gather", "param_dtype", "reduce_dtype", "compile", "moe_dispatcher",
)  # fmt: skip
FUSED_NORM_SINCE = (2, 8)
PLANNED_WORKING = 0.5  # a compiled graph reuses its buffers (torch/_inductor/memory.py); judgement
# the call, the collective, its stream events and the copy that packs it; judgement
COLLECTIVE_LAUNCHES = 4.0


def key(
    rank_order: tuple[str, ...],
    model: ModelSpec,
    recipes: tuple[Recipe, ...],
    *,
    overlaps_exchange: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layout fields that a unit's costs depend on: (their values, whether they are above 1).

    They are those of its own work, and the axes inside tp and cp, which place the groups of both.
    overlaps_exchange: `training.overlap.ep`, which not every pipeline allows.
    """
    outermost = max(rank_order.index("tp"), rank_order.index("cp"))
    places = tuple(name for name in rank_order[:outermost] if name not in _KEY)
    asks_for_pp = model.is_moe and (
        overlaps_exchange or any(recipe.experts_alone for recipe in recipes)
    )
    more = ("pp",) * asks_for_pp + ("virtual_stages",) * overlaps_exchange
    return _KEY + places, tuple(name for name in more if name not in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """One microbatch of each unit on one rank; (K + 2, U) unless said otherwise.

    forward_seconds, input_grad_seconds, weight_grad_seconds, recompute_seconds: kernels alone.
    launch_forward_seconds, launch_input_grad_seconds, launch_weight_grad_seconds: what the device
        idles because launches take longer than kernels (`host_time`).
    wait_forward_seconds, wait_backward_seconds: what it idles because the host waited for it.
    exposed_forward, exposed_backward (3 axes tp, cp, ep; K + 2; U): seconds of communication that
        nothing hides.
    saved_bytes: saved from forward to backward.
    transient_bytes, done_bytes, next_bytes, second_bytes: in backward (`checkpointing.Kept`).
    working_bytes: computed in forward and freed there.
    held_bytes: bytes that wait for weight gradients computed later (`cost.layer.weight_grads`).
    redone_seconds: what these weight gradients recompute.
    forward_flops, recompute_flops: of matmuls and attention.
    logits_bytes (U,): at the peak of the loss.
    leftover_bytes (U,): of logits freed by then and still cached.
    chunks_bytes (U,): hidden states of a chunked loss, and their gradient; 0 for a whole one.
    chunk_logits_bytes (U,): gradient of one chunk's logits.
    boundary_bytes (U,): activation handed to the next stage.
    """

    forward_seconds: FloatColumn
    input_grad_seconds: FloatColumn
    weight_grad_seconds: FloatColumn
    recompute_seconds: FloatColumn
    launch_forward_seconds: FloatColumn
    launch_input_grad_seconds: FloatColumn
    launch_weight_grad_seconds: FloatColumn
    wait_forward_seconds: FloatColumn
    wait_backward_seconds: FloatColumn
    exposed_forward: FloatColumn
    exposed_backward: FloatColumn
    saved_bytes: FloatColumn
    transient_bytes: FloatColumn
    done_bytes: FloatColumn
    next_bytes: FloatColumn
    second_bytes: FloatColumn
    working_bytes: FloatColumn
    held_bytes: FloatColumn
    redone_seconds: FloatColumn
    forward_flops: FloatColumn
    recompute_flops: FloatColumn
    logits_bytes: FloatColumn
    leftover_bytes: FloatColumn
    chunks_bytes: FloatColumn
    chunk_logits_bytes: FloatColumn
    boundary_bytes: FloatColumn


def unit_costs(context: CostContext, model: ModelSpec) -> UnitCosts:
    """Costs of every unit of the model at the U layouts of `context`."""
    flash, code = (
        context.training.attention_kernel != "unfused",
        trainer_code(context.training, context.rules),
    )
    context = replace(context, amax_seconds=amax_seconds(context), tp_hidden=hidden_shares(context))
    parts = [
        _layer(context, blocks.layer_ops(model, kind, flash, code), kind, model, is_layer=True)
        for kind, _ in model.distinct_layers()
    ]
    plain = LayerKind(moe=False, window=0)
    keep_all = _without_checkpointing(context)
    parts += [
        _layer(keep_all, ops, plain, model, is_layer=False)
        for ops in (blocks.embedding_ops(), blocks.head_ops(model, code))
    ]
    stacked = {name: np.stack([part[name] for part in parts], axis=-2) for name in parts[0]}
    logits, leftover = _logits_bytes(context)
    chunks, chunk_logits = _chunks_bytes(context)
    return UnitCosts(
        **stacked,
        logits_bytes=logits,
        leftover_bytes=leftover,
        chunks_bytes=chunks,
        chunk_logits_bytes=chunk_logits,
        boundary_bytes=context.product(HIDDEN_SP) * context.width_bytes("compute"),
    )


def trainer_code(training: TrainingSpec, rules: TrainerRules) -> Code:
    """What this run's software saves in eager mode."""
    return Code(
        composite_norm=composite_norm(training, rules),
        repeats_kv=repeats_kv(training, rules),
        scores_first=rules.framework.scores_first,
        chunks_loss=chunks_loss(training, rules),
        expert_path=rules.framework.expert_path,
        compiles_exchange=rules.at(training_release(training)).compiles_exchange,
        drops_residual=rules.drops_residual,
    )


def chunks_loss(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether head and loss run on chunks of the tokens.

    Where the job does not say, the trainer's release does.
    """
    return rules.chunked_loss if training.chunked_loss is None else training.chunked_loss


def composite_norm(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether eager RMSNorm runs as a chain of kernels that saves fp32 copies.

    It does in torch before 2.8 (aten::_fused_rms_norm is later). Where torch's release is not
    given, the trainer's release or the date of its commit decides (`composite_norm_until`).
    """
    if rules.fused_kernels:
        return False
    if training.torch_version is None:
        month = training_release(training).named.month
        fused_before = len(month) > len("2024") and month < rules.composite_norm_since
        return not fused_before and training_release(training).not_after(
            *rules.composite_norm_until
        )
    return torch_release(training.torch_version) < FUSED_NORM_SINCE


def repeats_kv(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether keys and values are copied to all query heads.

    The trainer's release decides, or the date of its commit (`repeats_kv_until`).
    """
    return training_release(training).not_after(*rules.repeats_kv_until)


def _without_checkpointing(context: CostContext) -> CostContext:
    batch = replace(context.batch, ac_kind=np.full(len(context.batch), NONE))
    return replace(context, batch=batch)


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


def _layer(
    context: CostContext, ops: Sequence[Op], kind: LayerKind, model: ModelSpec, *, is_layer: bool
) -> dict[str, FloatColumn]:
    costs = _op_costs(context, ops, model)
    forward = np.array([c.forward for c in costs])
    if any(not isinstance(op, Collective) and op.saves for op in ops):
        again = Recomputation(context.rules.early_stop, model.num_hidden_layers)
        keeps = kept(ops, context.batch, context.bytes_of, forward, context.fused, again)
        weights, stays = kept_weights_bytes(context, ops), graph_share(context.batch)
        saved, transient = (
            keeps.saved_bytes + stays * weights,
            keeps.transient_bytes + (1.0 - stays) * weights,
        )
        done, following = (
            keeps.done_bytes - stays * weights,
            keeps.next_bytes + (1.0 - 2.0 * stays) * weights,
        )
        second = keeps.second_bytes + (1.0 + stays) * weights
        working, redone = (
            keeps.working_bytes * np.where(context.fused, PLANNED_WORKING, 1.0),
            keeps.redone,
        )
    else:
        saved = transient = done = following = second = working = np.zeros(len(context.batch))
        redone = np.zeros_like(forward)
    flops = np.array([c.flops for c in costs])
    exposed_forward = np.array([c.exposed_forward for c in costs])
    exposed_again = in_order(redone[:, None] * exposed_forward)
    totals = {
        "forward_seconds": in_order(forward),
        "input_grad_seconds": in_order([c.input_grad for c in costs]),
        "weight_grad_seconds": in_order([c.weight_grad for c in costs]),
        "recompute_seconds": in_order(redone * forward),
        **host_time(context, ops, costs, redone, is_layer=is_layer),
        "saved_bytes": saved,
        "transient_bytes": transient,
        "done_bytes": done,
        "next_bytes": following,
        "second_bytes": second,
        "working_bytes": working,
        "forward_flops": in_order(flops),
        "recompute_flops": in_order(redone * flops),
        "exposed_forward": in_order(exposed_forward),
        "exposed_backward": in_order([c.exposed_backward for c in costs]) + exposed_again,
    }
    redone_again = totals["recompute_seconds"] + in_order(exposed_again)
    return totals | {
        "held_bytes": held_bytes(context, ops, saved),
        "redone_seconds": redone_seconds(context, ops, redone_again),
    }


def _op_costs(context: CostContext, ops: Sequence[Op], model: ModelSpec) -> list[OpCost]:
    """Costs of operations in order.

    Fused kernels quantise a tensor that several layers read only once, for the first of them. What
    is neither read nor made by attention comes from a pointwise kernel.
    """
    gemms: dict[str, OpCost] = {}
    read: dict[str, BoolColumn] = {}
    beside_attention = {
        name
        for op in ops
        if isinstance(op, Attention)
        for name in (op.output.name, *(tensor.name for tensor in op.reads))
    }
    for op in ops:
        if isinstance(op, Gemm):
            share = context.quantises(op).share(op)
            source = op.saves[0].name
            before = read.get(source, np.zeros(len(share), dtype=np.bool_))
            ends = {"input": source, "gradient": op.output.name}
            fuses = {end for end, name in ends.items() if name not in beside_attention}
            gemms[op.name] = gemm_cost(context, op, share, before, fuses)
            read[source] = before | (share > 0)
    beside = covers(ops, gemms, len(context.batch)) if context.tp_hidden else {}
    costs = [
        gemms[op.name] if isinstance(op, Gemm) else _op_cost(context, op, model, beside)
        for op in ops
    ]
    return under_shared_experts(ops, costs) if context.rules.framework.hides_combine else costs


def _op_cost(
    context: CostContext,
    op: Attention | Elementwise | Collective,
    model: ModelSpec,
    beside: Mapping[str, Cover],
) -> OpCost:
    if isinstance(op, Attention):
        return _attention_cost(context, op, model)
    if isinstance(op, Elementwise):
        return _elementwise_cost(context, op)
    if op.site == "ep_exchange":
        return exchange_cost(context, op, model)
    return _collective_cost(context, op, beside.get(op.name))


def _attention_cost(context: CostContext, op: Attention, model: ModelSpec) -> OpCost:
    """Cost of attention, fused (`_flash_cost`) or as two batched GEMMs.

    Flops: 2 T ctx heads (d_qk + d_v), with the mean context of a causal (windowed) mask. The
        backward
    takes 2.5 times as many in a flash kernel.
    Unfused: two batched GEMMs over the full square, and the backward of each.
    Source: FlashAttention-2 (Dao 2023).
    """
    s = context.sizes
    tokens, heads, widths = s["tokens"], s["heads"], float(model.qk_head_dim + model.v_dim)
    seq = float(context.training.seq_len)
    window = float(min(op.window, seq)) if op.window else seq
    attended = np.full_like(tokens, window - window * window / (2.0 * seq))
    if context.training.attention_kernel != "unfused":
        return _flash_cost(context, 2.0 * tokens * attended * heads * widths, attended, model)
    rows, batch = np.full_like(tokens, seq), tokens / seq * heads
    depth = np.full_like(tokens, float(model.qk_head_dim))
    slow = context.device.profile.unaligned_head_slowdown if model.qk_head_dim % 8 else 1.0
    half = np.where(context.batch.param_dtype == 0, context.device.half, SINGLE)
    scores = context.device.gemm_seconds(rows, rows, depth, batch, half)
    values = context.device.gemm_seconds(rows, depth, rows, batch, half)
    both = slow * (scores + values)
    two = np.full_like(tokens, 2.0)
    return cost(
        context,
        forward=both,
        input_grad=2.0 * both,
        forward_kernels=two,
        backward_kernels=2 * two,
        flops=2.0 * tokens * seq * heads * widths,
    )


def _flash_cost(
    context: CostContext, flops: FloatColumn, attended: FloatColumn, model: ModelSpec
) -> OpCost:
    """Cost of fused attention.

    Under context parallelism other than Ulysses it runs as `cp` shorter pieces, whose outputs are
    merged by their log-sum-exp: four fp32 passes over the output for each piece.
    Source: torch/distributed/tensor/experimental/_attention.py (_SDPAMerger).
    """
    s = context.sizes
    pieces = np.where(context.batch.cp_method == axes.ULYSSES, 1.0, context.batch.cp)
    merged = 4.0 * 4.0 * s["tokens"] * s["heads"] * model.v_dim * np.where(pieces > 1, pieces, 0.0)
    merging = context.device.moved_seconds(merged)
    length = 2.0 * attended / pieces
    slower = np.where(context.batch.param_dtype == 0, 1.0, context.device.single_attention)
    head = float(model.v_dim)
    forward = slower * context.device.attention_seconds(
        flops, length, backward=False, head_size=head
    )
    backward = slower * context.device.attention_seconds(
        2.5 * flops, length, backward=True, head_size=head
    )
    return cost(
        context,
        forward=forward + merging,
        input_grad=backward + merging,
        forward_kernels=3.0 * pieces,
        backward_kernels=6.0 * pieces,
        flops=flops,
    )


def _elementwise_cost(context: CostContext, op: Elementwise) -> OpCost:
    one = (
        context.product(op.dims)
        * context.width_bytes(op.width)
        * context.device.profile.elementwise
    )
    fused = context.fused & (op.compiles | context.rules.fused_kernels)
    runs = (one > 0).astype(np.float64)
    return cost(
        context,
        forward=context.device.moved_seconds(
            one * np.where(fused, op.fused_forward_moves, op.forward_moves)
        ),
        input_grad=context.device.moved_seconds(
            one * np.where(fused, op.fused_backward_moves, op.backward_moves)
        ),
        forward_kernels=runs * np.where(fused, 1.0, op.kernels),
        backward_kernels=runs * np.where(fused, 1.0, 1.5 * op.kernels),
        singles=runs * np.where(fused & ~context.batch.compile, float(op.singles), 0.0),
        waits=np.where((context.batch.ep > 1) | context.rules.fused_kernels, float(op.waits), 0.0),
    )


def _collective_cost(context: CostContext, op: Collective, beside: Cover | None) -> OpCost:
    """Communication of one border; what a mechanism hides of it is left out."""
    size = len(context.batch)
    forward, backward = np.zeros((len(AXES), size)), np.zeros((len(AXES), size))
    payload = context.bytes_of(op.tensor)
    for rule in axes.SITES[op.site]:
        applies = rule.applies(context.batch)
        if not applies.any():
            continue
        degree, stride = axes.group(rule.axis, context.batch, context.rank_order)
        place = AXES.index("tp" if rule.axis == "etp" else rule.axis)
        exposed = np.where(applies, 1.0 - _hidden(context, rule.axis), 0.0)
        cover = beside if rule.axis == "tp" else None
        moved = payload * degree if rule.of_parts else payload
        for target, operation in ((forward, rule.forward), (backward, rule.backward)):
            if operation is not None:
                quantised = (
                    rule.axis == "tp"
                    and operation == "all-gather"
                    and op.linear
                    and context.quantisation.active
                )
                operand = "input" if op.site == "tp_enter" else "gradient"
                wire = (
                    moved * context.quantisation.tp_wire(operand, context.width_bytes("compute"))
                    if quantised
                    else moved
                )
                seconds = context.collective_seconds(operation, wire, degree, stride)
                if cover is not None:
                    seconds = seconds - hidden_seconds(
                        context, op, cover, seconds, backward=target is backward
                    )
                target[place] += exposed * seconds
    used = (forward.sum(axis=0) > 0).astype(np.float64)
    return cost(
        context,
        exposed_forward=forward,
        exposed_backward=backward,
        singles=COLLECTIVE_LAUNCHES * used,
    )


def _hidden(context: CostContext, axis: str) -> FloatColumn:
    """Share of an axis's communication that runs under compute, (U,).

    For TP see `tp_hidden.hidden_seconds`.
    """
    profile, size = context.device.profile, len(context.batch)
    if axis == "cp":
        return np.where(context.batch.cp_method == axes.ALLTOALL, profile.cp_hidden, 0.0)
    return np.zeros(size)


def fused_kernels(batch: LayoutBatch, rules: TrainerRules) -> BoolColumn:
    """Whether memory-bound operations run fused: by torch.compile or by the trainer's kernels."""
    return np.asarray(batch.compile | rules.fused_kernels)


def lacking_precisions(device: Device) -> tuple[str, ...]:
    """Recipes that this GPU has no rate for."""
    return tuple(
        name for name, rate in zip(PRECISIONS, device.linear_rate, strict=False) if np.isnan(rate)
    )
