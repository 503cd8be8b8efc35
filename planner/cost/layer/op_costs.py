"""Seconds, launches and communication of each operation of a unit, for one microbatch on one rank.

Checkpointing does not change them. Letters: U layouts. Arrays are (U,).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch
from planner.cost.layer.context import AXES, CostContext, OpCall, OpCost, cost
from planner.cost.layer.exchange import exchange_calls, exchange_cost, under_shared_experts
from planner.cost.layer.gemm import gemm_cost
from planner.cost.layer.tp_hidden import Cover, covers, hidden_seconds
from planner.cost.machine.device import SINGLE
from planner.specs.model import ModelSpec
from planner.work import axes
from planner.work.attention import UNFUSED
from planner.work.ops import Attention, Collective, Dims, Elementwise, Gemm, Op

# the call, the collective, its stream events and the copy that packs it; judgement
COLLECTIVE_LAUNCHES = 4.0
# of a large GEMM's rate, what products within chunks of a recurrence reach beside the time in which
# their kernels read and write; judgement, which no run has tested
SMALL_PRODUCTS = 0.25


def op_costs(context: CostContext, ops: Sequence[Op], model: ModelSpec) -> list[OpCost]:
    """Costs of a unit's operations, in order.

    Fused kernels quantise a tensor that several layers read only once, for the first of them. What
    is neither read nor made by attention comes from a pointwise kernel.
    """
    gemms = _gemm_costs(context, ops)
    beside = covers(ops, gemms, len(context.batch)) if _under_gemms(context) else {}
    costs = [
        gemms[op.name] if isinstance(op, Gemm) else _op_cost(context, op, model, beside)
        for op in ops
    ]
    return under_shared_experts(ops, costs) if context.rules.framework.hides_combine else costs


def _gemm_costs(context: CostContext, ops: Sequence[Op]) -> dict[str, OpCost]:
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
    return gemms


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
        backward takes 2.5 times as many in a flash kernel.
    Unfused: two batched GEMMs over the full square, and the backward of each.
    Compressed entries are more keys: those before a query, or the chosen of them.
    Source: FlashAttention-2 (Dao 2023).
    """
    s = context.sizes
    tokens, heads, widths = s["tokens"], s[op.heads], s[op.widths[0]] + s[op.widths[1]]
    seq = float(context.training.seq_len)
    window = float(min(op.window, seq)) if op.window else seq
    attended = np.full_like(tokens, window - window * window / (2.0 * seq))
    entries = seq / op.compressed if op.compressed else 0.0
    if entries:
        chosen = min(float(op.chosen or entries), entries)
        attended = attended + (chosen - chosen * chosen / (2.0 * entries))
    if context.training.attention_kernel != "unfused" and op.statistics.name != UNFUSED:
        return _flash_cost(context, op, 2.0 * tokens * attended * heads * widths, attended)
    rows, keys = np.full_like(tokens, seq), np.full_like(tokens, seq + entries)
    batch = tokens / seq * heads
    width = model.at(op.window).qk_head_dim
    depth = np.full_like(tokens, float(width))
    slow = context.device.profile.unaligned_head_slowdown if width % 8 else 1.0
    half = np.where(context.batch.param_dtype == 0, context.device.half, SINGLE)
    scores = context.device.gemm_seconds(rows, keys, depth, batch, half)
    values = context.device.gemm_seconds(rows, depth, keys, batch, half)
    both = slow * (scores + values)
    two = np.full_like(tokens, 2.0)
    return cost(
        context,
        forward=both,
        input_grad=2.0 * both,
        forward_kernels=two,
        backward_kernels=2 * two,
        flops=2.0 * tokens * keys * heads * widths,
    )


def _flash_cost(
    context: CostContext, op: Attention, flops: FloatColumn, attended: FloatColumn
) -> OpCost:
    """Cost of fused attention.

    Under context parallelism other than Ulysses it runs as `cp` shorter pieces, whose outputs are
    merged by their log-sum-exp: four fp32 passes over the output for each piece.
    Source: torch/distributed/tensor/experimental/_attention.py (_SDPAMerger).
    """
    s = context.sizes
    pieces = np.where(context.batch.cp_method == axes.ULYSSES, 1.0, context.batch.cp)
    out = s["tokens"] * s[op.heads] * s[op.widths[1]]
    merged = 4.0 * 4.0 * out * np.where(pieces > 1, pieces, 0.0)
    merging = context.device.moved_seconds(merged)
    length = 2.0 * attended / pieces
    slower = np.where(context.batch.param_dtype == 0, 1.0, context.device.single_attention)
    head = s[op.widths[1]]
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
    if op.name in ("expert_swiglu", "expert_bias"):  # the products' own kernels do it
        one = np.where(context.one_kernel, 0.0, one)
    runs = (one > 0).astype(np.float64)
    moved = {
        "forward": np.where(fused, op.moves.fused_forward, op.moves.forward),
        "input_grad": np.where(fused, op.moves.fused_backward, op.moves.backward),
    }
    seconds = {name: context.device.moved_seconds(one * moves) for name, moves in moved.items()}
    if op.products:
        flops = [_flops(context, those) for those in (op.products, op.backward_products)]
        small = SMALL_PRODUCTS * context.device.linear_rate[context.device.half]
        rate = context.device.attention_forward_rate if op.as_attention else small
        for name, made in zip(seconds, flops, strict=True):
            seconds[name] = seconds[name] + made / rate
        seconds["flops"] = flops[0]
    return cost(
        context,
        **seconds,
        forward_kernels=runs * np.where(fused, 1.0, op.kernels),
        backward_kernels=runs * np.where(fused, 1.0, 1.5 * op.kernels),
        singles=runs
        * np.where(fused & ~context.batch.compile, op.singles * context.product(op.each), 0.0),
        waits=np.where((context.batch.ep > 1) | context.rules.fused_kernels, float(op.waits), 0.0),
    )


