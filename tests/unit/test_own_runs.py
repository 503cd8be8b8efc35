"""Runs priced once teach what a fit that prices them again teaches, also when read back."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_survey import MEASURED, read_rows
from benchmarks.map_fit import fit
from planner.calibration import update
from planner.calibration.fit import Data
from planner.calibration.own_runs import (
    PRIOR_RUNS,
    REFERENCE,
    REFERENCE_OFFSET,
    REFERENCE_SD,
    PricedRun,
    priced,
    run_scale,
)
from planner.calibration.update import learn, learn_priced
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from tests.conftest import job_values
from tests.pricing import step_seconds


def job(model: str = "llama3-8b", **layout: Any) -> Job:
    return read_job(job_values(model, "h100-sxm-80gb", 8, 8192, 16, layout=layout))


def run(name: str, asked: Job, factor: float) -> Measurement:
    numbers = Measured(rung="probed", step_seconds=factor * step_seconds(asked))
    made = "2026-01-01T00:00:00+00:00"
    return Measurement(id=name, created_at=made, job=asked, measured=numbers)


def runs_of(factors: Iterable[float]) -> list[Measurement]:
    """Of LAYOUTS, as many as there are factors."""
    pairs = enumerate(zip(LAYOUTS, factors, strict=False))
    return [run(f"m-{i}", job(**layout), factor) for i, (layout, factor) in pairs]


LAYOUTS: list[dict[str, Any]] = [{}, {"ac": "full"}, {"tp": 2}, {"compile": True}]
OTHERS = [job("qwen3-8b"), job(tp=4), job("llama3.2-3b", ac="full")]


@pytest.mark.parametrize("factor", [0.75, 1.2, 2.0])
def test_one_solve_is_as_good_as_a_fit_that_prices_again(factor: float) -> None:
    """Within the noise of one run, for layouts that ran and for others."""
    noise = np.exp(0.03 * np.random.default_rng(1).standard_normal(len(LAYOUTS)))
    runs = runs_of(factor * noise)
    jobs, times = zip(*((one.job, one.measured.step_seconds) for one in runs), strict=True)
    shipped = shipped_calibration()
    learnt = learn(shipped, runs)
    start = shipped.at_one_place([("torchtitan", jobs[0].cluster.gpu.family)])
    again, _ = fit(Data.of(jobs, times, own=True), start, own=True)
    close = shipped.own_run_sd / 2 * abs(np.log(factor)) / np.log(1.2)
    for asked in (*jobs, *OTHERS):
        assert step_seconds(asked, learnt) == pytest.approx(step_seconds(asked, again), rel=close)


def test_a_saved_run_teaches_the_same_and_prices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, runs = shipped_calibration(), runs_of([1.2, 1.2])
    whole = learn(shipped, runs)
    known = []
    for one in priced(shipped, runs):
        stored = json.loads(json.dumps(one.as_dict()))
        named = {"run_id": one.id, "layout": one.layout, "step_seconds": one.step_seconds}
        known.append(PricedRun.from_dict(stored, **named))
    assert len(known) == len(runs)
    assert None not in known
    monkeypatch.setattr(Pricer, "build", None)
    again = learn_priced(shipped, known)
    assert (again.id, again.seen) == (whole.id, whole.seen)
    assert again.shifts == pytest.approx(whole.shifts, abs=1e-6)


def test_what_was_priced_with_other_knobs_is_priced_anew() -> None:
    (one,) = priced(shipped_calibration(), [run("m", job(), 1.2)])
    older = {**one.as_dict(), "knobs": ["compute"], "gradient": [1.0]}
    assert PricedRun.from_dict(older, run_id="m", layout="", step_seconds=1.0) is None
    assert update.learn_priced(shipped_calibration(), []) is shipped_calibration()


def by(program: str | None, one: Measurement, **more: Any) -> Measurement:
    measured = one.measured.model_copy(update={"trainer": program, **more})
    return one.model_copy(update={"measured": measured, "id": f"{one.id}-{program}"})


def test_what_the_reference_program_measures_is_joined_to_the_trainer_by_an_offset() -> None:
    """Alone it teaches less the expected offset; beside the trainer's own runs, the difference."""
    shipped, other, asked = shipped_calibration(), job("qwen3-8b"), runs_of([1.10] * 4)
    titan = learn(shipped, [by("torchtitan", one) for one in asked])
    alone = learn(shipped, [by(REFERENCE, one) for one in asked])
    less = np.log(step_seconds(other, titan) / step_seconds(other, alone))
    assert 0.5 * REFERENCE_OFFSET < less < 2.0 * REFERENCE_OFFSET
    # this machine's reference program is 8% slower than its trainer, as one layout by both says
    both = [by(REFERENCE, one) for one in asked] + [by("torchtitan", run("t", job(), 1.02))]
    joined = learn(shipped, both)
    assert step_seconds(other, joined) < 0.99 * step_seconds(other, alone)
    assert joined.own_runs == {"torchtitan on h100-sxm-80gb, bf16, dense": 5}
    assert not any("program" in name for name, _ in joined.keys)


def test_the_offset_is_what_a_first_day_showed() -> None:
    rows = read_rows(MEASURED / "first-day" / "own-h200-sxm-141gb.runs.jsonl")
    step = {row["id"]: row["measured"].get("step_seconds") for row in rows}
    pairs = [
        (seconds, step[f"{name.removesuffix('reference')}torchtitan"])
        for name, seconds in step.items()
        if name.startswith("5/") and name.endswith("/reference") and name.count("/") > 1
    ]
    logs = [float(np.log(ours / theirs)) for ours, theirs in pairs]
    assert len(logs) == 3
    assert float(np.mean(logs)) == pytest.approx(REFERENCE_OFFSET, abs=0.001)
    assert float(np.std(logs, ddof=1)) < REFERENCE_SD


def test_a_run_beside_others_counts_a_quarter() -> None:
    """Of layouts that disagree, the one that had its GPU to itself is believed more."""
    shipped, other = shipped_calibration(), job("qwen3-8b")
    fast, slow = run("a", job(), 0.95), run("b", job(ac="full"), 1.10)
    equal = step_seconds(other, learn(shipped, [fast, slow]))
    assert step_seconds(other, learn(shipped, [fast, by(None, slow, shared=True)])) < equal
    assert step_seconds(other, learn(shipped, [by(None, fast, shared=True), slow])) > equal


def test_the_scale_of_own_runs_follows_their_own_scatter() -> None:
    """The mean of what is known before, worth PRIOR_RUNS runs, and of what n - 1 runs show."""
    known = 0.04
    assert run_scale(np.array([0.5]), known) == pytest.approx(known)
    agreeing, apart = np.array([0.3, 0.3, 0.3]), np.array([-0.4, 0.0, 0.4])
    assert run_scale(agreeing, known) == pytest.approx(known * (PRIOR_RUNS / 4.0) ** 0.5)
    assert run_scale(apart, known) ** 2 == pytest.approx((PRIOR_RUNS * known**2 + 0.32) / 4.0)


def test_runs_that_contradict_each_other_are_believed_less_than_runs_that_agree() -> None:
    """Their mean is the same: 10% slow."""
    shipped, other = shipped_calibration(), job("qwen3-8b")
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    agreeing, apart = (
        np.log(step_seconds(other, learn(shipped, runs_of(1.10 * np.exp(signs * spread)))))
        - np.log(step_seconds(other))
        for spread in (0.0, 0.2)
    )
    assert agreeing == pytest.approx(np.log(1.10), abs=0.02)
    assert 0.0 < apart < 0.5 * agreeing
