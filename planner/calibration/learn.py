"""A calibration sharpened by one's own runs: the shipped posterior is the prior, the runs move the knobs of their trainer and GPU.

On one's own cluster the offset of a source is no nuisance: it is what one wants to know. So here it is part of the knobs.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.calibration.basis import seen
from planner.calibration.fit import Data, fingerprint, fit
from planner.cost.calibration import Calibration
from planner.specs.job import Job
from planner.specs.measurement import Measurement

TEACHING = frozenset({"probed", "imitated", "published"})  # an emulated rank's communication came from the model itself
NO_OFFSET = 1e-3  # standard deviation of an offset that is not to take anything away from the knobs
ID_DIGITS = 10


def learn(calibration: Calibration, measurements: Sequence[Measurement]) -> Calibration:
    """The calibration after these runs; the same one when none of them tells a step time.

    Repeated runs of one layout are averaged: what the model misses about it is the same each time. The deviation that all runs of one
    place share falls as 1 / sqrt(1 / group_sd^2 + n / run_sd^2) with n distinct layouts. Same runs, same id. Runs that the calibration
    was fitted to have taught it already.
    """
    by_layout: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in sorted(measurements, key=lambda one: one.id):
        if _teaches(measurement) and not _known(calibration, measurement):
            key = measurement.key()
            by_layout.setdefault((key.job_hash, key.layout_hash), []).append(measurement)
    if not by_layout:
        return calibration
    jobs: list[Job] = [runs[0].job for runs in by_layout.values()]
    seconds = [math.exp(float(np.mean([math.log(run.measured.step_seconds or 1.0) for run in runs]))) for runs in by_layout.values()]
    data = replace(Data.of(jobs, seconds), sources=("own",) * len(jobs))
    learnt, _ = fit(data, replace(calibration, group_sd=NO_OFFSET, place=0.0))
    taught = "".join(run.id for runs in by_layout.values() for run in runs)
    digest = hashlib.sha256(f"{calibration.id}{taught}".encode()).hexdigest()[:ID_DIGITS]
    shared = (calibration.group_sd**-2.0 + len(jobs) / calibration.run_sd**2) ** -0.5
    return replace(
        learnt, id=f"{calibration.id}+{len(jobs)}-{digest}", group_sd=shared, place=calibration.place * shared / calibration.group_sd,
        sensitivity=calibration.sensitivity, seen=calibration.seen | seen(jobs),
    )  # fmt: skip


def _teaches(measurement: Measurement) -> bool:
    measured = measurement.measured
    return measured.status == "ok" and bool(measured.step_seconds) and measured.rung in TEACHING and measurement.job.layout is not None


def _known(calibration: Calibration, measurement: Measurement) -> bool:
    return fingerprint(measurement.job, measurement.measured.step_seconds or 0.0) in calibration.fitted
