"""Costs of precision recipes in a batch of layouts: bytes, launches, reductions of scales.

Letters: U distinct layouts; every column is (U,).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.machine.device import Device
from planner.precision import PRECISIONS, TWO_BYTES, Operands, Recipe, column
from planner.work.expert_precision import expert_precision
from planner.work.ops import Gemm
from planner.work.quantised import QuantisedModel

# fp8 GEMMs of Ada, Hopper and RTX Blackwell read both operands along rows, which takes
# transposed copies.
# Source: Transformer Engine, docs/features/low_precision_training/performance_considerations;
# common/util, is_non_tn_fp8_gemm_supported (compute capability 10.x, not 12.x).
TRANSPOSING = ("ada", "hopper", "rtx-blackwell")
WEIGHTS = ("weight", "weight_again")
PRODUCTS = ("forward", "input_grad", "weight_grad")
PARTS = ("scale", "cast", "transposed", "eager_scale", "eager_cast", "column_amax", "row_amax")
GATHERED = {"input": "tp_wire_bytes", "gradient": "tp_gradient_wire_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Columns of one batch under one trainer's recipes, for linear layers or for routed experts.

    precision: row of the recipes and of the device's rates.
    gradient_precision: the same for the two backward products.
    rescaled: bytes moved per element of these to scale them afterwards.
    low: whether anything computes in fewer than 16 bits.
    products: whether each of a layer's three GEMMs is quantised.
    moves: bytes moved per element of each operand, for scales and casts together.
    spared: of these, bytes that are not moved where the kernel that makes an input or a gradient
        is compiled and finds its scale.
    turned: the same for transposed copies.
    shard: share of an operand that is quantised where TP gathers it. It is one rank's share if the
        operand is gathered quantised.
    column_amax, row_amax: all-reduces of scales in one column- or row-parallel layer, by operand.
        Operands that no layout reduces are left out.
    kernels: launches to quantise one operand.
    shared: whether a tensor that several layers read is quantised once (fused kernels) or by each.
    """

    model: QuantisedModel
    precision: IntColumn
    gradient_precision: IntColumn
    rescaled: FloatColumn
    low: BoolColumn
    products: Mapping[str, FloatColumn]
    moves: Mapping[str, FloatColumn]
    spared: FloatColumn
    turned: Mapping[str, FloatColumn]
    shard: Mapping[str, FloatColumn]
    column_amax: Mapping[str, FloatColumn]
    row_amax: Mapping[str, FloatColumn]
    kernels: FloatColumn
    shared: BoolColumn

    @classmethod
    def build(
        cls, batch: LayoutBatch, model: QuantisedModel, fused: BoolColumn, device: Device
    ) -> "Quantisation":
        """Columns for linear layers.

        No microbatch quantises a weight that is gathered in low precision or quantised once a step.
        """
        codes, recipes = batch.precision, model.recipes
        low = np.array([recipe.low for recipe in recipes])[codes] & (batch.param_dtype == 0)
        tables = _tables(recipes, device.gpu.kernel_family in TRANSPOSING)
        arrive = _weights_arrive_quantised(batch, recipes)
        found: dict[str, dict[str, FloatColumn]] = {
            "moves": {},
            "turned": {},
            "column_amax": {},
            "row_amax": {},
        }
        for (table, operand), (compiled, eager) in tables.items() if low.any() else ():
            kept = low & ~arrive if operand in WEIGHTS else low
            found[table][operand] = kept * np.where(fused, compiled[codes], eager[codes])
        gathered = (batch.tp > 1) & batch.sequence_parallel
        return cls(
            model=model,
            precision=codes,
            gradient_precision=_gradients_as(recipes)[codes],
            rescaled=low
            * np.where(fused, *(column(f, codes, recipes) for f in ("rescaled", "eager_rescaled"))),
            spared=low * np.where(fused, column("scale_fuses", codes, recipes), 0.0),
            low=low,
            **found,
            kernels=low * np.where(fused, *(t[codes] for t in _kernels(recipes))),
            products={name: column(name, codes, recipes) for name in PRODUCTS},
            shared=np.asarray(fused),
            shard={
                operand: np.where(
                    gathered & (column(field, codes, recipes) < TWO_BYTES), 1.0 / batch.tp, 1.0
                )
                for operand, field in GATHERED.items()
                if gathered.any() and low.any()
            },
        )

    @classmethod
    def of_experts(
        cls, batch: LayoutBatch, model: QuantisedModel, fused: BoolColumn, device: Device
    ) -> "Quantisation":
        """Columns for routed experts, by the recipe of grouped GEMMs.

        Their weights are gathered in 16 bits, and their backward has grouped kernels of its own.
        """
        built = cls.build(
            replace(
                batch,
                precision=expert_precision(batch, model.recipes),
                float8_all_gather=np.zeros_like(batch.compile),
            ),
            model,
            fused,
            device,
        )
        return replace(
            built, gradient_precision=built.precision, rescaled=np.zeros_like(built.rescaled)
        )

    @property
    def active(self) -> bool:
        return bool(self.low.any())

    def share(self, op: Gemm) -> FloatColumn:
        """Share of layers that quantise this GEMM; 0 where the library leaves it in 16 bits."""
        shares = self.model.shares.get(op.name)
        return np.zeros(len(self.low)) if shares is None else shares[self.precision] * self.low

    def number(self, field: str) -> FloatColumn:
        return column(field, self.precision, self.model.recipes)

    def saved_bytes(self, compute_bytes: FloatColumn) -> FloatColumn:
        """Bytes per element that a layer saves of its input."""
        return np.where(self.low, self.number("saved_bytes"), compute_bytes)

    def tp_wire(self, operand: str, compute_bytes: FloatColumn) -> FloatColumn:
        """Bytes that a TP all-gather of this operand sends, over the bytes of its 16-bit tensor."""
        return np.where(self.low, self.number(GATHERED[operand]) / compute_bytes, 1.0)


