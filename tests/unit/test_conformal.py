"""Stretched deviations: which score is the one that 90% lie under, counted by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from planner.calibration.accuracy import Row
from planner.calibration.conformal import (
    LEAST_MEMORY_RUNS,
    MEMORY_FLOOR,
    MEMORY_PRIOR,
    held_out_stretch,
    memory_deviation,
    stretch,
    stretches,
)
from planner.calibration.intervals import TWO_SIDED_90
from planner.units import GIB


def of_score(score: float) -> float:
    return pytest.approx(score / TWO_SIDED_90, abs=5e-4)  # type: ignore[no-any-return]


def test_it_is_the_least_score_that_nine_in_ten_do_not_exceed() -> None:
    scores = np.arange(20.0, 0.0, -1.0)
    assert stretch(scores, [str(number) for number in range(20)]) == of_score(18.0)
    assert stretch(scores[:4], ["a"] * 4) == of_score(20.0)


@pytest.mark.parametrize(("runs", "score"), [(100, 5.0), (400, 1.0)])
def test_a_source_counts_by_the_root_of_its_runs(runs: int, score: float) -> None:
    """Of 100 runs at 1 and two sources at 5 the first hold 10 / 12; of 400 they hold 20 / 22."""
    scores = np.array([1.0] * runs + [5.0, 5.0])
    assert stretch(scores, ["large"] * runs + ["b", "c"]) == of_score(score)


def test_a_trainer_has_its_own_from_three_sources_on() -> None:
    scores = np.array([1.0, 1.0, 1.0, 8.0, 8.0])
    trainers, sources = ["fsdp"] * 3 + ["megatron"] * 2, ["a", "b", "c", "a", "b"]
    assert stretches(scores, trainers, sources) == {"": of_score(8.0), "fsdp": of_score(1.0)}
    assert stretches(scores, trainers, ["a", "b", "a", "a", "b"]) == {"": of_score(8.0)}


def test_held_out_runs_are_stretched_by_their_trainer_elsewhere_or_by_all() -> None:
    scores = np.array([1.0, 2.0, 3.0, 4.0, 9.0])
    trainers, sources = ["fsdp"] * 4 + ["megatron"], ["a", "b", "c", "d", "e"]
    expected = [4.0, 4.0, 4.0, 3.0, 4.0]
    found = held_out_stretch(scores, trainers, sources)
    assert found.tolist() == [of_score(score) for score in expected]


def run(number: int, predicted: float, measured: float) -> Row:
    labels = {"complete": True, "measured": {"peak_allocated_bytes": measured}}
    estimate = SimpleNamespace(
        peak_allocated_bytes=predicted, peak_reserved_bytes=None, memory=None
    )
    return Row.build(SimpleNamespace(labels=labels, id=number), estimate)  # type: ignore[arg-type]


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
