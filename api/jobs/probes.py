"""Probes as both edges run them: queued, claimed under a lease, measured on a pool, and stored."""

import errno
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from planner.api.errors import lines_of
from planner.api.identity import asker
from planner.api.input.belief import checked
from planner.api.input.names import plan_id_of
from planner.api.jobs.leases import Claimed, new_lease
from planner.api.jobs.plans import job_of
from planner.api.jobs.threads import future_of
from planner.api.storage.job_records import EndState, JobEnd, ProbeRecord, TaskRecord
from planner.api.storage.room import Room, check_quota
from planner.api.storage.tasks import most_gpu_seconds
from planner.api.wiring import Wiring
from planner.calibration.kernels import KernelShape
from planner.errors import PlannerError, ProbeError, SpecError, fault
from planner.probes.campaign import PROXY_GPUS, Campaign, ProbeAnswer, ProbeRequest
from planner.probes.launch import Watch
from planner.probes.pools.protocol import Pool
from planner.probes.preflight import Need
from planner.probes.protocol import FailureKind, OutOfMemory
from planner.specs.job import Job
from planner.specs.measurement import Measurement, question_hash
from planner.units import counted

PREFIX = "probe"
# a service that crashed during a probe runs it once more; a person's command does not
SERVICE_ATTEMPTS = 2
OOM, BACKEND = "oom", "backend"
JOB_OPTIONS = ("pool", "trainer", "steps")
# what a machine lacks for now; the job is tried again
SHORT_OF = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


# ---- what is asked for ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedProbe:
    """One layout to measure, or kernels to time; plan and rank where it comes from a plan."""

    request: ProbeRequest
    job: Job
    plan_id: str | None = None
    plan_rank: int | None = None

    @property
    def num_gpus(self) -> int:
        if self.request.kernels:
            return max(KernelShape.from_dict(values).num_gpus for values in self.request.kernels)
        assert self.job.layout is not None, "a request's job has a layout"
        return self.job.layout.num_gpus

    @property
    def devices(self) -> int:
        return 1 if self.request.emulate else self.num_gpus

    @property
    def subject(self) -> str:
        if self.request.kernels:
            kinds = "kernels" if self.num_gpus == 1 else "collectives"
            return f"{len(self.request.kernels)} {kinds}"
        assert self.job.layout is not None, "a request's job has a layout"
        return self.job.layout.short()


def options_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of measuring, from a job's own `probe`: pool, trainer, steps."""
    own = job.get("probe")
    if not isinstance(own, Mapping):
        return {}
    return {name: own[name] for name in JOB_OPTIONS if name in own}


def probe_of_job(
    values: Mapping[str, Any],
    *,
    allow_files: bool,
    plan_id: str | None = None,
    plan_rank: int | None = None,
) -> list[RequestedProbe]:
    """The probe that the fields of a ProbeRequest ask for. Raises SpecError."""
    request, job = ProbeRequest.from_user(values, allow_files=allow_files)
    return [RequestedProbe(request=request, job=job, plan_id=plan_id, plan_rank=plan_rank)]


def probes_of_plan(
    wiring: Wiring, plan_id: str, top_k: int, options: Mapping[str, Any]
) -> list[RequestedProbe]:
    """Probes of the best layouts of a stored plan. Raises NotFoundError, SpecError.

    options: fields of a ProbeRequest; the plan's job says the rest.
    """
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id))
    if not 1 <= top_k <= len(plan.ranked):
        rule = f"the plan ranks {counted(len(plan.ranked), 'layout')}"
        raise fault("top_k", top_k, rule, f"use 1 to {len(plan.ranked)}")
    found: list[RequestedProbe] = []
    for entry in plan.ranked[:top_k]:
        values = {**options_of(plan.job), **options, "job": job_of(plan, entry)}
        found += probe_of_job(values, allow_files=False, plan_id=plan.id, plan_rank=entry.rank)
    return found