@lru_cache(maxsize=64)
def _tables(
    recipes: tuple[Recipe, ...], transposing: bool
) -> Mapping[tuple[str, str], tuple[FloatColumn, FloatColumn]]:
    """(fused, eager) columns of moves and reductions, by table and operand, over the recipes.

    Operands that no recipe has are left out.
    """
    every = np.arange(len(recipes))
    found = {}
    for operand in Operands._fields:
        parts = {name: column(f"{name}.{operand}", every, recipes) for name in PARTS}
        compiled, turned = parts["scale"] + parts["cast"], float(transposing) * parts["transposed"]
        eager = parts["eager_scale"] + parts["eager_cast"]
        found["moves", operand] = compiled, np.where(eager > 0, eager, compiled)
        found["turned", operand] = turned, np.where(eager > 0, 0.0, turned)
        for name in ("column_amax", "row_amax"):
            found[name, operand] = parts[name], parts[name]
    return {key: pair for key, pair in found.items() if pair[0].any() or pair[1].any()}


@lru_cache(maxsize=64)
def _gradients_as(recipes: tuple[Recipe, ...]) -> IntColumn:
    names = [recipe.gradients_as or recipe.name for recipe in recipes]
    return np.array([PRECISIONS.names.index(name) for name in names])


@lru_cache(maxsize=64)
def _kernels(recipes: tuple[Recipe, ...]) -> tuple[FloatColumn, FloatColumn]:
    compiled, eager = (
        column(name, np.arange(len(recipes)), recipes)
        for name in ("fused_kernels", "eager_kernels")
    )
    return compiled, np.where(eager > 0, eager, compiled)


def _weights_arrive_quantised(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    return np.asarray(
        (column("weight_once", batch.precision, recipes) > 0) | gathers_low(batch, recipes)
    )


def may_store_low(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    """Whether parameters of linear layers exist only quantised (N,), or are gathered so by FSDP.

    As far as the recipe decides. The optimizer has its own in high precision.
    """
    low = np.array([recipe.low for recipe in recipes])[batch.precision] & (batch.param_dtype == 0)
    return np.asarray(
        low & (batch.float8_all_gather | (column("native", batch.precision, recipes) > 0))
    )


def stored_low(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    """`may_store_low`, where Megatron's optimizer allows it (--fp8-param-gather), (N,).

    It has to be distributed and, but for delayed scaling, on the device (training/arguments.py).
    """
    native, scales = (column(name, batch.precision, recipes) for name in ("native", "step_amax"))
    able = (batch.zero_stage > 0) & (~batch.cpu_offload | (scales > 1))
    return np.asarray(may_store_low(batch, recipes) & ((native == 0) | able))


def gathers_low(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> BoolColumn:
    """Whether parameters of linear layers are gathered in low precision, (N,)."""
    return np.asarray(
        stored_low(batch, recipes) & (column("wire_bytes", batch.precision, recipes) < TWO_BYTES)
    )
