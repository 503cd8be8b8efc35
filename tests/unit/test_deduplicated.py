"""Distinct rows: told apart whatever their columns hold, and each row finds its own again."""

import numpy as np
import pytest

from planner.columns.groups import _same_row, hashes, unique_rows


def test_rows_that_differ_in_small_numbers_alone_are_told_apart() -> None:
    """Of small numbers in float64 only the highest bits differ."""
    layers, again, ends = (x.ravel().astype(float) for x in np.mgrid[:40, :40, :2])
    assert len(np.unique(hashes([layers, again, ends]))) == 40 * 40 * 2
    first, inverse = unique_rows([np.tile(layers, 2), np.tile(again, 2), np.tile(ends, 2)])
    assert len(first) == 3200
    assert (np.tile(layers, 2)[first][inverse] == np.tile(layers, 2)).all()


def test_few_rows_have_the_hashes_that_they_have_among_many() -> None:
    rng = np.random.default_rng(0)
    columns = [
        rng.integers(-1, 50, 300),
        rng.integers(0, 2, 300).astype(np.bool_),
        np.round(rng.random(300), 2),
        np.broadcast_to(np.int64(7), 300),
        rng.integers(0, 9, 300).astype(np.int32),
    ]
    many = hashes(columns)
    few = np.concatenate([hashes([c[at : at + 100] for c in columns]) for at in (0, 100, 200)])
    assert few.tolist() == many.tolist()


@pytest.mark.parametrize("alike", [8, 40, 64])
def test_hashes_that_share_many_bits_are_told_apart(alike: int) -> None:
    """Hashes whose first bits are equal share their first slots in the table."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**63, size=200).astype(np.uint64) >> np.uint64(min(alike, 60))
    codes = codes[rng.integers(0, 200, size=5000)]
    same = _same_row(codes)
    assert (codes[same] == codes).all()
    assert len(np.unique(same)) == len(np.unique(codes))
