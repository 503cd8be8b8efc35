"""Interval factors by class: the interval score, its minimum, and who may know what."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration import student
from planner.calibration.classes import PRIOR_UNITS, Misses, class_of, factor_of, interval_score
from planner.columns import FloatColumn
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.models import read_model
from tests.conftest import job_values

DENSE, EXPERTS = "dense, Hopper and Ampere", "experts, Blackwell"


def misses(log_seconds: FloatColumn, units: list[str], classes: list[str] | None = None) -> Misses:
    scales, alike = np.full(len(log_seconds), 0.1), [DENSE] * len(log_seconds)
    return Misses(log_seconds=log_seconds, scales=scales, units=units, classes=classes or alike)


def test_the_score_is_the_width_and_twenty_times_what_lies_outside() -> None:
    """Gneiting and Raftery 2007, equation 43, at alpha = 0.1."""
    misses = np.array([0.0, 0.1, -0.1, 0.25, -0.3])
    assert interval_score(misses, np.full(5, 0.2)) == pytest.approx([0.4, 0.4, 0.4, 1.4, 2.4])


@pytest.mark.parametrize("true", [0.4, 1.0, 1.6])
def test_the_factor_is_that_of_the_scale_that_runs_were_drawn_with(true: float) -> None:
    drawn = true * 0.1 * np.random.default_rng(0).standard_t(student.DEGREES, 6000)
    found = misses(drawn, [str(row // 100) for row in range(6000)]).factors()[DENSE]
    assert found == pytest.approx(true, rel=0.1)
    inside = np.abs(drawn) <= student.TWO_SIDED_90 * found * 0.1
    assert inside.mean() == pytest.approx(0.9, abs=0.02)


def test_few_units_tell_little_and_many_runs_of_one_unit_no_more() -> None:
    exact = np.zeros(40)
    one = misses(exact, ["a"] * 40).factors()[DENSE]
    four = misses(exact, ["a", "b", "c", "d"] * 10).factors()[DENSE]
    assert one == pytest.approx(0.2 ** (1.0 / (1.0 + PRIOR_UNITS)), abs=1e-3)
    assert four == pytest.approx(0.2 ** (4.0 / (4.0 + PRIOR_UNITS)), abs=1e-3)


def test_a_fold_does_not_tell_its_own_factor_and_keeps_none_that_does_not_help() -> None:
    units = [str(row // 5) for row in range(60)]
    out = np.arange(60) < 30
    folds = [out, ~out]
    alike = misses(np.full(60, 0.02), units)
    assert (alike.factors_elsewhere(folds) < 0.5).all()
    # the two folds would tell each other the wrong factor
    unlike = misses(np.repeat([0.01, 0.6], 30), units)
    assert unlike.take(~out).factors()[DENSE] > 1.2
    assert (unlike.factors_elsewhere(folds) == 1.0).all()
    apart = misses(np.full(60, 0.02), units, [DENSE] * 30 + [EXPERTS] * 30)
    assert (apart.factors_elsewhere(folds) == 1.0).all()


def test_classes_are_of_a_kind_of_model_on_a_generation_of_gpus() -> None:
    dense, experts = read_model("llama3.1-8b"), read_model("qwen3-30b-a3b")
    assert class_of(dense, "ampere") == class_of(dense, "hopper") == DENSE
    assert class_of(experts, "blackwell") == EXPERTS
    assert class_of(dense, "cdna3") == class_of(dense, "new") == "dense, other GPUs"
    named = replace(shipped_calibration(), interval_factors={DENSE: 0.5})
    assert factor_of(named, dense, "hopper") == 0.5
    assert factor_of(named, experts, "hopper") == 1.0
    assert factor_of(replace(named, own_runs={"unit": 1}), dense, "hopper") == 1.0
    hybrid = read_model("nemotron-h-56b")
    mixers = {("megatron", "hopper", name) for name in hybrid.mixers}
    assert factor_of(named, hybrid, "hopper") == 1.0
    assert factor_of(replace(named, seen=frozenset(mixers)), hybrid, "hopper") == 0.5


def test_an_estimate_is_as_wide_as_its_class_says() -> None:
    asked = read_job(job_values("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64, layout={}))
    shipped, widths = shipped_calibration(), []
    for factor in (1.0, 0.5):
        calibration = replace(shipped, interval_factors={DENSE: factor})
        assert from_document(to_document(calibration)).interval_factors == {DENSE: factor}
        widths.append(np.ptp(np.log(estimate_job(asked, calibration).interval.step_seconds)))
    assert widths[1] == pytest.approx(0.5 * widths[0])
