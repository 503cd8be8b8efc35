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
    same = _same_row(hashes(columns))
    found = np.flatnonzero(same == np.arange(len(same)))
    index = np.empty_like(same)
    index[found] = np.arange(len(found))
    return found, index[same]


def _same_row(codes: NDArray[np.uint64]) -> IntColumn:
    """For every hash the index of one that is equal, the same for all equal ones.

    Hashes are put into a table by some of their bits; those that find another there are few and
    are put into it again by other bits. np.unique, which sorts, takes 30% of all layouts a second.
    """
    bits = len(codes).bit_length() + 2
    table = np.empty(1 << bits, dtype=np.int64)
    same, rows = np.empty(len(codes), dtype=np.int64), np.arange(len(codes))
    for shift in range(64 - bits, -1, -bits):
        left = codes[rows]
        slots = ((left >> np.uint64(shift)) & np.uint64(len(table) - 1)).astype(np.int64)
        table[slots] = rows
        same[rows] = table[slots]
        rows = rows[codes[same[rows]] != left]
        if not len(rows):
            return same
    _, first, inverse = np.unique(codes[rows], return_index=True, return_inverse=True)
    same[rows] = rows[first[inverse]]
    return same


def distinct(batch: LayoutBatch, names: Sequence[str]) -> tuple[LayoutBatch, IntColumn]:
    """(batch of the U distinct rows by these fields, inverse (N,))."""
    first, inverse = unique_rows([getattr(batch, name) for name in names])
    return batch.take(first), inverse
