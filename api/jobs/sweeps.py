"""Sweeps as both edges keep them: stored, scheduled, paused, cancelled; `sweep_runs` runs them."""

import logging
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from planner.api.errors import QuotaError, UnreadableError
from planner.api.identity import Asker, asker
from planner.api.jobs.leases import new_lease, take_abandoned
from planner.api.jobs.probes import pool_of
from planner.api.jobs.schedule import next_due, window_of
from planner.api.jobs.webhooks import check_webhook
from planner.api.own_entries import with_own
from planner.api.storage.common import readable, told
from planner.api.storage.job_records import TaskRecord
from planner.api.storage.records import SweepState
from planner.api.storage.room import check_quota
from planner.api.storage.tables import SweepRecord
from planner.api.wiring import Wiring
from planner.errors import ConflictError, PlannerError
from planner.intake.jobs import read_job
from planner.intake.sweeps import read_sweep
from planner.probes.preflight import Need
from planner.specs.sweep import SweepSpec
from planner.units import DAY

log = logging.getLogger("planner.sweeps")
PREFIX, RUN_PREFIX = "sweep", "sweep-run"
MISSED_SECONDS = 3600.0  # a scheduled time this long past was missed


# ---- storing and changing ------------------------------------------------------------------------


def add_sweep(
    wiring: Wiring, values: object, *, allow_files: bool, ours: bool = False
) -> SweepRecord:
    """Stores a sweep; with a schedule, workers run it from now on. Raises SpecError, QuotaError.

    ours: we run it ourselves at once. A pool that can run nothing is then a ProbeError before
        anything is stored.
    """
    spec = read_sweep(with_own(wiring, values), allow_files=allow_files)
    who = asker()
    now = wiring.sweeps.now()
    due = next_due(spec.schedule, now, spec.time_zone)
    if spec.budget.hours is not None:
        window_of(spec.budget.hours)
    if spec.webhook is not None:
        check_webhook(wiring.settings, spec.webhook)
    pool_of(wiring, spec.pool, allow_files=allow_files, field="sweep.pool")
    if ours:
        check_sweep(wiring, spec)
    record = SweepRecord(
        id=wiring.ids.new_id(PREFIX),
        created_at=now,
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        next_due_at=due,
        asked_by=who.name,
    )
    quota, more = who.quota, spec.budget.max_gpu_seconds
    if quota is not None and more > (most := quota.gpu_seconds_per_day):
        raise QuotaError("gpu_seconds_per_day", 0.0, more, most, retry_after_seconds=DAY)
    wiring.sweeps.add(record)
    return record


def check_sweep(wiring: Wiring, spec: SweepSpec) -> None:
    """Raises what is wrong where the sweep's pool can run none of its jobs."""
    pool, failures, needs = wiring.pool(spec.pool), list[PlannerError](), dict[str, Need]()
    for values in spec.jobs:
        need = Need.of(read_job(values, allow_files=False), spec.trainer)
        needs.setdefault(need.job.cluster.gpu.name, need)
    for need in needs.values():
        try:
            pool.check(need)
        except PlannerError as error:
            failures.append(error)
        else:
            return
    raise failures[0]


def change_sweep(wiring: Wiring, sweep_id: str, state: SweepState) -> SweepRecord:
    """Pauses, resumes or cancels it; see `SqlSweepStore.change` for what becomes of its runs.

    An active one runs again from the next time of its schedule on. Raises NotFoundError,
    ConflictError; ForbiddenError for somebody else's.
    """
    who, sweep, due = asker(), wiring.sweeps.get(sweep_id), None
    who.check_owner("sweep", sweep_id, sweep.asked_by)
    if state == "active":
        spec = _spec(sweep)
        due = next_due(spec.schedule, wiring.sweeps.now(), spec.time_zone)
    return wiring.sweeps.change(sweep_id, state, due, who.name)


# ---- the schedule --------------------------------------------------------------------------------


