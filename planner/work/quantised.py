"""Which weights of a model a recipe quantises, and their shapes on one rank."""

from functools import lru_cache

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import LayerKind, ModelSpec
from planner.work.axes import weight_sizes
from planner.work.blocks import layer_ops
from planner.work.ops import Dims, Gemm
from planner.work.precision import Recipe, stays_16_bit

TP_DIMS = frozenset({"heads", "kv_heads", "ffn", "shared_ffn"})


@lru_cache(maxsize=4096)
def low_share(recipe: Recipe, op: Gemm, model: ModelSpec) -> float:
    """Share of the layers in which a recipe quantises this product, judged by its whole weight."""
    if op.role == "linear":
        k, n = (_whole(dims, model) for dims in (op.depth, op.cols))
        return 0.0 if stays_16_bit(recipe, k, n) else 1.0 - recipe.bf16_layers
    return float(op.role == "expert" and recipe.low and bool(recipe.experts)) * (1.0 - recipe.bf16_layers)


@lru_cache(maxsize=1024)
def quantised_weights(model: ModelSpec, kind: LayerKind, recipe: Recipe) -> int:
    """Linear weights of a layer that a recipe quantises, outside routed experts: each has its scales."""
    return sum(low_share(recipe, op, model) > 0 for op in products(model, kind) if op.role == "linear")


@lru_cache(maxsize=1024)
def quantised_in_layer(model: ModelSpec, kind: LayerKind, recipe: Recipe) -> tuple[float, float]:
    """Shares of a layer's parameters (outside routed experts, inside them) that a recipe quantises, averaged over layers."""
    routed = model.num_experts * model.expert_parameters() if kind.moe else 0
    sizes = {op.name: _whole(op.depth, model) * _whole(op.cols, model) * low_share(recipe, op, model) for op in products(model, kind)}
    linear = sum(sizes[op.name] for op in products(model, kind) if op.role == "linear")
    experts = model.num_experts * sum(sizes[op.name] for op in products(model, kind) if op.role == "expert")
    return min(1.0, linear / (model.layer_parameters(kind) - routed)), min(1.0, experts / max(routed, 1))


@lru_cache(maxsize=256)
def products(model: ModelSpec, kind: LayerKind) -> tuple[Gemm, ...]:
    """The products of a layer that a recipe may quantise."""
    return tuple(op for op in layer_ops(model, kind, True) if isinstance(op, Gemm) and op.role in ("linear", "expert"))


def _whole(dims: Dims, model: ModelSpec) -> float:
    sizes = weight_sizes(model, np.ones(1), np.ones(1))
    return float(np.prod([sizes[name][0] for name in dims]))


def local_shape(op: Gemm, model: ModelSpec, tp: FloatColumn, etp: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
    """(K, N) of a product's weight on one rank."""
    sizes = weight_sizes(model, tp, etp)
    k, n = (np.prod([sizes[name] for name in dims], axis=0) for dims in (op.depth, op.cols))
    return k, n


def row_parallel(op: Gemm) -> bool:
    """Whether TP divides what this product sums over, not its columns."""
    return bool(TP_DIMS & {*op.depth})


def column_parallel(op: Gemm) -> bool:
    """Whether TP divides this product's columns."""
    return bool(TP_DIMS & {*op.cols})
