"""Seconds of a layer's GEMMs, and what quantising their operands adds.

Letters: U distinct layouts.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.cost.layer.context import AXES, CostContext, OpCost, cost
from planner.cost.machine.device import FP16, SINGLE
from planner.rules.cuda_graphs import HYBRIDEP
from planner.work.axes import ANY
from planner.work.ops import Gemm, Op
from planner.work.quantised import column_parallel, row_parallel

AMAX_BYTES = 4.0
BACKWARD_PRODUCTS = ("input_grad", "weight_grad")
# HybridEP pads while it dispatches (Megatron-LM moe_utils.py, skip_routed_expert_padding), and so
# may the best of any dispatcher
PADS = (HYBRIDEP, ANY)
FORWARD, BACKWARD = ("input", "weight"), ("gradient", "weight_again", "input_again")


def gemm_cost(
    context: CostContext,
    op: Gemm,
    share: FloatColumn,
    read_before: BoolColumn,
    fuses: Collection[str] = (),
) -> OpCost:
    """Cost of a linear layer's three GEMMs, each in the precision that its recipe says.

    Forward r x d x c, input gradient r x c x d, weight gradient d x r x c.
    share: of the layers in which the recipe quantises this GEMM.
    read_before: an earlier operation has quantised the same tensor.
    fuses: operands ("input", "gradient") that pointwise kernels make.
    """
    r, c, d, b = shape = tuple(
        context.product(dims) for dims in (op.rows, op.cols, op.depth, op.batch)
    )
    high = np.where(context.batch.precision == FP16, FP16, context.device.half)
    high = np.where(context.batch.param_dtype == 0, high, SINGLE)
    gemms = {"forward": (r, c, d), "input_grad": (r, d, c), "weight_grad": (d, c, r)}
    if not np.any(share > 0):
        plain = _product_seconds(context, op, gemms, dict.fromkeys(gemms, high))
        one = np.ones(len(share))
        return cost(
            context,
            **plain,
            forward_kernels=one,
            backward_kernels=2.0 * one,
            singles=_calls_of_experts(context, op),
            flops=_flops(context, op),
        )
    q = context.quantises(op)
    does = {name: share * q.products[name] for name in gemms}
    codes = {
        name: np.where(of > 0, q.precision if name == "forward" else q.gradient_precision, high)
        for name, of in does.items()
    }
    seconds = _product_seconds(context, op, gemms, codes)
    for name in BACKWARD_PRODUCTS:
        rescaled = np.where(does[name] > 0, q.rescaled, 0.0) * b * gemms[name][0] * gemms[name][1]
        seconds[name] = seconds[name] + context.device.moved_seconds(rescaled)
    mixed = [name for name, of in does.items() if ((of > 0) & (of < 1)).any()]
    if mixed:
        sizes = {name: gemms[name] for name in mixed}
        rest = _product_seconds(context, op, sizes, dict.fromkeys(mixed, high))
        for name in mixed:
            seconds[name] = does[name] * seconds[name] + (1.0 - does[name]) * rest[name]
    first = np.where(q.shared & read_before, 0.0, 1.0)
    return _quantised_cost(context, op, does, shape, seconds, first, fuses)


def _quantised_cost(
    context: CostContext,
    op: Gemm,
    does: Mapping[str, FloatColumn],
    shape: tuple[FloatColumn, ...],
    seconds: Mapping[str, FloatColumn],
    first: FloatColumn,
    fuses: Collection[str],
) -> OpCost:
    """Cost of a layer's GEMMs with quantised operands.

    Quantising adds memory traffic, launches, padding of groups and reductions of scales.
    does: share of the layers in which each GEMM is quantised.
    shape: (r, c, d, b).
    first: 1 where the input is quantised here.
    fuses: see `gemm_cost`.
    """
    q, (r, c, d, b) = context.quantises(op), shape
    inputs, weights = b * r * d, b * d * c
    elements = {
        "input": first * does["forward"] * inputs,
        "weight": does["forward"] * weights,
        "gradient": (does["input_grad"] + does["weight_grad"]) / 2.0 * b * r * c,
        "weight_again": does["input_grad"] * weights,
        "input_again": first * does["weight_grad"] * inputs,
    }
    zero = np.zeros(len(first))
    whole = {"input": not column_parallel(op), "gradient": not row_parallel(op)}
    quantised = {
        name: count if whole.get(name, True) else count * q.shard.get(name, 1.0)
        for name, count in elements.items()
    }
    casts = {
        name: (
            (q.moves.get(name, zero) - (q.spared if name in fuses else 0.0)) * quantised[name]
            + q.turned.get(name, zero) * elements[name]
        )
        / context.device.memory_rate
        for name in q.moves.keys() | q.turned.keys()
    }
    if op.role == "expert":  # what lies between the products is quantised where it is made
        inside = "input" if op.cols == ("expert_hidden",) else "gradient"
        names = {name for name in casts if name.startswith(inside)}
        casts |= {name: np.where(context.one_kernel, 0.0, casts[name]) for name in names}
    used = {name: q.kernels * (seconds > 0) for name, seconds in casts.items()}
    padding, singles = zero, _calls_of_experts(context, op)
    if op.role == "expert":
        singles = singles + q.number("expert_launches") * does["forward"] * b
        padding = context.device.moved_seconds(
            np.where(np.isin(context.batch.moe_dispatcher, PADS), 0.0, q.number("padding"))
            * does["forward"]
            * b
            * r
            * (c if op.cols == ("expert_hidden",) else first * d)
        )
    return cost(
        context,
        forward=seconds["forward"] + _sum(casts, FORWARD, zero) + padding,
        input_grad=seconds["input_grad"]
        + casts.get("gradient", zero) / 2.0
        + casts.get("weight_again", zero)
        + padding,
        weight_grad=seconds["weight_grad"]
        + casts.get("gradient", zero) / 2.0
        + casts.get("input_again", zero),
        forward_kernels=1.0 + _sum(used, FORWARD, zero),
        backward_kernels=2.0 + _sum(used, BACKWARD, zero),
        singles=singles,
        flops=_flops(context, op),
        **_waits(context, op, elements),
    )


def _product_seconds(
    context: CostContext,
    op: Gemm,
    sizes: Mapping[str, tuple[FloatColumn, FloatColumn, FloatColumn]],
    precisions: Mapping[str, IntColumn],
) -> dict[str, FloatColumn]:
    """Seconds of some of a layer's three products; routed experts' are grouped.

    sizes: (rows, cols, depth) of each.
    """
    groups = context.product(op.batch)
    if op.role != "expert":
        rows, cols, depth = (np.array(column) for column in zip(*sizes.values(), strict=True))
        codes = np.array([precisions[name] for name in sizes])
        found = context.device.gemm_seconds(rows, cols, depth, groups, codes)
        return dict(zip(sizes, found, strict=True))
    return {
        name: context.device.grouped_gemm_seconds(
            *of_product,
            groups,
            precisions[name],
            tokens=context.product(op.rows),
            vendor=context.rules.fused_kernels,
            gradient_bytes=_gradient_bytes(context) if name == "weight_grad" else None,
        )
        for name, of_product in sizes.items()
    }


def _flops(context: CostContext, op: Gemm) -> FloatColumn:
    """Flops of the forward product on a mean rank, (U,); its seconds are the busiest rank's."""
    rows = ("tokens_of_mean_expert",) if op.role == "expert" else op.rows
    return 2.0 * context.product((*rows, *op.cols, *op.depth, *op.batch))


