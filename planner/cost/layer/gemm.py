"""Seconds of a layer's matrix products, and what quantising their operands adds. Letters: U
distinct layouts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.layer.context import AXES, OpCost, Site, cost
from planner.cost.machine.device import FP16, SINGLE
from planner.work import axes
from planner.work.ops import Gemm, Op
from planner.work.quantised import column_parallel, row_parallel

AMAX_BYTES = 4.0
FORWARD, BACKWARD = ("input", "weight"), ("gradient", "weight_again", "input_again")


def product_cost(site: Site, op: Gemm, share: FloatColumn, read_before: BoolColumn) -> OpCost:
    """Forward r x d x c; input gradient r x c x d; weight gradient d x r x c; each in the precision
    that the recipe says.

    share: of the layers in which the recipe quantises this product.  read_before: an earlier layer
        has quantised the same tensor.
    """
    r, c, d, b = shape = tuple(
        site.product(dims) for dims in (op.rows, op.cols, op.depth, op.batch)
    )
    high = np.where(site.batch.precision == FP16, FP16, site.device.half)
    high = np.where(site.batch.param_dtype == 0, high, SINGLE)
    products = {"forward": (r, c, d), "input_grad": (r, d, c), "weight_grad": (d, c, r)}
    if not np.any(share > 0):
        plain = {
            name: site.device.gemm_seconds(*sizes, b, high) for name, sizes in products.items()
        }
        one = np.ones(len(share))
        return cost(
            site,
            **plain,
            forward_kernels=one,
            backward_kernels=2.0 * one,
            flops=2.0 * b * r * c * d,
        )
    q, seconds = site.quantises(op), {}
    does = {name: share * q.products[name] for name in products}
    for name, sizes in products.items():
        low = site.device.gemm_seconds(*sizes, b, np.where(does[name] > 0, q.precision, high))
        mixed = bool(((does[name] > 0) & (does[name] < 1)).any())
        seconds[name] = (
            does[name] * low + (1.0 - does[name]) * site.device.gemm_seconds(*sizes, b, high)
            if mixed
            else low
        )
    return _quantised_cost(
        site, op, does, shape, seconds, np.where(q.shared & read_before, 0.0, 1.0)
    )


def _quantised_cost(
    site: Site,
    op: Gemm,
    does: Mapping[str, FloatColumn],
    shape: tuple[FloatColumn, ...],
    seconds: Mapping[str, FloatColumn],
    first: FloatColumn,
) -> OpCost:
    """A layer's products and what quantising their operands adds: traffic, launches, padding of
    groups, reductions of scales.

    does: share of the layers in which each product is quantised.  shape: (r, c, d, b).  first: 1
        where its input is quantised here.
    """
    q, (r, c, d, b) = site.quantises(op), shape
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
            q.moves.get(name, zero) * quantised[name] + q.turned.get(name, zero) * elements[name]
        )
        / site.device.memory_rate
        for name in q.moves.keys() | q.turned.keys()
    }
    used = {name: q.kernels * (seconds > 0) for name, seconds in casts.items()}
    padding: FloatColumn = zero
    if op.role == "expert":
        padding = site.device.moved_seconds(
            q.number("padding")
            * does["forward"]
            * b
            * r
            * (c if op.cols == ("hidden",) else first * d)
        )
    return cost(
        site,
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
        flops=2.0 * b * r * c * d,
        **_waits(site, op, elements),
    )


def _sum(found: Mapping[str, FloatColumn], names: Sequence[str], zero: FloatColumn) -> FloatColumn:
    return np.asarray(sum((found[name] for name in names if name in found), zero))


def _waits(site: Site, op: Gemm, elements: Mapping[str, FloatColumn]) -> dict[str, FloatColumn]:
    """All-reduces of scales over the TP group that this layer waits for, as exposed communication;
    nothing where there are none.
    """
    q = site.quantises(op)
    counts = q.row_amax if row_parallel(op) else q.column_amax if column_parallel(op) else {}
    if not counts or not np.any(site.batch.tp > 1):
        return {}
    waits = {
        name: count * (elements[name] > 0) * site.amax_seconds for name, count in counts.items()
    }
    zero = np.zeros(len(site.batch))
    found = {
        "exposed_forward": np.zeros((len(AXES), len(zero))),
        "exposed_backward": np.zeros((len(AXES), len(zero))),
    }
    found["exposed_forward"][AXES.index("tp")] = _sum(waits, FORWARD, zero)
    found["exposed_backward"][AXES.index("tp")] = _sum(waits, BACKWARD, zero)
    return found


def amax_seconds(site: Site) -> FloatColumn:
    """One all-reduce of a tensor's scale over the TP group, which everything waits for; nothing
    without TP.
    """
    if not site.quantisation.active or not np.any(site.batch.tp > 1):
        return np.zeros(len(site.batch))
    degree, stride = axes.group("tp", site.batch, site.rank_order)
    return np.where(
        site.batch.tp > 1,
        site.collective_seconds("all-reduce", np.full(len(site.batch), AMAX_BYTES), degree, stride),
        0.0,
    )


def kept_weights_bytes(site: Site, ops: Sequence[Op]) -> FloatColumn:
    """Bytes of quantised weights that autograd keeps beside the parameters of one layer, (U,)."""
    total = np.zeros(len(site.batch))
    for op in ops:
        if isinstance(op, Gemm) and np.any(site.quantises(op).number("saved_weight_bytes") > 0):
            q = site.quantises(op)
            total = total + q.number("saved_weight_bytes") * q.share(op) * site.product(
                (*op.depth, *op.cols, *op.batch)
            )
    return total