def _flops(context: CostContext, products: Sequence[Dims]) -> FloatColumn:
    return np.asarray(2.0 * np.sum([context.product(dims) for dims in products], axis=0))


def _collective_cost(context: CostContext, op: Collective, beside: Cover | None) -> OpCost:
    """Communication of one border, without the part that a mechanism hides.

    Of any CP method (`axes.ANY`) it is the least that gathering or passing round takes.
    """
    of_any = context.batch.cp_method == axes.ANY
    if of_any.any() and any(rule.axis == "cp" for rule in axes.SITES[op.site]):
        gathered, passed = (
            _collective_cost(replace(context, batch=_with_method(context.batch, code)), op, beside)
            for code in (axes.ALLGATHER, axes.ALLTOALL)
        )
        return OpCost(
            **{
                field.name: np.minimum(getattr(gathered, field.name), getattr(passed, field.name))
                for field in fields(OpCost)
            }
        )
    size = len(context.batch)
    forward, backward = np.zeros((len(AXES), size)), np.zeros((len(AXES), size))
    for call in border_calls(context, op, beside):
        target = backward if call.backward else forward
        target[AXES.index(call.dimension)] += call.exposed
    used = (forward.sum(axis=0) > 0).astype(np.float64)
    return cost(
        context,
        exposed_forward=forward,
        exposed_backward=backward,
        singles=COLLECTIVE_LAUNCHES * used,
    )


def border_calls(context: CostContext, op: Collective, beside: Cover | None) -> Iterator[OpCall]:
    """The collectives of one border, as `axes.SITES` has them."""
    payload = context.bytes_of(op.tensor)
    for rule in axes.SITES[op.site]:
        applies = rule.applies(context.batch)
        if not applies.any():
            continue
        degree, _ = context.group(rule.axis)
        exposed = np.where(applies, 1.0 - _hidden(context, rule.axis), 0.0)
        cover = beside if rule.axis == "tp" else None
        moved = payload * degree if rule.of_parts else payload
        for backward, operation in ((False, rule.forward), (True, rule.backward)):
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
                alone = seconds = context.collective_seconds(operation, wire, rule.axis)
                if cover is not None:
                    seconds = alone - hidden_seconds(context, op, cover, alone, backward=backward)
                call = OpCall(
                    axis=rule.axis,
                    operation=operation,
                    backward=backward,
                    payload=wire * applies,
                    seconds=alone * applies,
                    exposed=exposed * seconds,
                )
                yield call
                if op.site == "tp_enter" and operation == "all-gather" and _gathers_again(context):
                    yield _again(call, cover, alone * applies)


def op_calls(
    context: CostContext, ops: Sequence[Op], model: ModelSpec
) -> Iterator[tuple[int, list[OpCall]]]:
    """(index, collectives) of the operations that communicate, as `op_costs` sums them up."""
    beside = {}
    if _under_gemms(context):
        beside = covers(ops, _gemm_costs(context, ops), len(context.batch))
    for index, op in enumerate(ops):
        if isinstance(op, Collective):
            exchanges = op.site == "ep_exchange"
            yield (
                index,
                exchange_calls(context, op, model)
                if exchanges
                else list(border_calls(context, op, beside.get(op.name))),
            )


def _under_gemms(context: CostContext) -> bool:
    """Whether any collective of tensor parallelism runs under GEMMs."""
    return bool(context.tp_hidden) or _gathers_again(context)


def _gathers_again(context: CostContext) -> bool:
    """Whether a linear's input, of which a rank saves its share, is gathered again backward."""
    sequence_parallel = context.batch.sequence_parallel & (context.batch.tp > 1)
    return not context.rules.framework.saves_gathered_inputs and bool(sequence_parallel.any())


def _again(call: OpCall, cover: Cover | None, seconds: FloatColumn) -> OpCall:
    """The backward gather of a linear's input for its weight gradient.

    It runs while the GEMM of input gradients does: max(0, gather - GEMM) is exposed.
    Source: Megatron-LM core/tensor_parallel/layers.py
        (LinearWithGradAccumulationAndAsyncCommunication.backward); Korthikanti et al. 2022, 4.2.2.
    """
    hidden = cover.input_grad if cover is not None else np.zeros_like(seconds)
    return replace(call, backward=True, exposed=np.maximum(seconds - hidden, 0.0))


def _with_method(batch: LayoutBatch, code: int) -> LayoutBatch:
    """The layouts with this CP method where any is meant."""
    return replace(batch, cp_method=np.where(batch.cp_method == axes.ANY, code, batch.cp_method))


def _hidden(context: CostContext, axis: str) -> FloatColumn:
    """Share of an axis's communication that runs under compute, (U,).

    For TP see `tp_hidden.hidden_seconds`.
    """
    profile, size = context.device.profile, len(context.batch)
    if axis == "cp":
        return np.where(context.batch.cp_method == axes.ALLTOALL, profile.cp_hidden, 0.0)
    return np.zeros(size)
