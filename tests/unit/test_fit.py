"""Calibration recovers what made the data, and leaves alone what the data does not touch."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.fit import KNOBS, OWN_SHARE, Calibration, Data, fit, predict, predictive_sd
from planner.specs.job import Job

KNOB = {knob.name: knob for knob in KNOBS}


def job(num_gpus: int, seq_len: int, trainer: str = "torchtitan", **layout: object) -> Job:
    return Job.from_user(
        {
            "model": "llama3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus},
            "training": {"seq_len": seq_len, "global_batch_size": 64, "trainer": trainer},
            "layout": {"compile": trainer == "torchtitan", **layout},
        }
    )


JOBS = [job(8, 4096), job(8, 8192), job(8, 8192, ac="full"), job(16, 8192, tp=2), job(16, 4096, tp=8), job(8, 2048, micro_batch_size=4)]


def made_with(shift: float) -> Data:
    """Runs of a trainer whose kernels are e^shift faster than the prior says."""
    silent = Data.of(JOBS, [1.0] * len(JOBS))
    truth = Calibration(keys=(("compute", "torchtitan"),), shifts=np.array([shift]), covariance=np.zeros((1, 1)))
    return replace(silent, log_seconds=predict(silent, truth))


@pytest.mark.parametrize("shift", [-0.15, 0.15])
def test_a_shift_of_the_truth_is_found(shift: float) -> None:
    data = made_with(shift)
    before = np.abs(predict(data, Calibration(keys=(), shifts=np.zeros(0), covariance=np.zeros((0, 0)))) - data.log_seconds)
    calibration = fit(data)
    after = np.abs(predict(data, calibration) - data.log_seconds)
    assert after.max() < 0.02 < before.max()
    faster = calibration.profile("torchtitan").compute * calibration.shift(KNOB["gemm_bf16"], "hopper")
    assert np.sign(calibration.shift(KNOB["compute"], "torchtitan") + calibration.shift(KNOB["gemm_bf16"], "hopper")) == np.sign(shift), (
        faster
    )


def test_a_trainer_never_measured_moves_with_the_others_and_is_less_sure() -> None:
    calibration = fit(made_with(0.15))
    shared = calibration.shift(KNOB["compute"], "megatron")
    assert 0.0 < shared <= calibration.shift(KNOB["compute"], "torchtitan")
    known, unknown = Data.of(JOBS[:1], [1.0]), Data.of([job(8, 4096, trainer="megatron")], [1.0])
    assert predictive_sd(unknown, calibration)[0] > predictive_sd(known, calibration)[0]


def test_no_runs_leave_the_priors() -> None:
    calibration = Calibration(keys=(), shifts=np.zeros(0), covariance=np.zeros((0, 0)))
    profile = calibration.profile("torchtitan")
    assert all(getattr(profile, knob.name) == pytest.approx(knob.prior) for knob in KNOBS if not knob.kernel)
    assert 0.0 < OWN_SHARE < 1.0