def _gradient_bytes(context: CostContext) -> FloatColumn:
    """Bytes that the product of a weight gradient moves for one weight, (U,).

    A GEMM that adds to the gradient reads and writes it; otherwise it writes 16 bits (32 where
    parameters are fp32).
    """
    if not context.rules.fused_sums:
        return context.width_bytes("compute")
    return 2.0 * context.batch.reduce_bytes


def _calls_of_experts(context: CostContext, op: Gemm) -> FloatColumn:
    """Launches in each direction besides one a product, where experts run one by one, (U,).

    Transformer Engine's GroupedLinear calls cuBLAS for each expert (csrc/extensions/gemm.cpp,
    te_general_grouped_gemm); TorchTitan loops over experts where torch._grouped_mm cannot run
    (models/moe/moe.py, _run_experts_for_loop). Three products in two directions: 1.5 each way.
    """
    each = context.rules.fused_kernels or context.device.loops_over_experts
    if op.role != "expert" or not each:
        return np.zeros(len(context.batch))
    return np.where(context.one_kernel, 0.0, 1.5 * (context.product(op.batch) - 1.0))


def _sum(found: Mapping[str, FloatColumn], names: Sequence[str], zero: FloatColumn) -> FloatColumn:
    return np.asarray(sum((found[name] for name in names if name in found), zero))


def _waits(
    context: CostContext, op: Gemm, elements: Mapping[str, FloatColumn]
) -> dict[str, FloatColumn]:
    """Exposed seconds of the scales' all-reduces over the TP group; empty where there are none."""
    q = context.quantises(op)
    counts = q.row_amax if row_parallel(op) else q.column_amax if column_parallel(op) else {}
    if not counts or not np.any(context.batch.tp > 1):
        return {}
    waits = {
        name: count * (elements[name] > 0) * context.amax_seconds for name, count in counts.items()
    }
    zero = np.zeros(len(context.batch))
    found = {
        "exposed_forward": np.zeros((len(AXES), len(zero))),
        "exposed_backward": np.zeros((len(AXES), len(zero))),
    }
    found["exposed_forward"][AXES.index("tp")] = _sum(waits, FORWARD, zero)
    found["exposed_backward"][AXES.index("tp")] = _sum(waits, BACKWARD, zero)
    return found


def amax_seconds(context: CostContext) -> FloatColumn:
    """Seconds of one exposed all-reduce of a tensor's scale over the TP group, (U,).

    0 without TP.
    """
    if not context.quantisation.active or not np.any(context.batch.tp > 1):
        return np.zeros(len(context.batch))
    bytes_of_each = np.full(len(context.batch), AMAX_BYTES)
    return np.where(
        context.batch.tp > 1, context.collective_seconds("all-reduce", bytes_of_each, "tp"), 0.0
    )


def kept_weights_bytes(context: CostContext, ops: Sequence[Op]) -> FloatColumn:
    """Bytes of quantised weights that autograd saves besides one layer's parameters, (U,)."""
    total = np.zeros(len(context.batch))
    for op in ops:
        if isinstance(op, Gemm) and np.any(context.quantises(op).number("saved_weight_bytes") > 0):
            q = context.quantises(op)
            total = total + q.number("saved_weight_bytes") * q.share(op) * context.product(
                (*op.depth, *op.cols, *op.batch)
            )
    return total
