"""Records of jobs and plans whose contents do not matter to a test, but for what it gives."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from planner.api.jobs.leases import new_lease
from planner.api.storage.job_records import Lease, ProbeRecord, TaskRecord
from planner.api.wiring import Wiring
from planner.intake.jobs import read_job
from tests.conftest import JOB

NOW = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)
PLAN_JOB = read_job(JOB)  # of a stored plan whose contents do not matter
PROBE = ProbeRecord(
    id="", created_at=NOW, request={}, job_hash="0" * 64, model="m", gpu="cpu", num_gpus=1,
    layout="l", pool="local",
)  # fmt: skip


def probe_record(number: int = 1, **fields: Any) -> ProbeRecord:
    """Pairs share a moment."""
    at = NOW + timedelta(seconds=number // 2)
    return replace(PROBE, **{"id": f"probe-{number:03d}", "created_at": at, **fields})


def task_record(number: int = 1, **fields: Any) -> TaskRecord:
    at = NOW + timedelta(seconds=number)
    own = TaskRecord(id=f"plan-{number}", kind="study", created_at=at, request={})
    return replace(own, **fields)


def lease(owner: str = "host:1", seconds: float = 30.0) -> Lease:
    return Lease(owner=owner, seconds=seconds)


def claimed(wiring: Wiring) -> TaskRecord:
    return wiring.tasks.claim(new_lease())


def pages_of(read: Callable[[str | None], Any]) -> Iterator[list[str]]:
    """Ids of each page of a list, from the first to the last. read: the page at a cursor."""
    cursor = None
    while True:
        page = read(cursor)
        yield [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return
