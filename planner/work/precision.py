"""Precision recipes: one row per value of `layout.precision`, read as columns by code."""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, IntColumn
from planner.specs.layout import PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How linear layers compute.

    peak: which dense peak of the GPU applies.  cast_moves: elements of each high-precision operand read and written to
    quantise it, in bytes per element, eager; fused_cast_moves the same in a compiled kernel (amax pass + cast).
    saved_bytes: what a linear layer keeps of its input for backward.  wire_bytes: of a gathered parameter with
    float8_all_gather.  gain_key: the profile's parameter for the achieved share of the peak.
    Source: torchao float8 README and float8_linear.py (dynamic scaling keeps the bf16 input), Transformer Engine (keeps fp8).
    """

    name: str
    peak: str
    gain_key: str
    cast_moves: float
    fused_cast_moves: float
    saved_bytes: float
    wire_bytes: float


RECIPES: tuple[Recipe, ...] = (
    Recipe(name="bf16", peak="bf16", gain_key="gemm_bf16", cast_moves=0, fused_cast_moves=0, saved_bytes=2, wire_bytes=2),
    Recipe(name="fp16", peak="fp16", gain_key="gemm_bf16", cast_moves=0, fused_cast_moves=0, saved_bytes=2, wire_bytes=2),
    Recipe(name="float8-tensorwise", peak="fp8", gain_key="gemm_fp8", cast_moves=16, fused_cast_moves=5, saved_bytes=2, wire_bytes=1),
    Recipe(name="float8-rowwise", peak="fp8", gain_key="gemm_fp8_rowwise", cast_moves=18, fused_cast_moves=6, saved_bytes=2, wire_bytes=2),
    Recipe(name="float8-delayed", peak="fp8", gain_key="gemm_fp8", cast_moves=3, fused_cast_moves=3, saved_bytes=1, wire_bytes=2),
    Recipe(
        name="float8-blockwise", peak="fp8", gain_key="gemm_fp8_rowwise", cast_moves=3.5, fused_cast_moves=3.5, saved_bytes=1, wire_bytes=2
    ),
    Recipe(name="mxfp8", peak="fp8", gain_key="gemm_fp8", cast_moves=6, fused_cast_moves=3.5, saved_bytes=1, wire_bytes=2),
    Recipe(name="nvfp4", peak="fp4", gain_key="gemm_fp4", cast_moves=5, fused_cast_moves=4.5, saved_bytes=1, wire_bytes=2),
)
if tuple(recipe.name for recipe in RECIPES) != PRECISIONS:
    raise AssertionError("RECIPES must follow the order of PRECISIONS")


def column(field: str, precision: IntColumn) -> FloatColumn:
    """One numeric field of the recipes, gathered by precision code: (N,) -> (N,)."""
    return np.array([float(getattr(recipe, field)) for recipe in RECIPES])[precision]
