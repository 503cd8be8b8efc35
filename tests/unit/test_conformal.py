"""The deviation of memory, counted by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from planner.calibration.accuracy import Row
from planner.calibration.conformal import (
    LEAST_MEMORY_RUNS,
    MEMORY_FLOOR,
    MEMORY_PRIOR,
    memory_deviation,
)
from planner.calibration.intervals import TWO_SIDED_90
from planner.units import GIB


def run(number: int, predicted: float, measured: float, source: str = "one source") -> Row:
    job = SimpleNamespace(
        labels={"complete": True, "group": source, "measured": {"peak_allocated_bytes": measured}},
        id=number, layout=None,
        cluster=SimpleNamespace(gpu=SimpleNamespace(name="h100-sxm-80gb")),
        model=SimpleNamespace(is_moe=False),
    )  # fmt: skip
    estimate = SimpleNamespace(
        peak_allocated_bytes=predicted, peak_reserved_bytes=None, memory=None
    )
    return Row.build(job, estimate)  # type: ignore[arg-type]


def test_runs_that_agree_leave_the_floor_and_too_few_the_prior() -> None:
    agreeing = [run(number, 40 * GIB, 40 * GIB) for number in range(LEAST_MEMORY_RUNS)]
    assert memory_deviation(agreeing) == MEMORY_FLOOR
    assert memory_deviation(agreeing[1:]) == MEMORY_PRIOR


def test_errors_of_equal_bytes_are_a_fixed_part_and_of_equal_shares_a_relative_one() -> None:
    """Peaks of 4 to 80 GiB, above by 1.645 GiB or by 16.45% each: one GiB or 10% is a deviation."""
    peaks = np.linspace(4.0, 80.0, 40)
    bytes_off = [
        run(number, peak * GIB, peak * GIB * np.exp(TWO_SIDED_90 / peak))
        for number, peak in enumerate(peaks)
    ]
    relative, fixed = memory_deviation(bytes_off)
    assert relative == MEMORY_FLOOR[0]
    assert fixed == pytest.approx(GIB, rel=0.1)
    share_off = [
        run(number, peak * GIB, peak * GIB * np.exp(0.1 * TWO_SIDED_90))
        for number, peak in enumerate(peaks)
    ]
    relative, fixed = memory_deviation(share_off)
    assert relative == pytest.approx(0.1, rel=0.1)
    assert fixed == MEMORY_FLOOR[1]


def test_every_place_counts_once_in_the_stretch_and_in_the_fit() -> None:
    """Ninety runs of one place, and one run each of others.

    Of eleven places ten have to be inside: the one that misses by 0.9 is the last of them.
    """
    few = [run(n, 40 * GIB, 40 * GIB * np.exp(0.1 * n), f"place {n}") for n in range(10, 0, -1)]
    many = [run(n, 40 * GIB, 40 * GIB * np.exp(0.01), "many") for n in range(90)]
    relative, fixed = memory_deviation([*few, *many])
    assert TWO_SIDED_90 * np.hypot(relative, fixed / (40 * GIB)) == pytest.approx(0.9, rel=0.01)

    peaks = np.linspace(4.0, 80.0, 40)
    shares = [
        run(n, peak * GIB, peak * GIB * np.exp(0.1 * TWO_SIDED_90), f"place {n}")
        for n, peak in enumerate(peaks)
    ]
    bytes_off = [
        run(n, peak * GIB, peak * GIB * np.exp(TWO_SIDED_90 / peak), "many")
        for n, peak in enumerate(np.tile(peaks, 20))
    ]
    relative, fixed = memory_deviation([*shares, *bytes_off])
    assert relative == pytest.approx(0.1, rel=0.1)
    assert fixed == MEMORY_FLOOR[1]
