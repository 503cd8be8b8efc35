"""Which weights of a model a recipe quantises, and their shapes on one rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.columns import FloatColumn
from planner.precision import Recipe, bf16_tail, stays_16_bit
from planner.specs.model import LayerKind, ModelSpec
from planner.work.axes import weight_sizes
from planner.work.blocks import layer_ops
from planner.work.heads import TP_DIMS as HEADS_CUT
from planner.work.mixers import MIXERS
from planner.work.ops import Dims, Gemm

TP_DIMS = frozenset({*HEADS_CUT, "ffn", "wide_ffn", "shared_ffn", "hidden_cut"}).union(
    *(work.cut for work in MIXERS.values())
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedModel:
    """Parts of one model that recipes quantise; (recipes,) or (kinds of layer, recipes).

    shares: by the GEMM's name, share of the layers in which it is quantised.
    dense, expert: shares of a layer's parameters outside routed experts and inside them.
    weights: quantised linear weights of a layer outside routed experts; each has its scales.
    """

    recipes: tuple[Recipe, ...]
    shares: Mapping[str, FloatColumn]
    dense: FloatColumn
    expert: FloatColumn
    weights: FloatColumn


@lru_cache(maxsize=256)
def quantised_model(model: ModelSpec, recipes: tuple[Recipe, ...]) -> QuantisedModel:
    kinds = [kind for kind, _ in model.distinct_layers()]
    every = {op.name: op for kind in kinds for op in products(model, kind)}
    shares = {
        name: np.array([low_share(recipe, op, model) for recipe in recipes])
        for name, op in every.items()
    }
    sizes = {
        name: _whole(op.depth, model) * _whole(op.cols, model) * shares[name]
        for name, op in every.items()
    }
    dense, expert, weights = (np.zeros((len(kinds), len(recipes))) for _ in range(3))
    for row, kind in enumerate(kinds):
        routed = model.num_experts * model.parameters.expert() if kind.moe else 0
        for op in products(model, kind):
            if op.role == "expert":
                expert[row] += model.num_experts * sizes[op.name] / routed
            else:
                dense[row] += sizes[op.name] / (model.parameters.layer(kind) - routed)
                weights[row] += shares[op.name] > 0
    return QuantisedModel(
        recipes=recipes,
        shares=shares,
        dense=np.minimum(dense, 1.0),
        expert=np.minimum(expert, 1.0),
        weights=weights,
    )


def low_share(recipe: Recipe, op: Gemm, model: ModelSpec) -> float:
    """Share of the layers in which a recipe quantises this GEMM, judged by its whole weight."""
    if op.role == "linear":
        k, n = (_whole(dims, model) for dims in (op.depth, op.cols))
        taken = not stays_16_bit(recipe, k, n)
    else:
        taken = recipe.low and bool(recipe.experts)
    return float(taken) * (
        1.0 - bf16_tail(recipe, model.num_hidden_layers) / model.num_hidden_layers
    )


@lru_cache(maxsize=256)
def products(model: ModelSpec, kind: LayerKind) -> tuple[Gemm, ...]:
    """The GEMMs of a layer that a recipe may quantise."""
    return tuple(
        op
        for op in layer_ops(model, kind, True)
        if isinstance(op, Gemm) and op.role in ("linear", "expert")
    )


def _whole(dims: Dims, model: ModelSpec) -> float:
    sizes = _whole_sizes(model)
    return math.prod(sizes[name] for name in dims)


@lru_cache(maxsize=64)
def _whole_sizes(model: ModelSpec) -> Mapping[str, float]:
    """`axes.weight_sizes` of whole weights."""
    sizes = weight_sizes(model, np.ones(1), np.ones(1))
    return {name: float(size[0]) for name, size in sizes.items()}


def local_shape(
    op: Gemm, model: ModelSpec, tp: FloatColumn, etp: FloatColumn
) -> tuple[FloatColumn, FloatColumn]:
    """(K, N) of a GEMM's weight on one rank."""
    sizes = weight_sizes(model, tp, etp)
    k, n = (np.prod([sizes[name] for name in dims], axis=0) for dims in (op.depth, op.cols))
    return k, n


def row_parallel(op: Gemm) -> bool:
    return bool(TP_DIMS & {*op.depth})


def column_parallel(op: Gemm) -> bool:
    return bool(TP_DIMS & {*op.cols})
