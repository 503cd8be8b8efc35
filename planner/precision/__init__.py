"""Precisions: one row each in `recipes`, in the order of the codes in columns of layouts."""

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
from planner.precision.recipes import PRECISIONS


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
