"""Precision recipes: how a library computes linear layers in each value of `layout.precision`, read
as columns by code.

Two libraries quantise: torchao (TorchTitan, plain torch) and Transformer Engine (the Megatron
family). Moves are bytes read and written per element of an operand, counted kernel by kernel.
Sources, by file: torchao 0.18 float8/{float8_linear, float8_ops, float8_training_tensor,
float8_utils, fsdp_utils, float8_linear_utils, float8_tensor_parallel}.py,
prototype/moe_training/{mxfp8_linear, nvfp4_training/nvfp4_linear}.py,
prototype/blockwise_fp8_training/linear.py; torchtitan 0.1.0, 0.2.2 and 0.3.0
components/quantization and models/llama3/infra/parallelize.py; Transformer Engine
docs/features/low_precision_training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.columns import FloatColumn, IntColumn
from planner.specs.layout import PRECISIONS
from planner.trainers.registry import TrainerRules
from planner.trainers.release import named, release_of

# its fp8 recipes set fp8_param_gather (Megatron Bridge training/mixed_precision.py); Megatron-LM's
# default is off
NATIVE = "NeMo"
# torchtitan pull request 1701: the converter `float8`, by which TP was planned, got another name
CONVERTERS_RENAMED = "2025-09-12"


class Operands(NamedTuple):
    """One number for each operand of a linear layer's products in each pass.

    input, weight: of the forward product.  gradient: of the output, for both backward products.
    weight_again, input_again: of the backward products, where they are quantised anew.
    """

    input: float = 0.0
    weight: float = 0.0
    gradient: float = 0.0
    weight_again: float = 0.0
    input_again: float = 0.0


NOTHING = Operands()
TWO_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """How linear layers compute in one precision of one library. Recipes are told apart by
    identity: tables of them are made once.

    peak: which dense peak of the GPU applies.  gain_key: the kernel profile's achieved share of it.
    forward, input_grad, weight_grad: whether that product runs in low precision.
    experts: recipe of grouped products ("" if 16-bit).  experts_alone: only without pipeline and
        context parallelism.
    bf16_layers: share of the layers, the last ones, that the published recipe keeps in 16 bits; see
        `bf16_tail`.
    scale, cast: bytes moved per element to find scales, and to scale, round and write; in fused
        kernels.  eager_*: kernel by kernel.
    transposed: added to `cast` on GPUs that multiply fp8 only along rows (Ada, Hopper).
    padding: moved per element to pad the groups of grouped products, and again to unpad their
        result.
    fused_kernels, eager_kernels: launches to quantise one operand.  weight_once: weights are
        quantised once a step, not once a microbatch.
    column_amax, row_amax: all-reduces of scales over the TP group for a column- or row-parallel
        layer.
    step_amax: all-reduces of scales a step.  gather_amax: one more for each weight gathered in low
        precision (else all in one a step).
    saved_bytes: what a layer keeps of its input for backward, with scales.  saved_weight_bytes: of
        its weight, beside the parameter.
    weight_copy_bytes: of a quantised weight that stays from step to step; weight_copies: how many
        on GPUs that need transposes.
    native: parameters have no other form than that: without it they have with float8_all_gather
        alone.
    wire_bytes: of a parameter gathered so.  tp_wire_bytes, tp_gradient_wire_bytes: of an input's or
        gradient's element that TP all-gathers.
    multiple: of the local sides that weights need.  rows_multiple: of the rows that inputs need.
    fallback_multiple: a layer whose whole weight has sides that are no multiples of it stays in 16
        bits (0: none does).
    small: a layer whose (K, N) lies within one of these boxes stays in 16 bits.
    """

    name: str
    peak: str
    gain_key: str
    forward: bool = True
    input_grad: bool = True
    weight_grad: bool = True
    experts: str
    experts_alone: bool = False
    bf16_layers: float = 0.0
    scale: Operands = NOTHING
    cast: Operands = NOTHING
    eager_scale: Operands = NOTHING
    eager_cast: Operands = NOTHING
    transposed: Operands = NOTHING
    padding: float = 0.0
    fused_kernels: float = 0.0
    eager_kernels: float = 0.0
    weight_once: bool = False
    column_amax: Operands = NOTHING
    row_amax: Operands = NOTHING
    step_amax: float = 0.0
    gather_amax: bool = False
    saved_bytes: float = 2.0
    saved_weight_bytes: float = 0.0
    weight_copy_bytes: float = 0.0
    weight_copies: float = 1.0
    native: bool = False
    wire_bytes: float = 2.0
    tp_wire_bytes: float = 2.0
    tp_gradient_wire_bytes: float = 2.0
    multiple: int = 1
    rows_multiple: int = 1
    fallback_multiple: int = 0
    small: tuple[tuple[float, float], ...] = ()

    @property
    def low(self) -> bool:
        """Whether anything computes in fewer than 16 bits."""
        return self.peak in ("fp8", "fp4")


# bytes of scale an element: 1 per 32, fp32 per 128, 1 per 16 (beside one fp32 a tensor)
MX, BLOCK, NV = 1.0 / 32, 4.0 / 128, 1.0 / 16
FP4 = 0.5 + NV
# The scales that a GEMM reads lie in its own order: written once, then read and written again
# (`to_blocked`, swizzle).
MX_SCALE = 3 * MX
# Triton's cast along columns reaches 3.9 TB/s where the cast along rows reaches 5.5 on a B200
# (torchao mx_formats README).
MX_COLUMNS = 3.0 * 5.5 / 3.9
# Eager amax: abs (2 + 2), max (2).  Eager cast: to fp32 (2 + 4), times scale (8), clamp (8), to fp8
#     (4 + 1); a transposed copy 2 more.
EAGER_AMAX, EAGER_CAST, COPY = 6.0, 27.0, 2.0
# torchao's MXTensor.to_mx in eager torch operations: abs, amax, exponent, division in fp32, clamp,
# cast; judgement from its source.
EAGER_MX = 25.0
# a copy in 16 bits.  Source: Megatron-LM core/transformer/moe/experts.py (Fp8Padding, Fp8Unpadding)
PADDING = 4.0

_BF16 = Recipe(name="bf16", peak="bf16", gain_key="gemm_bf16", experts="")
_FP16 = Recipe(name="fp16", peak="fp16", gain_key="gemm_bf16", experts="")

_TENSORWISE = Recipe(
    name="float8-tensorwise", peak="fp8", gain_key="gemm_fp8", experts="float8-rowwise",
    scale=Operands(2, 2, 2), cast=Operands(3, 3, 4, 3, 3),
    eager_scale=Operands(EAGER_AMAX, EAGER_AMAX, 2 * EAGER_AMAX, EAGER_AMAX, EAGER_AMAX),
    eager_cast=Operands(EAGER_CAST, EAGER_CAST, 2 * EAGER_CAST + COPY, EAGER_CAST + COPY,
        EAGER_CAST + COPY),
    fused_kernels=2, eager_kernels=10, column_amax=Operands(weight=1, gradient=1),
    row_amax=Operands(input=1, weight=1),
    step_amax=1, wire_bytes=1, multiple=16, rows_multiple=16, fallback_multiple=16,
    small=((4096, 1024),),
)  # fmt: skip
_ROWWISE = replace(
    _TENSORWISE, name="float8-rowwise", gain_key="gemm_fp8_rowwise", scale=Operands(2, 2, 4, 2, 2),
    cast=Operands(3, 3, 6, 3, 3),
    column_amax=Operands(gradient=1, weight_again=1), row_amax=Operands(input=1, weight=1),
    step_amax=0, wire_bytes=2,
    small=((math.inf, 2048), (1024, math.inf), (2048, 4096)),
)  # fmt: skip
_DELAYED = Recipe(
    name="float8-delayed", peak="fp8", gain_key="gemm_fp8", experts="float8-delayed",
    # no pass for scales; half of the inputs come from LayerNormLinear, whose norm writes fp8 itself
    cast=Operands(input=2, weight=3, gradient=3), transposed=Operands(1, 1, 1), fused_kernels=1,
    weight_once=True,
    padding=PADDING, step_amax=2, saved_bytes=1, weight_copy_bytes=1, weight_copies=2, wire_bytes=1,
    tp_wire_bytes=1, tp_gradient_wire_bytes=1, multiple=16, rows_multiple=8,
)  # fmt: skip
_BLOCKWISE = Recipe(
    name="float8-blockwise", peak="fp8", gain_key="gemm_fp8_blockwise", experts="float8-blockwise",
    scale=Operands(BLOCK, BLOCK, 2 * BLOCK, BLOCK, BLOCK), cast=Operands(3, 3, 6, 3, 3),
    eager_scale=Operands(BLOCK, BLOCK, 2 * BLOCK, BLOCK, BLOCK), eager_cast=Operands(3, 3, 6, 3, 3),
    fused_kernels=1, eager_kernels=1,
    multiple=128, rows_multiple=128,
)  # fmt: skip
_MXFP8 = Recipe(
    name="mxfp8", peak="fp8", gain_key="gemm_mxfp8", experts="mxfp8",
    scale=Operands(MX_SCALE, MX_SCALE, 2 * MX_SCALE, MX_SCALE, MX_SCALE),
    cast=Operands(3, 3, 3 + MX_COLUMNS, MX_COLUMNS, MX_COLUMNS),
    eager_scale=Operands(MX_SCALE, MX_SCALE, 2 * MX_SCALE, MX_SCALE, MX_SCALE),
    eager_cast=Operands(EAGER_MX, EAGER_MX, EAGER_MX + MX_COLUMNS, MX_COLUMNS, MX_COLUMNS),
    fused_kernels=2, eager_kernels=8, multiple=32, rows_multiple=32, fallback_multiple=16,
)  # fmt: skip
_NVFP4 = Recipe(
    name="nvfp4", peak="fp4", gain_key="gemm_fp4", experts="", bf16_layers=0.15,
    # amax of the rotated tensor, then both orientations in one kernel; only the weight's amax is
    # left to torch
    scale=Operands(2, 2, 2), cast=Operands(2 + 2 * FP4, 2 + 2 * FP4, 2 + 2 * FP4),
    eager_scale=Operands(2, 18, 2), eager_cast=Operands(2 + 2 * FP4, 2 + 2 * FP4, 2 + 2 * FP4),
    fused_kernels=2, eager_kernels=3,
    saved_bytes=FP4, saved_weight_bytes=FP4, multiple=128, rows_multiple=128,
)  # fmt: skip

TORCHAO: tuple[Recipe, ...] = (
    _BF16,
    _FP16,
    _TENSORWISE,
    _ROWWISE,
    _DELAYED,
    _BLOCKWISE,
    _MXFP8,
    _NVFP4,
)

# Transformer Engine casts an input once, in both orientations, keeps the one that backward needs,
# and gathers quantised tensors.
_TE_TENSORWISE = replace(
    _DELAYED, name="float8-tensorwise", experts="float8-tensorwise", scale=Operands(2, 2, 2),
    cast=Operands(3, 3, 3), fused_kernels=2,
    column_amax=Operands(input=1), row_amax=Operands(gradient=1), step_amax=1,
)  # fmt: skip
_TE_BLOCKS = replace(_DELAYED, transposed=NOTHING, step_amax=0, cast=Operands(4, 4, 4))
_TE_BLOCKWISE = replace(
    _TE_BLOCKS, name="float8-blockwise", gain_key="gemm_fp8_blockwise", experts="float8-blockwise",
    scale=Operands(2 * BLOCK, 2 * BLOCK, 2 * BLOCK), saved_bytes=1 + BLOCK,
    weight_copy_bytes=2 * (1 + BLOCK), weight_copies=1,
    tp_wire_bytes=1 + BLOCK, tp_gradient_wire_bytes=1 + BLOCK,
)  # fmt: skip
_TE_MXFP8 = replace(
    _TE_BLOCKS, name="mxfp8", gain_key="gemm_mxfp8", experts="mxfp8",
    scale=Operands(2 * MX_SCALE, 2 * MX_SCALE, 2 * MX_SCALE),
    fused_kernels=2, saved_bytes=1 + MX, weight_copy_bytes=2 * (1 + MX), weight_copies=1,
    wire_bytes=2, tp_wire_bytes=1 + MX,
    tp_gradient_wire_bytes=1 + MX, multiple=32, rows_multiple=32,
)  # fmt: skip
_TE_NVFP4 = replace(
    _TE_BLOCKS, name="nvfp4", peak="fp4", gain_key="gemm_fp4", experts="nvfp4",
    scale=Operands(2, 2, 2),
    cast=Operands(2 + 2 * FP4, 2 + 2 * FP4, 2 + 2 * FP4), fused_kernels=3,
    column_amax=Operands(input=1), row_amax=Operands(gradient=1),
    saved_bytes=FP4, weight_copy_bytes=2 * FP4, weight_copies=1, wire_bytes=2, tp_wire_bytes=FP4,
    tp_gradient_wire_bytes=FP4,
)  # fmt: skip

TRANSFORMER_ENGINE: tuple[Recipe, ...] = (
    _BF16,
    _FP16,
    _TE_TENSORWISE,
    _ROWWISE,
    _DELAYED,
    _TE_BLOCKWISE,
    _TE_MXFP8,
    _TE_NVFP4,
)
RECIPES = TORCHAO
assert all(
    tuple(recipe.name for recipe in table) == PRECISIONS for table in (TORCHAO, TRANSFORMER_ENGINE)
)


def titan_line(version: str | None) -> str:
    """TorchTitan's release line by its quantisation, "0.2" unless the version says another; a
    commit is placed by the date beside it.
    """
    release = release_of("torchtitan", version)
    day = release.named.day
    return "0.2" if day >= CONVERTERS_RENAMED and release.before("0.2") else release.line


@lru_cache(maxsize=64)
def _table(trainer: str, fsdp_style: bool, version: str | None) -> tuple[Recipe, ...]:
    if not fsdp_style:
        native = named(version).distribution == NATIVE
        return tuple(
            replace(recipe, native=native and recipe.peak == "fp8") for recipe in TRANSFORMER_ENGINE
        )
    if trainer != "torchtitan":
        return tuple(
            replace(
                recipe,
                small=(),
                gather_amax=recipe.wire_bytes < TWO_BYTES,
                step_amax=0.0,
                weight_once=False,
                weight_copy_bytes=0.0,
            )
            for recipe in TORCHAO
        )
    line = titan_line(version)
    if line == "0.1":
        return tuple(
            replace(recipe, small=(), tp_wire_bytes=recipe.wire_bytes, experts="")
            for recipe in TORCHAO
        )
    if line == "0.3":
        return tuple(
            replace(
                recipe,
                small=(),
                fallback_multiple=recipe.fallback_multiple
                if recipe.name.startswith("float8")
                else 0,
            )
            for recipe in TORCHAO
        )
    return tuple(
        replace(recipe, experts_alone=recipe.experts == "float8-rowwise") for recipe in TORCHAO
    )


def recipes_for(rules: TrainerRules, version: str | None) -> tuple[Recipe, ...]:
    """The recipes of a trainer's release, in the order of PRECISIONS.

    TorchTitan 0.1 planned TP with torchao's Float8ColwiseParallel, which all-gathers tensorwise
    inputs in float8; since 0.2 the plan looks for a converter that no longer has that name, and
    gathers in 16 bits. 0.2 filters small layers, as our export asks it to, computes the scales of
    all weights in one all-reduce (plain torch does neither), and refuses float8 experts under PP
    and CP. 0.3 hands its filters descriptions of layers, all of which torchao's filter of small
    ones declines: the export does not ask for it.
    """
    return _table(rules.name, rules.fsdp_style, version)


@lru_cache(maxsize=64)
def _arrays(recipes: tuple[Recipe, ...]) -> Mapping[str, FloatColumn]:
    """Every number of the recipes by field ("saved_bytes") or field and operand ("cast.input")."""
    arrays = {}
    for f in fields(Recipe):
        values = [getattr(recipe, f.name) for recipe in recipes]
        if isinstance(values[0], Operands):
            arrays.update(
                {
                    f"{f.name}.{name}": np.array([float(getattr(v, name)) for v in values])
                    for name in Operands._fields
                }
            )
        elif isinstance(values[0], bool | int | float):
            arrays[f.name] = np.array([float(value) for value in values])
    return arrays


def column(field: str, precision: IntColumn, recipes: tuple[Recipe, ...]) -> FloatColumn:
    """One number of the recipes, gathered by precision code: (N,) -> (N,). Operands by
    "field.operand".
    """
    return _arrays(recipes)[field][precision]


def bf16_tail(recipe: Recipe, layers: int) -> int:
    """Last layers that stay in 16 bits.  Source: torchtitan 0.3.0 components/quantization/nvfp4.py
    nvfp4_bf16_tail_fqns.
    """
    return math.ceil(layers * recipe.bf16_layers)


def stays_16_bit(recipe: Recipe, k: float, n: float) -> bool:
    """Whether the library leaves a layer with a K x N weight in 16 bits.

    Source: torchtitan components/quantization/utils.py module_filter_fn; torchao
    float8_linear_utils.py _auto_filter_for_recipe. Both look at the whole weight, before TP divides
    it.
    """
    unaligned = recipe.fallback_multiple > 0 and (
        k % recipe.fallback_multiple != 0 or n % recipe.fallback_multiple != 0
    )
    return (
        not recipe.low
        or unaligned
        or any(k <= most_k and n <= most_n for most_k, most_n in recipe.small)
    )
