"""What precision recipes cost where they are used: columns of bytes, launches and small reductions for a batch of layouts.

Letters: U distinct layouts; every column is (U,).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Columns of one batch under one trainer's recipes.

    moves: bytes moved per element of each operand, scales and casts together.  kernels: launches to quantise one operand.
    column_amax, row_amax: all-reduces of scales in one column- or row-parallel layer, by operand.
    shared: whether layers that read one tensor quantise it once (fused kernels), not each for itself.
    experts: whether grouped products are quantised at all.  active: whether any layout quantises anything.
    """

    recipes: tuple[Recipe, ...]
    precision: IntColumn
    moves: Mapping[str, FloatColumn]
    column_amax: Mapping[str, FloatColumn]
    row_amax: Mapping[str, FloatColumn]
    kernels: FloatColumn
    low: BoolColumn
    shared: BoolColumn
    experts: BoolColumn
    active: bool

    @classmethod
    def build(cls, batch: LayoutBatch, recipes: tuple[Recipe, ...], fused: BoolColumn, device: Device) -> "Quantisation":
        """Columns of `batch`. A weight gathered in low precision, or quantised once a step, is not quantised in a microbatch."""
        codes = batch.precision
        low = np.array([recipe.low for recipe in recipes])[codes] & (batch.param_dtype == 0)
        active = bool(low.any())
        turned = float(device.gpu.family in TRANSPOSING)
        moves, columns, rows = {}, {}, {}
        for operand in Operands._fields if active else ():
            kept = low & ~(_weights_arrive_quantised(batch, recipes) if operand in WEIGHTS else np.bool_(False))
            eager = _total(codes, recipes, operand, ("eager_scale", "eager_cast"))
            compiled = _total(codes, recipes, operand, ("scale", "cast")) + turned * _total(codes, recipes, operand, ("transposed",))
            moves[operand] = kept * np.where(fused | (eager == 0), compiled, eager)
            columns[operand] = kept * _total(codes, recipes, operand, ("column_amax",))
            rows[operand] = kept * _total(codes, recipes, operand, ("row_amax",))
        eager_kernels = column("eager_kernels", codes, recipes)
        launches = np.where(fused | (eager_kernels == 0), column("fused_kernels", codes, recipes), eager_kernels)
        alone = column("experts_alone", codes, recipes) > 0
        return cls(
            recipes=recipes, precision=codes, moves=moves, column_amax=columns, row_amax=rows, kernels=low * launches, low=low,
            shared=np.asarray(fused), experts=np.asarray(~alone | (batch.pp * batch.cp == 1)), active=active,
        )  # fmt: skip

    def share(self, op: Gemm, model: ModelSpec) -> FloatColumn:
        """Share of the layers in which this product is quantised: 0 where the library leaves it in 16 bits."""
        shares = np.array([low_share(recipe, op, model) for recipe in self.recipes])[self.precision] * self.low
        return np.asarray(shares * self.experts if op.role == "expert" else shares)

    def codes(self, op: Gemm) -> IntColumn:
        """Precision code whose rate this product has where it is quantised."""
        if op.role != "expert":
            return self.precision
        return np.array([PRECISIONS.index(recipe.experts or recipe.name) for recipe in self.recipes])[self.precision]

    def saved_bytes(self, compute_bytes: FloatColumn) -> FloatColumn:
        """Bytes per element that a linear layer keeps of its input."""
        return np.where(self.low, column("saved_bytes", self.precision, self.recipes), compute_bytes)

    def tp_wire(self, compute_bytes: FloatColumn) -> FloatColumn:
        """Bytes on the wire of a TP all-gather for linear layers, over those of its tensor in 16 bits."""
        return np.where(self.low, column("tp_wire_bytes", self.precision, self.recipes) / compute_bytes, 1.0)


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