def pool_of(wiring: Wiring, name: str, *, allow_files: bool, field: str = "pool") -> Pool:
    """The pool of this name. Raises SpecError about this field, ProbeError.

    allow_files: whether a pool may read a file of this machine.
    """
    try:
        return wiring.pool(name, files=allow_files)
    except SpecError as error:
        raise SpecError([replace(one, field=field) for one in error.faults]) from None


def check_ready(wiring: Wiring, requested: Sequence[RequestedProbe]) -> None:
    """Raises what would stop every one of these probes, before anything is stored."""
    checked = set[tuple[str, ...]]()
    for one in requested:
        pool = wiring.pool(one.request.pool)
        tasks = Campaign.of(one.request, one.job, "probe-0", pool.capacity(one.job.cluster)).tasks
        for task in tasks[:1]:  # the others run the same program on the same devices
            need = Need.of_task(task, one.job)
            key = (one.request.pool, need.trainer, need.device, *need.arguments())
            if key not in checked:
                pool.check(need)
                checked.add(key)


def enqueue(
    wiring: Wiring,
    requested: Sequence[RequestedProbe],
    *,
    max_attempts: int,
    ours: bool = False,
    parent: TaskRecord | None = None,
    room: Room | None = None,
) -> Sequence[ProbeRecord]:
    """Stores them, all or none: queued, or `ours` from the start. Raises QuotaError.

    A probe that is ours is never queued, so nobody else runs what a crashed command left.
    parent: the study or run of a sweep that asks; its budget was promised when it was stored.
    room: of the pool; NoRoomError where they do not fit in now.
    """
    who = asker()
    records = [
        ProbeRecord(
            id=wiring.ids.new_id(PREFIX),
            created_at=wiring.clock.now(),
            request=one.request.model_dump(mode="json"),
            job_hash=question_hash(one.job),
            model=one.job.model.name,
            gpu=one.job.cluster.gpu.name,
            num_gpus=one.num_gpus,
            layout=one.subject,
            pool=one.request.pool,
            plan_id=one.plan_id,
            plan_rank=one.plan_rank,
            max_attempts=max_attempts,
            asked_by=who.name if parent is None else parent.asked_by,
            gpu_seconds=most_gpu_seconds(one.request.model_dump(), one.num_gpus),
            priority=0 if parent is None else parent.priority,
            devices=one.devices,
        )
        for one in requested
    ]

    def check(session: Session) -> None:
        if parent is None:
            seconds = sum(record.gpu_seconds or 0.0 for record in records)
            check_quota(session, who, probes=len(records), gpu_seconds=seconds)
        elif room is not None:
            wanted = sum(record.devices or 0 for record in records)
            room.check(session, wanted, task_id=parent.id, priority=parent.priority)

    return wiring.probes.add(records, lease=new_lease() if ours else None, check=check)


def cancel_probe(wiring: Wiring, probe_id: str) -> ProbeRecord:
    """Cancels a queued probe, asks the runner of a running one. Raises NotFoundError, and
    ForbiddenError for somebody else's.
    """
    who = asker()
    who.check_owner("probe", probe_id, wiring.probes.get(probe_id).asked_by)
    return wiring.probes.cancel(probe_id, who.name)


def probes_of(wiring: Wiring, parent_id: str) -> list[ProbeRecord]:
    """All probes of a plan, a study or a run of a sweep, oldest first."""
    return [*wiring.probes.all(plan_id=parent_id)][::-1]


# ---- one probe -----------------------------------------------------------------------------------


