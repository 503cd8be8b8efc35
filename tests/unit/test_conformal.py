"""The deviation of memory, counted by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from planner.calibration import conformal
from planner.calibration.accuracy import Row
from planner.calibration.conformal import MEMORY_FLOOR, memory_deviation
from planner.calibration.intervals import TWO_SIDED_90
from planner.units import GIB


def run(
    number: int, predicted: float, off: float, source: str = "one source", complete: bool = True
) -> Row:
    """A run that needed e^off times the bytes that were predicted."""
    needed = {"peak_allocated_bytes": predicted * np.exp(off)}
    job = SimpleNamespace(
        labels={"complete": complete, "group": source, "measured": needed}, id=number, layout=None,
        cluster=SimpleNamespace(gpu=SimpleNamespace(name="h100-sxm-80gb")),
        model=SimpleNamespace(is_moe=False),
    )  # fmt: skip
    unsaid = {"peak_reserved_bytes": None, "memory": None}
    return Row.build(job, SimpleNamespace(peak_allocated_bytes=predicted, **unsaid))  # type: ignore[arg-type]


def of_one_peak(runs: list[Row]) -> float:
    """How far runs predicted at 40 GiB may be off, of the logarithm."""
    relative, fixed = memory_deviation(runs)
    return float(TWO_SIDED_90 * np.hypot(relative, fixed / (40 * GIB)))


def test_runs_that_agree_leave_the_floor_and_too_few_the_prior() -> None:
    agreeing = [run(number, 40 * GIB, 0.0) for number in range(conformal.LEAST_MEMORY_RUNS)]
    assert memory_deviation(agreeing) == MEMORY_FLOOR
    assert memory_deviation(agreeing[1:]) == conformal.MEMORY_PRIOR


def test_memory_deviates_as_runs_do_that_state_everything() -> None:
    """40 runs off by 6% either way, and 60 by half whose rows leave settings open."""
    stated = [run(number, 40 * GIB, 0.06 if number % 2 else -0.06) for number in range(40)]
    others = [run(number, 40 * GIB, np.log(1.5), complete=False) for number in range(60)]
    assert of_one_peak([*stated, *others]) == pytest.approx(0.06, rel=0.15)


def test_coverage_is_of_places_and_of_one_place_none() -> None:
    many = [run(number, 40 * GIB, 0.01, "many") for number in range(200)]
    few = [run(number, 40 * GIB, 0.08, f"few {number}") for number in range(5)]
    assert conformal.memory_coverage([*few, *many]) == 1.0
    assert conformal.memory_coverage(many) is None


PEAKS = np.linspace(4.0, 80.0, 40)


def off_by(deviations: np.ndarray, source: str = "one source", times: int = 1) -> list[Row]:
    """Runs at the PEAKS in GiB, above them by 1.645 of these deviations. {}: the run's number."""
    off = np.tile([PEAKS * GIB, TWO_SIDED_90 * deviations], times).T
    return [run(number, *one, source.format(number)) for number, one in enumerate(off)]


BYTES, SHARES = 1.0 / PEAKS, np.full(len(PEAKS), 0.1)  # a GiB of each, or 10% of each


def test_errors_of_equal_bytes_are_a_fixed_part_and_of_equal_shares_a_relative_one() -> None:
    relative, fixed = memory_deviation(off_by(BYTES))
    assert (relative, fixed) == (MEMORY_FLOOR[0], pytest.approx(GIB, rel=0.1))
    relative, fixed = memory_deviation(off_by(SHARES))
    assert (relative, fixed) == (pytest.approx(0.1, rel=0.1), MEMORY_FLOOR[1])


def test_every_place_counts_once_in_the_stretch_and_in_the_fit() -> None:
    """Of eleven places ten have to be inside: the one that misses by 0.9 is the last of them."""
    few = [run(n, 40 * GIB, 0.1 * n, f"place {n}") for n in range(10, 0, -1)]
    many = [run(n, 40 * GIB, 0.01, "many") for n in range(90)]
    assert of_one_peak([*few, *many]) == pytest.approx(0.9, rel=0.01)
    many = off_by(BYTES, "many", times=20)
    relative, fixed = memory_deviation([*off_by(SHARES, "place {}"), *many])
    assert (relative, fixed) == (pytest.approx(0.1, rel=0.1), MEMORY_FLOOR[1])
