"""Seconds of a layer's matrix products, and what quantising their operands adds. Letters: U distinct layouts."""

from collections.abc import Mapping, Sequence

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.compute import FP16, SINGLE
from planner.cost.site import AXES, OpCost, Site, cost
from planner.specs.model import ModelSpec
from planner.work import axes
from planner.work.ops import Gemm, Op
from planner.work.quantised import column_parallel, row_parallel

AMAX_BYTES = 4.0


def product_cost(site: Site, op: Gemm, share: FloatColumn, read_before: BoolColumn) -> OpCost:
    """Forward r x d x c; input gradient r x c x d; weight gradient d x r x c; each in the precision that the recipe says.

    share: of the layers in which the recipe quantises this product.  read_before: an earlier layer has quantised the same tensor.
    """
    r, c, d, b = shape = tuple(site.product(dims) for dims in (op.rows, op.cols, op.depth, op.batch))
    high = np.where(site.batch.precision == FP16, FP16, site.device.half)
    high = np.where(site.batch.param_dtype == 0, high, SINGLE)
    products = {"forward": (r, c, d), "input_grad": (r, d, c), "weight_grad": (d, c, r)}
    if not np.any(share > 0):
        plain = {name: site.device.gemm_seconds(*sizes, b, high) for name, sizes in products.items()}
        one = np.ones(len(share))
        return cost(site, **plain, forward_kernels=one, backward_kernels=2.0 * one, flops=2.0 * b * r * c * d)
    q, seconds = site.quantises(op), {}
    does = {name: share * q.number(name) for name in products}
    for name, sizes in products.items():
        low = site.device.gemm_seconds(*sizes, b, np.where(does[name] > 0, q.precision, high))
        mixed = bool(((does[name] > 0) & (does[name] < 1)).any())
        seconds[name] = does[name] * low + (1.0 - does[name]) * site.device.gemm_seconds(*sizes, b, high) if mixed else low
    return _quantised_cost(site, op, does, shape, seconds, np.where(q.shared & read_before, 0.0, 1.0))


def _quantised_cost(
    site: Site,
    op: Gemm,
    does: Mapping[str, FloatColumn],
    shape: tuple[FloatColumn, ...],
    seconds: Mapping[str, FloatColumn],
    first: FloatColumn,
) -> OpCost:
    """A layer's products and what quantising their operands adds: traffic, launches, padding of groups, reductions of scales.

    does: share of the layers in which each product is quantised.  shape: (r, c, d, b).  first: 1 where its input is quantised here.
    """
    q, (r, c, d, b) = site.quantises(op), shape
    elements = {
        "input": first * does["forward"] * b * r * d, "weight": does["forward"] * b * d * c,
        "gradient": (does["input_grad"] + does["weight_grad"]) / 2.0 * b * r * c,
        "weight_again": does["input_grad"] * b * d * c, "input_again": first * does["weight_grad"] * b * r * d,
    }  # fmt: skip
    casts = {name: site.device.moved_seconds(q.moves[name] * count) for name, count in elements.items()}
    used = {name: q.kernels * np.sign(count * q.moves[name]) for name, count in elements.items()}
    grouped = 0.0 if op.role != "expert" else b * r * (c if op.cols == ("hidden",) else first * d)
    padding = site.device.moved_seconds(q.number("padding") * does["forward"] * grouped)
    forward, backward = np.zeros((len(AXES), len(first))), np.zeros((len(AXES), len(first)))
    if (column_parallel(op) or row_parallel(op)) and np.any(site.batch.tp > 1):
        counts = q.row_amax if row_parallel(op) else q.column_amax
        waits = {name: counts[name] * np.sign(count) * site.amax_seconds for name, count in elements.items()}
        forward[AXES.index("tp")] = waits["input"] + waits["weight"]
        backward[AXES.index("tp")] = waits["gradient"] + waits["weight_again"] + waits["input_again"]
    return cost(
        site,
        forward=seconds["forward"] + casts["input"] + casts["weight"] + padding,
        input_grad=seconds["input_grad"] + casts["gradient"] / 2.0 + casts["weight_again"] + padding,
        weight_grad=seconds["weight_grad"] + casts["gradient"] / 2.0 + casts["input_again"],
        forward_kernels=1.0 + used["input"] + used["weight"],
        backward_kernels=2.0 + used["gradient"] + used["weight_again"] + used["input_again"],
        flops=2.0 * b * r * c * d, exposed_forward=forward, exposed_backward=backward,
    )  # fmt: skip


def amax_seconds(site: Site) -> FloatColumn:
    """One all-reduce of a tensor's scale over the TP group, which everything waits for; nothing without TP."""
    if not site.quantisation.active or not np.any(site.batch.tp > 1):
        return np.zeros(len(site.batch))
    degree, stride = axes.group("tp", site.batch, site.rank_order)
    return np.where(site.batch.tp > 1, site.collective_seconds("all-reduce", np.full(len(site.batch), AMAX_BYTES), degree, stride), 0.0)


def kept_weights_bytes(site: Site, ops: Sequence[Op], model: ModelSpec) -> FloatColumn:
    """Bytes of quantised weights that autograd keeps beside the parameters of one layer, (U,)."""
    total = np.zeros(len(site.batch))
    for op in ops:
        if isinstance(op, Gemm) and np.any(site.quantises(op).number("saved_weight_bytes") > 0):
            q = site.quantises(op)
            total = total + q.number("saved_weight_bytes") * q.share(op, model) * site.product((*op.depth, *op.cols, *op.batch))
    return total
