"""Precisions: one row each in `recipes`, one line each in this registry.

The registry's order is that of the codes in columns of layouts.
"""

from planner.precision.base import (
    NOTHING,
    TWO_BYTES,
    Operands,
    Precision,
    Recipe,
    bf16_tail,
    column,
    stays_16_bit,
)
from planner.precision.recipes import (
    BF16,
    BLOCKWISE,
    DELAYED,
    FP16,
    MXFP4,
    MXFP8,
    NVFP4,
    ROWWISE,
    ROWWISE_GW_HP,
    TENSORWISE,
)
from planner.registry import Registry

PRECISIONS: Registry[Precision] = Registry(
    BF16,
    FP16,
    TENSORWISE,
    ROWWISE,
    DELAYED,
    BLOCKWISE,
    MXFP8,
    NVFP4,
    ROWWISE_GW_HP,
    MXFP4,
    kind="precision",
    field="layout.precision",
)


def torchao() -> tuple[Recipe, ...]:
    """Torchao's recipes in the order of the codes."""
    return tuple(precision.torchao for precision in PRECISIONS.values())


def transformer_engine() -> tuple[Recipe, ...]:
    """Transformer Engine's recipes in the order of the codes, torchao's where it has none."""
    return tuple(
        precision.transformer_engine or precision.torchao for precision in PRECISIONS.values()
    )


__all__ = [
    "NOTHING", "PRECISIONS", "TWO_BYTES", "Operands", "Precision", "Recipe", "bf16_tail", "column",
    "stays_16_bit", "torchao", "transformer_engine",
]  # fmt: skip
