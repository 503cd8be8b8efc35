"""Measured sweeps as hidden truth: rows that measure one job under different layouts.

They are predicted without their source. There are published ones, and those of one's own GPU
(`gpu_survey.py`), which the shipped calibration has not seen.
"""

import json
import pathlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from replay_strategies import Truth

from planner.calibration.accuracy import Row
from planner.calibration.held_out import Fitted
from planner.calibration.intervals import TWO_SIDED_90, memory_deviation
from planner.columns import LayoutBatch
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.estimates import estimate_jobs
from planner.intake.jobs import read_job
from planner.specs.measurement import question_hash
from planner.study.candidates import MEMORY_KINDS, Candidates, JobSize, Prior

MEASURED = pathlib.Path(__file__).parent / "measured"
ROWS = MEASURED / "public.jsonl"
OWN = "own-*.runs.jsonl"
FEWEST = 3  # different layouts
NAME_DIGITS = 10


@lru_cache(maxsize=1)
def published_sweeps() -> tuple[Truth, ...]:
    """Sweeps of the published rows."""
    raw = [json.loads(text) for text in ROWS.read_text().splitlines()]
    jobs = [read_job(row) for row in raw]
    rows = [
        Row(job=job, estimate=estimate)
        for job, estimate in zip(jobs, estimate_jobs(jobs), strict=True)
    ]
    fitted = Fitted.find(rows, shipped_calibration())
    assert fitted is not None, (
        "the shipped calibration was not fitted to these rows: run benchmarks/calibrate.py"
    )
    return sweeps_of(fitted.left_out(rows, "group"))


def sweeps_of(rows: Iterable[Row]) -> tuple[Truth, ...]:
    """Sweeps of at least FEWEST layouts, of which at least two ran.

    Out-of-memory layouts count; repeats of a layout are averaged.
    """
    sweeps: dict[str, dict[object, list[Row]]] = {}
    for row in rows:
        if row.estimate.step_seconds and (row.measured_seconds or row.status == "oom"):
            sweeps.setdefault(str(row.job.labels["sweep"]), {}).setdefault(
                row.job.layout, []
            ).append(row)
    return tuple(
        _truth(name, list(groups.values())) for name, groups in sweeps.items() if _is_sweep(groups)
    )


def own_sweeps(folder: pathlib.Path = MEASURED) -> tuple[Truth, ...]:
    """Sweeps of the surveys in a folder: real runs (no emulated ranks) of one job.

    Of repeats the last one counts. Empty without a survey.
    """
    sweeps: dict[str, dict[object, list[Row]]] = {}
    for path in sorted(folder.glob(OWN)):
        raw = {
            row["id"]: row
            for text in path.read_text().splitlines()
            if text.strip()
            for row in [json.loads(text)]
        }
        jobs = [read_job(row) for row in raw.values() if row["measured"].get("rung") != "emulated"]
        for job, estimate in zip(jobs, estimate_jobs(jobs), strict=True):
            row = Row(job=job, estimate=estimate)
            if estimate.step_seconds and (row.measured_seconds or row.status == "oom"):
                sweeps.setdefault(question_hash(job)[:NAME_DIGITS], {})[job.layout] = [row]
    return tuple(
        _truth(name, list(groups.values())) for name, groups in sweeps.items() if _is_sweep(groups)
    )


def _is_sweep(groups: dict[object, list[Row]]) -> bool:
    return len(groups) >= FEWEST and sum(rows[0].status == "ok" for rows in groups.values()) >= 2


def _truth(name: str, groups: list[list[Row]]) -> Truth:
    """Candidates sorted as `Candidates.build` sorts them, with their measurements in that order."""
    first = [rows[0] for rows in groups]
    job = first[0].job
    pricer = Pricer.build(job.model, job.cluster, job.training)
    batch = LayoutBatch.from_layouts(
        [row.job.layout for row in first if row.job.layout is not None]
    )
    prices = pricer.price(batch)
    memory = {kind: getattr(prices, kind) for kind in MEMORY_KINDS}
    predicted = np.array([row.estimate.step_seconds for row in first])
    prior = Prior(
        log_seconds=np.log(predicted),
        sd=np.array([_deviation(row) for row in first]),
        factor=np.zeros((len(first), 0)),
        oom_probability=np.array([row.estimate.oom_probability for row in first]),
        memory_sd=memory_deviation(pricer.profile, prices.device_bytes),
    )
    setting = JobSize(
        usable_bytes=float(job.cluster.usable_memory_bytes),
        num_gpus=job.cluster.num_gpus,
        global_batch_size=job.training.global_batch_size,
    )
    order = np.argsort(prior.log_seconds, kind="stable")
    seconds = np.array(
        [
            np.mean(
                [np.log(row.measured_seconds) if row.measured_seconds else np.inf for row in rows]
            )
            for rows in groups
        ]
    )
    ratio = np.array([_memory_ratio(row) for row in first])
    out = np.array([row.status == "oom" for row in first])
    return Truth(
        name=f"{job.labels['group']} {name}",
        candidates=Candidates.build(batch, prior, memory, setting),
        log_seconds=seconds[order],
        memory_ratio=ratio[order],
        out_of_memory=out[order],
        noise_sd=0.0,
    )


def _deviation(row: Row) -> float:
    assert row.estimate.interval is not None
    low, high = row.estimate.interval.step_seconds
    return float(np.log(high / low) / (2.0 * TWO_SIDED_90))


def _memory_ratio(row: Row) -> float:
    """Measured over predicted memory, if it was measured."""
    if row.measured.get("peak_reserved_bytes") and row.estimate.peak_reserved_bytes:
        return row.measured.get("peak_reserved_bytes") / row.estimate.peak_reserved_bytes
    if row.measured.get("peak_allocated_bytes") and row.predicted("peak_allocated_bytes"):
        return row.measured.get("peak_allocated_bytes") / row.predicted("peak_allocated_bytes")
    return 1.0
