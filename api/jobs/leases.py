"""Claiming jobs of a queue: leases, the heartbeats that renew them, and owners that crashed."""

import logging
import os
import platform
import threading
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from api.storage.records import JobEnd, JobRecord, Lease
from planner.errors import ConflictError, PlannerError
from planner.ports import Clock

if TYPE_CHECKING:
    from api.storage.queue import SqlQueue

LEASE_SECONDS = 30.0
HEARTBEAT_SECONDS = 3.0
RUNNING_CHECKED = 200  # running jobs whose owner is looked for among this host's processes
Record = TypeVar("Record", bound=JobRecord)
End = TypeVar("End", bound=JobEnd)
log = logging.getLogger("planner.leases")


def owner() -> str:
    """Who we are: host, process, thread."""
    return f"{platform.node()}:{os.getpid()}:{threading.get_ident()}"


def new_lease(clock: Clock) -> Lease:
    """A lease of ours from now on."""
    return Lease(owner=owner(), now=clock.now(), seconds=LEASE_SECONDS)


def claimed_by(record: Record, lease: Lease) -> Record:
    """A new job as its caller stores it to run it itself: never queued, so no worker takes it."""
    return replace(
        record,
        state="running",
        attempts=1,
        owner=lease.owner,
        fencing_token=1,
        heartbeat_at=lease.now,
        started_at=lease.now,
        lease_until=lease.now + timedelta(seconds=lease.seconds),
    )


@dataclass
class Claimed(Generic[Record, End]):
    """A claimed job. Inside `with`, a thread renews its lease.

    stop: set when somebody asks to cancel and when the lease is lost; the work then ends.
    columns: text that the next heartbeat stores, such as `progress`.
    """

    queue: "SqlQueue[Record, Any, End]"
    record: Record
    clock: Clock
    stop: threading.Event = field(default_factory=threading.Event)
    columns: dict[str, str] = field(default_factory=dict)
    cancelled: bool = False
    lost: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._renewer = threading.Thread(
            target=self._renew_until_done, name=f"lease of {self.record.id}", daemon=True
        )
        self._renewer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._renewer.join()

    def report(self, message: str) -> None:
        """Says how far the work is, with the next heartbeat."""
        self.columns["progress"] = message

    def renew(self) -> None:
        """Sends one heartbeat. The lease outlasts several that the database does not take."""
        try:
            asked = self.queue.heartbeat(self.record, new_lease(self.clock), **self.columns)
        except ConflictError:
            self.lost = True
            self.stop.set()
        except PlannerError as error:
            log.warning("%s: no heartbeat: %s", self.record.id, error)
        else:
            if asked:
                self.cancelled = True
                self.stop.set()

    def finish(self, end: End) -> Record:
        """Stores the end, and what comes with it. Raises ConflictError where the lease was lost."""
        return self.queue.finish(self.record, end, self.clock.now())

    def release(self) -> Record:
        """Puts it back into the queue; the attempt does not count. Raises ConflictError."""
        return self.queue.release(self.record, counts=False)

    def _renew_until_done(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            self.renew()


# ---- owners that crashed -------------------------------------------------------------------------


def abandoned(
    queue: "SqlQueue[Record, Any, Any]", clock: Clock, *, check_processes: bool
) -> list[Record]:
    """Running jobs whose lease has expired.

    check_processes: also those whose owner was a process of this host that no longer exists.
    """
    found = {record.id: record for record in queue.expired(clock.now())}
    if check_processes:
        running = queue.list(limit=RUNNING_CHECKED, wanted=queue.filter_class(state="running"))
        found |= {record.id: record for record in running.items if has_crashed(record.owner)}
    return list(found.values())


def is_abandoned(record: JobRecord, now: datetime) -> bool:
    """Whether nobody works on a running job any more: its lease expired or its owner crashed."""
    expired = record.lease_until is not None and record.lease_until < now
    return expired or has_crashed(record.owner)


def has_crashed(name: str | None) -> bool:
    """Whether an owner was a process of this host that no longer exists, of whatever user."""
    host, _, rest = (name or "").partition(":")
    pid = rest.partition(":")[0]
    if host != platform.node() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def take_over(queue: "SqlQueue[Record, Any, Any]", clock: Clock, record: Record) -> Record | None:
    """An abandoned job, now ours; None where somebody else was quicker, or its owner lives.

    Also before its lease expires: that of a crashed owner is replaced from its end on.
    """
    lease = new_lease(clock)
    if record.lease_until is not None:
        after = record.lease_until + timedelta(microseconds=1)
        lease = replace(lease, now=max(lease.now, after))
    return queue.take_over(record.id, lease)
