"""Both queues together, for a person: what is open, what was given up, and another try."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from planner.api.identity import asker
from planner.api.jobs.plans import subject_of
from planner.api.storage.common import record_of
from planner.api.storage.job_records import OPEN, JobState, ProbeRecord, QueuedJob, TaskRecord
from planner.api.storage.room import check_quota
from planner.api.storage.tasks import most_gpu_seconds
from planner.api.wiring import Wiring
from planner.errors import NotFoundError

MOST = 200  # newest of each state


def jobs_in(wiring: Wiring, *, failed: bool) -> list[QueuedJob]:
    """The newest jobs that are open, or that have failed, newest first."""
    states: tuple[JobState, ...] = ("failed",) if failed else OPEN
    found: list[ProbeRecord | TaskRecord] = []
    for state in states:
        found += wiring.probes.list(limit=MOST, state=state).items
        found += wiring.tasks.list(limit=MOST, state=state).items
    found.sort(key=lambda job: (job.created_at, job.id), reverse=True)
    return [line_of(record) for record in found]


def retry(wiring: Wiring, job_id: str) -> QueuedJob:
    """Gives a failed job new attempts.

    Raises NotFoundError; ConflictError for one that has not failed; ForbiddenError for somebody
    else's; QuotaError.
    """
    record, queue = _ours(wiring, job_id)
    who, seconds = asker(), _most_gpu_seconds(record)
    probes = int(isinstance(record, ProbeRecord))
    check = partial(check_quota, asker=who, probes=probes, gpu_seconds=seconds)
    return line_of(queue.requeue(job_id, who.name, seconds, check))


def cancel(wiring: Wiring, job_id: str) -> QueuedJob:
    """Cancels a job that waits, asks the owner of one that runs; an ended one stays as it is.

    Raises NotFoundError; ForbiddenError for somebody else's.
    """
    _, queue = _ours(wiring, job_id)
    return line_of(queue.cancel(job_id, asker().name))


def _ours(wiring: Wiring, job_id: str) -> tuple[ProbeRecord | TaskRecord, Any]:
    """(the job, its queue), where the asker may change it."""
    record = find(wiring, job_id)
    asker().check_owner("job", job_id, record.asked_by)
    return record, wiring.probes if isinstance(record, ProbeRecord) else wiring.tasks


def _most_gpu_seconds(record: ProbeRecord | TaskRecord) -> float:
    """GPU-seconds its next attempts may use; its record names what the last ones used."""
    if isinstance(record, ProbeRecord):
        return most_gpu_seconds(record.request, record.num_gpus)
    budget = record.request.get("probe" if record.kind == "study" else "budget")
    most = budget.get("max_gpu_seconds") if isinstance(budget, Mapping) else None
    return float(most) if isinstance(most, int | float) else 0.0


def find(wiring: Wiring, job_id: str) -> ProbeRecord | TaskRecord:
    """The probe, study or run of a sweep of this id. Raises NotFoundError."""
    try:
        return wiring.tasks.get(job_id)
    except NotFoundError:
        return wiring.probes.get(job_id)


def line_of(record: ProbeRecord | TaskRecord) -> QueuedJob:
    kind: Literal["probe", "study", "sweep"]
    if isinstance(record, ProbeRecord):
        about = f"{record.layout} of {record.model} on {record.num_gpus} {record.gpu}"
        kind = "probe"
    elif record.kind == "study":
        model, gpu, num_gpus = subject_of(record)
        kind, about = "study", f"{model} on {num_gpus} {gpu}"
    else:
        kind, about = "sweep", f"{record.request.get('name', '')} of {record.parent_id}"
    return record_of(QueuedJob, record, kind=kind, about=about)