def schedule_due(wiring: Wiring) -> list[TaskRecord]:
    """Turns every scheduled time that has come into a task, once.

    What was missed for long is skipped or made up once, as the sweep says.
    """
    made = []
    now = wiring.sweeps.now()
    for sweep in wiring.sweeps.due(now):
        try:
            spec = _spec(sweep)
        except UnreadableError as error:
            log.warning("%s is paused: %s", sweep.id, error)
            wiring.sweeps.change(sweep.id, "paused", None)
            continue
        due_at = _due_at(sweep, spec, now)
        task = None if due_at is None else _task(wiring, sweep, due_at)
        following = next_due(spec.schedule, now, spec.time_zone)
        check = partial(_check, wiring, task)
        try:
            added = wiring.sweeps.advance(sweep, following, task, check, spec.overlap)
        except QuotaError as error:
            log.warning("%s does not run for %s: %s", sweep.id, due_at, error)
            wiring.audit.add(sweep.asked_by, "refused.quota_exceeded", sweep.id, str(error))
            wiring.sweeps.advance(sweep, following, None)
            continue
        if added and task is not None:
            made.append(task)
    return made


def _check(wiring: Wiring, task: TaskRecord | None, session: Session) -> None:
    """Raises QuotaError for a run that the key of its sweep may not have."""
    keys = {key.name for key in wiring.settings.keys}
    if task is not None and task.asked_by in keys:
        quota = wiring.settings.quota_of(task.asked_by)
        who = Asker(task.asked_by, admin=False, quota=quota)
        check_quota(session, who, gpu_seconds=task.gpu_seconds or 0.0)


def _due_at(sweep: SweepRecord, spec: SweepSpec, now: datetime) -> datetime | None:
    """The scheduled time that a run is made for: the newest that has come, if it was not missed.

    Of a missed one only where the sweep makes it up; else None.
    """
    assert sweep.next_due_at is not None, "only a sweep with a scheduled time comes due"
    fresh = now - timedelta(seconds=MISSED_SECONDS)
    due_at = sweep.next_due_at if sweep.next_due_at >= fresh or spec.missed == "catch-up" else None
    later = next_due(spec.schedule, max(sweep.next_due_at, fresh), spec.time_zone)
    while later is not None and later <= now:
        due_at, later = later, next_due(spec.schedule, later, spec.time_zone)
    return due_at


def run_now(wiring: Wiring, sweep: SweepRecord, *, ours: bool) -> TaskRecord:
    """Starts a run of this sweep now: claimed here, or queued for a worker.

    ours: a run that a crashed process left goes on instead.

    Raises ConflictError for a sweep that was cancelled, ForbiddenError for somebody else's,
    QuotaError.
    """
    who = asker()
    who.check_owner("sweep", sweep.id, sweep.asked_by)
    if sweep.state == "cancelled":
        raise ConflictError(f"sweep {sweep.id} was cancelled; schedule it anew")
    now = wiring.sweeps.now()
    if ours:
        left = take_abandoned(wiring.tasks, kind="sweep", parent_id=sweep.id)
        if left is not None:
            return left
    task = replace(_task(wiring, sweep, now), asked_by=who.name)

    def check(session: Session) -> None:
        wiring.sweeps.check_open(session, sweep.id)  # it may have been cancelled meanwhile
        check_quota(session, who, gpu_seconds=task.gpu_seconds or 0.0)

    return wiring.tasks.add([task], lease=new_lease() if ours else None, check=check)[0]


def _spec(sweep: SweepRecord) -> SweepSpec:
    """Parses a stored sweep. Raises UnreadableError."""
    with readable("sweep", sweep.id):
        return SweepSpec.model_validate(dict(sweep.spec))


def _task(wiring: Wiring, sweep: SweepRecord, due_at: datetime) -> TaskRecord:
    spec = _spec(sweep)
    return TaskRecord(
        id=wiring.ids.new_id(RUN_PREFIX),
        kind="sweep",
        created_at=wiring.clock.now(),
        request=dict(sweep.spec),
        parent_id=sweep.id,
        due_at=due_at,
        asked_by=sweep.asked_by,
        gpu_seconds=spec.budget.max_gpu_seconds,
        priority=spec.priority,
    )


# ---- reading -------------------------------------------------------------------------------------


def sweep_detail(wiring: Wiring, sweep: SweepRecord, runs: int = 10) -> dict[str, Any]:
    """A sweep with its newest runs and their reports, JSON-safe."""
    tasks = wiring.tasks.list(limit=runs, kind="sweep", parent_id=sweep.id).items
    shown = ("id", "due_at", "state", "progress", "message", "standing")
    return {
        **told(sweep, "id", "name", "created_at", "state", "spec", "next_due_at"),
        "runs": [{**told(task, *shown), "report": task.result} for task in tasks],
    }
