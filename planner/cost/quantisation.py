"""What precision recipes cost where they are used: columns of bytes, launches and small reductions for a batch of layouts.

Letters: U distinct layouts; every column is (U,).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.compute import Device
from planner.specs.layout import PRECISIONS
from planner.specs.model import ModelSpec
from planner.work.ops import Gemm
from planner.work.precision import TWO_BYTES, Operands, Recipe, column
from planner.work.quantised import low_share

# fp8 products of Ada and Hopper read both operands along rows, which takes transposed copies.
# Source: Transformer Engine, docs/features/low_precision_training/performance_considerations.
TRANSPOSING = ("ada", "hopper")
WEIGHTS = ("weight", "weight_again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Columns of one batch under one trainer's recipes, for linear layers or for routed experts.

    precision: row of the recipes and of the device's rates.  low: whether anything computes in fewer than 16 bits.
    moves: bytes moved per element of each operand, scales and casts together.  kernels: launches to quantise one operand.
    column_amax, row_amax: all-reduces of scales in one column- or row-parallel layer, by operand. What is nowhere is left out.
    shared: whether layers that read one tensor quantise it once (fused kernels), not each for itself.
    """

    recipes: tuple[Recipe, ...]
    precision: IntColumn
    low: BoolColumn
    moves: Mapping[str, FloatColumn]
    column_amax: Mapping[str, FloatColumn]
    row_amax: Mapping[str, FloatColumn]
    kernels: FloatColumn
    shared: BoolColumn

    @classmethod
    def build(cls, batch: LayoutBatch, recipes: tuple[Recipe, ...], fused: BoolColumn, device: Device) -> "Quantisation":
        """For linear layers. A weight gathered in low precision, or quantised once a step, is not quantised in a microbatch."""
        codes = batch.precision
        low = np.array([recipe.low for recipe in recipes])[codes] & (batch.param_dtype == 0)
        turned = float(device.gpu.family in TRANSPOSING)
        moves: dict[str, FloatColumn] = {}
        columns: dict[str, FloatColumn] = {}
        rows: dict[str, FloatColumn] = {}
        for operand in Operands._fields if low.any() else ():
            kept = low & ~(_weights_arrive_quantised(batch, recipes) if operand in WEIGHTS else np.bool_(False))
            eager = _total(codes, recipes, operand, ("eager_scale", "eager_cast"))
            compiled = _total(codes, recipes, operand, ("scale", "cast")) + turned * _total(codes, recipes, operand, ("transposed",))
            found = (
                (moves, np.where(fused | (eager == 0), compiled, eager)),
                (columns, _total(codes, recipes, operand, ("column_amax",))),
                (rows, _total(codes, recipes, operand, ("row_amax",))),
            )
            for table, values in found:
                if np.any(kept & (values > 0)):
                    table[operand] = kept * values
        eager_kernels = column("eager_kernels", codes, recipes)
        launches = np.where(fused | (eager_kernels == 0), column("fused_kernels", codes, recipes), eager_kernels)
        return cls(
            recipes=recipes, precision=codes, low=low, moves=moves, column_amax=columns, row_amax=rows, kernels=low * launches,
            shared=np.asarray(fused),
        )  # fmt: skip

    @classmethod
    def of_experts(cls, batch: LayoutBatch, recipes: tuple[Recipe, ...], fused: BoolColumn, device: Device) -> "Quantisation":
        """For routed experts, by the recipe of grouped products; their weights are gathered in 16 bits."""
        high = PRECISIONS.index("bf16")
        own = np.array([PRECISIONS.index(recipe.experts) if recipe.experts else high for recipe in recipes])[batch.precision]
        refused = (column("experts_alone", batch.precision, recipes) > 0) & (batch.pp * batch.cp > 1)
        codes = np.where(refused, high, own)
        return cls.build(replace(batch, precision=codes, float8_all_gather=np.zeros_like(batch.compile)), recipes, fused, device)

    @property
    def active(self) -> bool:
        """Whether any layout quantises anything."""
        return bool(self.low.any())

    def share(self, op: Gemm, model: ModelSpec) -> FloatColumn:
        """Share of the layers in which this product is quantised: 0 where the library leaves it in 16 bits."""
        return np.array([low_share(recipe, op, model) for recipe in self.recipes])[self.precision] * self.low

    def number(self, field: str) -> FloatColumn:
        """One number of the recipes."""
        return column(field, self.precision, self.recipes)

    def saved_bytes(self, compute_bytes: FloatColumn) -> FloatColumn:
        """Bytes per element that a layer keeps of its input."""
        return np.where(self.low, self.number("saved_bytes"), compute_bytes)

    def tp_wire(self, compute_bytes: FloatColumn) -> FloatColumn:
        """Bytes on the wire of a TP all-gather for linear layers, over those of its tensor in 16 bits."""
        return np.where(self.low, self.number("tp_wire_bytes") / compute_bytes, 1.0)


def _total(codes: IntColumn, recipes: tuple[Recipe, ...], operand: str, names: Sequence[str]) -> FloatColumn:
    return np.asarray(sum(column(f"{name}.{operand}", codes, recipes) for name in names))


def _weights_arrive_quantised(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    return np.asarray((column("weight_once", batch.precision, recipes) > 0) | gathers_low(batch, recipes))


def kept_low(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    """Whether parameters of linear layers exist quantised alone (but for the optimizer's), or are gathered so by FSDP, (N,)."""
    low = np.array([recipe.low for recipe in recipes])[batch.precision] & (batch.param_dtype == 0)
    return np.asarray(low & (batch.float8_all_gather | (column("native", batch.precision, recipes) > 0)))


def gathers_low(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    """Whether parameters of linear layers are gathered in low precision, (N,)."""
    return np.asarray(kept_low(batch, recipes) & (column("wire_bytes", batch.precision, recipes) < TWO_BYTES))