def run_probe(
    wiring: Wiring,
    record: ProbeRecord,
    watch: Watch,
    *,
    release_when_stopped: bool = False,
    pool: Pool | None = None,
    requested: RequestedProbe | None = None,
) -> ProbeRecord:
    """Measures a claimed probe and stores its end. Raises ConflictError where the lease was lost.

    pool: opened before, where many probes use it. requested: what the record says, where it was
        read before.

    release_when_stopped: a probe that we stopped, and nobody cancelled, goes back into the queue.
    """
    claimed = Claimed(wiring.probes, record, watch.stop)

    def progress(message: str) -> None:
        claimed.report(message)
        watch.progress(message)

    def folder(path: Path) -> None:
        # before anything runs in it, so that a new owner finds the files
        claimed.store(folder=f"{platform.node()}:{path}")
        watch.folder(path)

    with claimed:
        try:
            watched = replace(watch, progress=progress, folder=folder)
            if requested is None:
                request, job = ProbeRequest.of_record(record.request)
            else:
                request, job = requested.request, requested.job
            if record.request.get(PROXY_GPUS):
                gone = "proxy runs are made no more; probe the layout itself, or emulate it"
                raise ProbeError(gone)
            used = pool or wiring.pool(request.pool)
            campaign = Campaign.of(request, job, record.id, used.capacity(job.cluster))
            answer = campaign.run(used, watched)
            now, stopped = wiring.clock.now(), watch.stop.is_set()
            end = end_of(answer, now, stopped=stopped, asked_by=record.asked_by)
        except PlannerError as error:
            lacks = error.__cause__
            if release_when_stopped and isinstance(lacks, OSError) and lacks.errno in SHORT_OF:
                raise lacks from error
            end = JobEnd(
                state="cancelled" if watch.stop.is_set() else "failed",
                failure=BACKEND,
                message="; ".join(lines_of(error)),
            )
    stopped_by_us = end.state == "cancelled" and not claimed.cancelled and not claimed.lost
    if release_when_stopped and stopped_by_us:
        return claimed.release()
    return claimed.finish(end)


def _doubt(measurement: Measurement) -> str | None:
    """Why the measurement teaches nothing; None where it does."""
    disturbed = measurement.measured.disturbed
    return measurement.refused or (disturbed and f"{disturbed}: it teaches nothing")


def end_of(answer: ProbeAnswer, now: datetime, *, stopped: bool, asked_by: str | None) -> JobEnd:
    """End of a probe with this answer. Out of memory is an answer: done, with its class.

    Numbers that cannot be true are stored as refused.
    """
    measured = tuple(
        checked(one.model_copy(update={"asked_by": asked_by}), now) for one in answer.measurements
    )
    ended = partial(JobEnd, results=tuple(one.model_dump(mode="json") for one in answer.results))
    if answer.failed is None:
        notes = [*answer.notes, *filter(None, map(_doubt, measured))]
        return ended(state="done", measurements=measured, message="; ".join(notes) or None)
    outcome = answer.failed.outcome
    if isinstance(outcome, OutOfMemory):
        message = f"out of memory on rank {outcome.rank}: {outcome.message}"
        state: EndState = "done" if measured else "failed"
        return ended(state=state, measurements=measured, failure=OOM, message=message)
    assert outcome.status == "failed", "what is measured has not failed"
    interrupted = outcome.kind == FailureKind.INTERRUPTED and stopped
    where = "" if outcome.rank is None else f"rank {outcome.rank}: "
    return ended(
        state="cancelled" if interrupted else "failed",
        failure=outcome.kind.value,
        message=f"{where}{outcome.message}",
    )


# ---- many at once --------------------------------------------------------------------------------


def run_all(
    wiring: Wiring, records: Sequence[ProbeRecord], watches: Mapping[str, Watch]
) -> list[ProbeRecord]:
    """Runs these probes at once, as far as the pool has devices, and waits for all.

    An interruption ends them first and is raised then.
    """
    ends = [
        future_of(f"probe {one.id}", run_probe, wiring, one, watches[one.id]) for one in records
    ]
    try:
        wait(ends)
    except KeyboardInterrupt:
        for watch in watches.values():
            watch.stop.set()
        wait(ends)
        raise
    return [end.result() for end in ends]
