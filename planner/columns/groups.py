"""Layouts share most of their work, so each distinct combination of fields is evaluated once.

A table is computed on U distinct rows and read by N layouts through `inverse`. For one layout
U = N = 1.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from planner.columns import Column, IntColumn, LayoutBatch

# 64-bit numbers without a pattern, all odd
_NUMBERS = [int.from_bytes(blake2b(bytes([n]), digest_size=8).digest()) | 1 for n in range(64)]
_MIXERS = np.array(_NUMBERS, dtype=np.uint64)
# every column's bits are taken with 2^64 / golden ratio added: the sum of what that adds
_OFFSETS = np.append(
    np.uint64(0), np.cumsum(_MIXERS * np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
)


def hashes(columns: Sequence[Column]) -> NDArray[np.uint64]:
    """A 64-bit multilinear hash of every row.

    10^5 distinct combinations clash with probability below 10^-9.
    """
    mixed = np.full(len(columns[0]), _OFFSETS[len(columns)])
    product, alike = np.empty_like(mixed), 0
    for mixer, number, column in zip(_MIXERS, _NUMBERS, columns, strict=False):
        if column.strides == (0,) and len(column):  # one number for all rows
            if column.dtype != np.float64:
                alike += number * int(column[0])
                continue
            column = column[:1]
        column = np.ascontiguousarray(column)
        bits = column.view(np.uint64) if column.itemsize == 8 else column.astype(np.uint64)
        if column.dtype == np.float64:
            bits = _high_and_low(bits)
        mixed += np.multiply(bits, mixer, out=product[: len(bits)])
    if alike:
        mixed += np.uint64(alike % 2**64)
    return _scrambled(mixed)


def _high_and_low(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits of floats with their high half in the low one too: small numbers differ there alone."""
    return bits ^ (bits >> np.uint64(32))


def _scrambled(mixed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed ^= mixed >> np.uint64(29)
    return mixed


def unique_rows(columns: Sequence[Column]) -> tuple[IntColumn, IntColumn]:
    """(first row of each distinct combination (U,), index of every row's combination (N,)).

    Combinations are told apart by their hashes.
    """
    _, first, inverse = np.unique(hashes(columns), return_index=True, return_inverse=True)
    return first, inverse


def distinct(batch: LayoutBatch, names: Sequence[str]) -> tuple[LayoutBatch, IntColumn]:
    """(batch of the U distinct rows by these fields, inverse (N,))."""
    first, inverse = unique_rows([getattr(batch, name) for name in names])
    return batch.take(first), inverse
