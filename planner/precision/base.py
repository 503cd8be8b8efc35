"""The values of a layout's `precision`, and how a library computes linear layers in each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
TWO_BYTES = 2.0


class Operands(NamedTuple):
    """One number for each operand of a linear layer's products in each pass.

    input, weight: of the forward product.
    gradient: of the output, for both backward products.
    weight_again, input_again: of the backward products, where they are quantised anew.
    """

    input: float = 0.0
    weight: float = 0.0
    gradient: float = 0.0
    weight_again: float = 0.0
    input_again: float = 0.0


NOTHING = Operands()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """How one library computes linear layers in one precision.

    Recipes are compared by identity: tables of them are made once.

    peak: which dense peak of the GPU applies.
    gain_key: the kernel profile's achieved share of it.
    forward, input_grad, weight_grad: whether that product runs in low precision.
    gradients_as: recipe whose kernels compute the two backward products; "" for its own.
    rescaled, eager_rescaled: bytes moved per element of these products to scale them afterwards.
    experts: recipe of grouped products ("" if 16-bit).
    experts_alone: experts are quantised only without pipeline and context parallelism.
    dense_only: the library converts no model that has experts.
    bf16_layers: share of the layers, the last ones, that the published recipe keeps in 16 bits; see
        `bf16_tail`.
    scale, cast: bytes moved per element to find scales, and to scale, round and write; in fused
        kernels.
    scale_fuses: bytes per element of an input or a gradient that torch.compile spares of this,
        because the kernel that makes the tensor finds its largest value; not where that kernel is a
        matmul or attention.
    eager_scale, eager_cast: the same kernel by kernel.
    transposed: added to `cast` on GPUs that multiply fp8 only along rows (Ada, Hopper).
    padding: moved per element to pad the groups of grouped products, and again to unpad their
        result.
    fused_kernels, eager_kernels: launches to quantise one operand.
    expert_launches: launches from Python that take as long as quantising one expert's rows, where a
        loop in C++ casts one expert after the other.
    weight_once: weights are quantised once a step, not once a microbatch.
    column_amax, row_amax: all-reduces of scales over the TP group for a column- or row-parallel
        layer.
    step_amax: all-reduces of scales a step.
    gather_amax: one more for each weight gathered in low precision (else all in one a step).
    saved_bytes: what a layer saves of its input for backward, with scales.
    saved_weight_bytes: what it saves of its weight, besides the parameter.
    weight_copy_bytes: of a quantised weight that stays from step to step.
    weight_copies: how many of those on GPUs that need transposes.
    native: parameters are always stored so; otherwise with float8_all_gather alone.
    wire_bytes: of a parameter gathered so.
    tp_wire_bytes, tp_gradient_wire_bytes: of an input's or gradient's element that TP all-gathers.
    multiple: of the local sides that weights need.
    rows_multiple: of the rows that inputs need.
    group_multiple: of the rows of each expert in grouped products, which the trainer pads to it.
    fallback_multiple: a layer whose whole weight has sides that are no multiples of it stays in 16
        bits (0: none does).
    listed: its products are on torch's list of operations that are dear to repeat, whose outputs
        selective-op saves.
    small: a layer whose (K, N) lies within one of these boxes stays in 16 bits.
    """

    name: str
    peak: str
    gain_key: str
    forward: bool = True
    input_grad: bool = True
    weight_grad: bool = True
    gradients_as: str = ""
    rescaled: float = 0.0
    eager_rescaled: float = 0.0
    experts: str
    experts_alone: bool = False
    dense_only: bool = False
    bf16_layers: float = 0.0
    scale: Operands = NOTHING
    cast: Operands = NOTHING
    scale_fuses: float = 0.0
    eager_scale: Operands = NOTHING
    eager_cast: Operands = NOTHING
    transposed: Operands = NOTHING
    padding: float = 0.0
    fused_kernels: float = 0.0
    eager_kernels: float = 0.0
    expert_launches: float = 0.0
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
    group_multiple: int = 1
    fallback_multiple: int = 0
    listed: bool = True
    small: tuple[tuple[float, float], ...] = ()

    @property
    def low(self) -> bool:
        """Whether anything computes in fewer than 16 bits."""
        return self.peak in ("fp8", "fp4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Precision:
    """One value of `layout.precision`: its kernels by library, what they need, and export words.

    A trainer runs it only where the trainer's own `precisions` name it.

    torchao: torchao's kernels (TorchTitan, plain torch).
    transformer_engine: Transformer Engine's (the Megatron family); None where it has none, and an
        estimate of what no trainer runs takes torchao's numbers.
    needs: dtypes whose peak a GPU must have.
    kernel_rows: rows of the kernel profiles (`specs.gpu_families`) that have kernels for it;
        None for all.
    vendors: whose GPUs have kernels for it; None for all.
    titan_converters, titan_expert_converters: TorchTitan's converter by line of releases.
    megatron_settings: Megatron-LM's, named with _, besides those of the 16-bit format.
    """

    torchao: Recipe
    transformer_engine: Recipe | None = None
    needs: tuple[str, ...]
    kernel_rows: frozenset[str] | None = None
    vendors: frozenset[str] | None = None
    titan_converters: Mapping[str, str] = field(default_factory=dict)
    titan_expert_converters: Mapping[str, str] = field(default_factory=dict)
    megatron_settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.torchao.name


@lru_cache(maxsize=64)
def _arrays(recipes: tuple[Recipe, ...]) -> Mapping[str, Floats]:
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


def column(field: str, precision: Codes, recipes: tuple[Recipe, ...]) -> Floats:
    """One number of the recipes, gathered by precision code: (N,) -> (N,).

    field: the name of the number; "field.operand" for operands.
    """
    return _arrays(recipes)[field][precision]


def bf16_tail(recipe: Recipe, layers: int) -> int:
    """Last layers that stay in 16 bits.

    Source: torchtitan 0.3.0 components/quantization/nvfp4.py nvfp4_bf16_tail_fqns.
    """
    return math.ceil(layers * recipe.bf16_layers)


def stays_16_bit(recipe: Recipe, k: float, n: float) -> bool:
    """Whether the library leaves a layer with a K x N weight in 16 bits.

    Both libraries check the whole weight, before TP divides it.
    Source: torchtitan components/quantization/utils.py module_filter_fn; torchao
        float8_linear_utils.py _auto_filter_for_recipe.
    """
    unaligned = recipe.fallback_multiple > 0 and (
        k % recipe.fallback_multiple != 0 or n % recipe.fallback_multiple != 0
    )
    return (
        not recipe.low
        or unaligned
        or any(k <= most_k and n <= most_n for most_k, most_n in recipe.small)
    )
