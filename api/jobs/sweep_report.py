"""The report of a run of a sweep: what was measured, what changed, who won, what failed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.api.errors import StoredError
from planner.api.jobs.failures import BadHostLine, hosts_of, step_of
from planner.api.jobs.study_probes import IMPLAUSIBLE
from planner.api.jobs.sweep_layouts import Item, SpentByRun
from planner.api.storage.job_records import TaskRecord
from planner.api.wiring import Wiring
from planner.errors import ProbeError, SpecError
from planner.specs.job import Job
from planner.specs.measurement import Measurement
from planner.units import counted

CHANGED = 0.03  # relative change of a step that the headline counts; a judgement
Line = dict[str, Any]


@dataclass(kw_only=True)
class JobOfRun:
    """A job of a run with its layouts; or why it has none."""

    job: Job
    items: Sequence[Item] = ()
    failure: str | None = None
    error: str | None = None


def line_of(wiring: Wiring, run: TaskRecord, item: Item, why_not: str) -> Line:
    """The report on one layout. why_not: why nothing was attempted, where nothing was."""
    attempts = item.attempts
    line: Line = {
        "layout": item.layout.short(),
        "why": item.why,
        "predicted_step_seconds": item.predicted_seconds,
        "status": "skipped",
        "step_seconds": None,
        "change": None,
        "changed": False,
        "message": None,
        "attempts": len(attempts),
    }
    if isinstance(item.requested, str):
        return {**line, "failure": SpecError.kind, "message": item.requested}
    if not attempts:
        return {**line, "message": why_not}
    measured = [one for one in attempts if one.measurement_id is not None]
    # of a layout that ran on several hosts its fastest run counts
    record = min(measured or attempts[-1:], key=lambda one: step_of(one) or float("inf"))
    line["hosts"] = sorted(hosts_of(record))
    if record.measurement_id is None:
        return {**line, "status": "failed", "failure": record.failure, "message": record.message}
    measurement = wiring.measurements.get(record.measurement_id)
    if measurement.refused is not None:
        refused = {"failure": IMPLAUSIBLE, "message": measurement.refused}
        return {**line, "status": "failed", "measurement_id": measurement.id, **refused}
    return {**line, **_measured(wiring, run, measurement)}


def _measured(wiring: Wiring, run: TaskRecord, measurement: Measurement) -> Line:
    seconds = measurement.measured.step_seconds
    before = wiring.measurements.newest_before(measurement, run.asked_by or "")
    then = before.measured.step_seconds if before else None
    change = seconds / then - 1.0 if seconds and then else None
    return {
        "status": measurement.measured.status,
        "step_seconds": seconds,
        "measurement_id": measurement.id,
        "software": dict(measurement.software),
        "change": change,
        "changed": change is not None and abs(change) > CHANGED,
        "versions_changed": _versions(before, measurement) if before else {},
        "message": measurement.measured.message,
    }


def _versions(before: Measurement, after: Measurement) -> dict[str, list[str | None]]:
    """Software that differs: name -> [before, after]."""
    names = sorted({*before.software, *after.software})
    pairs = {name: [before.software.get(name), after.software.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---- the whole -----------------------------------------------------------------------------------


def report_of(
    wiring: Wiring,
    run: TaskRecord,
    run_jobs: Sequence[JobOfRun],
    spent: SpentByRun,
    bad: Sequence[BadHostLine],
) -> dict[str, Any]:
    newest = _jobs_before(wiring, run)
    jobs = [_job(one, index, newest) for index, one in enumerate(run_jobs)]
    lines = [line for job in jobs for line in job["layouts"]]
    changed = [line for line in lines if line["changed"]]
    failed = [line for line in lines if line["status"] in ("failed", "oom")]
    planless = [job for job in jobs if job.get("error")]
    winners = [job for job in jobs if job["new_winner"]]
    headline = (
        f"{sum(line['status'] == 'ok' for line in lines)} of "
        f"{counted(len(lines), 'layout')} measured, "
        f"{len(changed)} changed by more than {CHANGED:.0%}, "
        f"{counted(len(winners), 'new winner')}, {counted(len(failed) + len(planless), 'failure')}"
    )
    if bad:
        headline += f", {counted(len(bad), 'host')} in quarantine"
    kinds = Counter("oom" if line["status"] == "oom" else str(line["failure"]) for line in failed)
    kinds.update(str(job["failure"]) for job in planless)
    return {
        "headline": headline,
        "probes": spent.probes,
        "gpu_seconds": round(spent.gpu_seconds, 1),
        "retried": spent.retried,
        "most_at_once": spent.most_at_once,
        "failures": dict(sorted(kinds.items())),
        "quarantined": [asdict(one) for one in bad],
        "jobs": jobs,
    }


def _job(
    one: JobOfRun, index: int, newest: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    cluster = one.job.cluster
    name = {"model": one.job.model.name, "gpu": cluster.gpu.name, "num_gpus": cluster.num_gpus}
    if one.error is not None:
        nothing: Line = {"layouts": [], "winner": None, "new_winner": False}
        return {**name, "failure": one.failure, "error": one.error, **nothing}
    lines = [item.line for item in one.items if item.line is not None]
    times = {line["layout"]: line["step_seconds"] for line in lines if line["step_seconds"]}
    winner = min(times, key=times.__getitem__, default=None)
    before, seconds_before = _winner_in(newest, index)
    new = bool(
        before and winner and before != winner and times[winner] < times.get(before, seconds_before)
    )
    won = {"winner": winner, "winner_before": before, "new_winner": new}
    return {**name, "layouts": lines, **won}


def _jobs_before(wiring: Wiring, run: TaskRecord) -> list[Sequence[Mapping[str, Any]]]:
    """The jobs of the reports of earlier runs of this sweep, newest first."""
    done = wiring.tasks.list(kind="sweep", parent_id=run.parent_id, state="done").items
    others = (one for one in done if one.id != run.id)
    return [(other.result or {}).get("jobs", []) for other in others]


def _winner_in(runs: Sequence[Sequence[Mapping[str, Any]]], index: int) -> tuple[str | None, float]:
    """(winner of this job in the newest run that had one, its step time)."""
    for jobs in runs:
        if index < len(jobs) and jobs[index]["winner"]:
            winner, lines = str(jobs[index]["winner"]), jobs[index]["layouts"]
            (line,) = (line for line in lines if line["layout"] == winner)
            return winner, float(line["step_seconds"])
    return None, float("inf")


# ---- what kept it from measuring -----------------------------------------------------------------


def failure_in(result: Mapping[str, Any]) -> StoredError | None:
    """Why a run measured nothing; None where it measured something, or was not allowed to.

    The first probe that failed, else the first job without a plan, else the first layout that
    cannot be run. A stop or a spent budget is no failure.
    """
    lines = [line for job in result["jobs"] for line in job["layouts"]]
    if any(line["status"] in ("ok", "oom") for line in lines):
        return None
    for line in lines:
        if line["status"] == "failed":
            return StoredError(ProbeError.kind, str(line["message"]))
    for job in result["jobs"]:
        if job.get("error"):
            return StoredError(str(job["failure"]), str(job["error"]))
    if lines and all(line.get("failure") for line in lines):
        return StoredError(str(lines[0]["failure"]), f"{lines[0]['layout']}: {lines[0]['message']}")
    return None
