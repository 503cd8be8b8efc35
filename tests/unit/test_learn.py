"""Own runs sharpen the calibration of their trainer and GPU, for other models too."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.fit import fingerprint
from planner.calibration.intervals import time_spread
from planner.calibration.learn import learn
from planner.catalog.calibrations import shipped_calibration
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement

SLOWER = 1.25


def job(model: str = "llama3-8b", **layout: object) -> Job:
    training = {"seq_len": 8192, "global_batch_size": 64}
    return Job.from_user({"model": model, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}, "training": training, "layout": layout})


def predicted(asked: Job, calibration: object = None) -> float:
    assert asked.layout is not None
    pricer = Pricer.build(asked.model, asked.cluster, asked.training, calibration)  # type: ignore[arg-type]
    return float(pricer.price(LayoutBatch.from_layouts([asked.layout])).step_seconds[0])


def measurement(name: str, asked: Job, factor: float = SLOWER, **fields: object) -> Measurement:
    numbers = {"rung": "probed", "step_seconds": factor * predicted(asked), **fields}
    return Measurement(id=name, created_at="2026-01-01T00:00:00+00:00", job=asked, measured=Measured.model_validate(numbers))


RUNS = [measurement("a", job()), measurement("b", job(ac="full")), measurement("c", job(tp=2))]


def test_a_slower_machine_is_learnt_and_serves_another_model() -> None:
    learnt = learn(shipped_calibration(), RUNS)
    other = job("qwen3-8b")
    before, after = predicted(other), predicted(other, learnt)
    assert 1.10 * before < after < 1.02 * SLOWER * before
    assert learnt.id.startswith(f"{shipped_calibration().id}+3-")


def test_learning_makes_surer() -> None:
    asked = job("qwen3-8b")
    assert asked.layout is not None
    batch = LayoutBatch.from_layouts([asked.layout])
    spreads = []
    for calibration in (shipped_calibration(), learn(shipped_calibration(), RUNS)):
        pricer = Pricer.build(asked.model, asked.cluster, asked.training, calibration)
        spreads.append(float(time_spread(pricer, batch, pricer.price(batch)).sd[0]))
    assert spreads[1] < spreads[0]


def test_repeats_count_once_and_are_averaged() -> None:
    once = learn(shipped_calibration(), [measurement("a", job(), 1.2)])
    noisy = learn(shipped_calibration(), [measurement("a", job(), 1.1), measurement("b", job(), 1.2**2 / 1.1)])
    assert noisy.shifts == pytest.approx(once.shifts, abs=1e-9)
    assert noisy.id != once.id


def test_same_runs_same_calibration_whatever_their_order() -> None:
    first, second = learn(shipped_calibration(), RUNS), learn(shipped_calibration(), RUNS[::-1])
    assert first.id == second.id
    assert np.array_equal(first.shifts, second.shifts)


def test_what_tells_no_time_teaches_nothing() -> None:
    shipped = shipped_calibration()
    silent = [
        measurement("a", job(), status="oom"), measurement("b", job(), rung="emulated"),
        Measurement(id="c", created_at="", job=job(), measured=Measured(rung="probed")),
    ]  # fmt: skip
    assert learn(shipped, silent) is shipped
    assert learn(shipped, []) is shipped


def test_another_trainer_moves_less_than_the_one_that_ran() -> None:
    learnt = learn(shipped_calibration(), RUNS)
    own = np.log(predicted(job(), learnt) / predicted(job()))
    training = {"seq_len": 8192, "global_batch_size": 64, "trainer": "megatron"}
    foreign = Job.from_user({"model": "llama3-8b", "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8}, "training": training, "layout": {}})
    assert abs(np.log(predicted(foreign, learnt) / predicted(foreign))) < 0.5 * own
    assert replace(learnt, id="x").fitted == shipped_calibration().fitted


def test_runs_that_it_was_fitted_to_teach_nothing() -> None:
    calibration = shipped_calibration()
    told = replace(calibration, fitted=calibration.fitted | {fingerprint(run.job, run.measured.step_seconds or 0.0) for run in RUNS[:2]})
    assert learn(told, RUNS[:2]) is told
    assert learn(told, RUNS).id.startswith(f"{told.id}+1-")
