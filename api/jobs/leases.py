"""Claiming jobs of a queue: leases, the heartbeats that renew them, and owners that crashed."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from planner.api.errors import UnavailableError
from planner.api.jobs.owners import has_crashed, owner
from planner.api.storage.job_records import RUNNING, JobEnd, JobRecord, Lease
from planner.api.storage.queue import SqlQueue
from planner.errors import ConflictError, PlannerError
from planner.units import counted

LEASE_SECONDS = 30.0
HEARTBEAT_SECONDS = 3.0
AGAIN_SECONDS = 1.0  # between tries to store an end
RUNNING_CHECKED = 200  # running jobs whose owner is looked for among this host's processes
Record = TypeVar("Record", bound=JobRecord)
log = logging.getLogger("planner.leases")


def new_lease() -> Lease:
    return Lease(owner=owner(), seconds=LEASE_SECONDS)


@dataclass(kw_only=True)
class Observer:
    """Callbacks for whoever follows a study or a sweep, and the way to stop it.

    on_event: called with each event, JSON-safe.
    on_message: called with what is being done now.
    stop: set it to end with the best so far.
    releases: whether the worker itself is being stopped; the work then goes back into the queue.
    """

    on_event: Callable[[Mapping[str, Any]], None] = lambda _: None
    on_message: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)
    releases: Callable[[], bool] = lambda: False


@dataclass
class Claimed(Generic[Record]):
    """A claimed job. Inside `with`, a thread renews its lease.

    stop: set when somebody asks to cancel and when the lease is lost; the work then ends.
    columns: of its row, which the next heartbeat stores, such as `progress`.
    """

    queue: SqlQueue[Record]
    record: Record
    stop: threading.Event = field(default_factory=threading.Event)
    columns: dict[str, Any] = field(default_factory=dict)
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

    def reporter(self, layout: str, observer: Observer) -> Callable[[str], None]:
        """A callback that reports how far the probe of a layout is, also to the observer."""

        def report(message: str) -> None:
            line = f"{layout}: {message}"
            self.report(line)
            observer.on_message(line)

        return report

    def store(self, **columns: Any) -> None:
        """Stores columns that other processes, and the next owner after a crash, act on.

        Blocks until they are stored, unless the work is to stop.
        """
        self.columns |= columns
        while not self.renew() and not self.stop.wait(AGAIN_SECONDS):
            pass

    def renew(self) -> bool:
        """Sends one heartbeat; whether it was stored. The lease outlasts several that were not."""
        try:
            asked = self.queue.heartbeat(self.record, new_lease(), **self.columns)
        except ConflictError:
            self.lost = True
            self.stop.set()
        except PlannerError as error:
            log.warning("%s: no heartbeat: %s", self.record.id, error)
        else:
            if asked:
                self.cancelled = True
                self.stop.set()
            return True
        return False

    def finish(self, end: JobEnd) -> Record:
        """Stores the end, and what comes with it. Raises ConflictError where the lease was lost.

        While the database does not answer, the end stays in hand, unless the work is to stop:
        GPU-seconds are not spent twice for an outage.
        """
        while True:
            try:
                return self.queue.finish(self.record, end)
            except UnavailableError as error:
                if self.stop.is_set():
                    raise
                log.warning("%s: its end waits for the database: %s", self.record.id, error)
                self.stop.wait(AGAIN_SECONDS)
                self.renew()  # the lease may have expired meanwhile

    def release(self) -> Record:
        """Puts it back into the queue; the attempt does not count. Raises ConflictError."""
        return self.queue.release(self.record)

    def _renew_until_done(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            self.renew()


# ---- owners that crashed -------------------------------------------------------------------------


def abandoned(queue: SqlQueue[Record], *, check_processes: bool) -> list[Record]:
    """Running jobs whose lease has expired.

    After the database was away, leases have as long again: nobody could renew them.
    check_processes: also those whose owner was a process of this machine that no longer exists.
    """
    now = time.monotonic()
    try:
        expired = queue.expired()
    except UnavailableError:
        queue.away_at = now
        raise
    waits = now - queue.away_at < LEASE_SECONDS
    found = {} if waits else {record.id: record for record in expired}
    if check_processes:
        running = queue.list(limit=RUNNING_CHECKED, state=RUNNING)
        found |= {record.id: record for record in running.items if has_crashed(record.owner)}
    return list(found.values())


def take_over(queue: SqlQueue[Record], record: Record, *, counts: bool = False) -> Record | None:
    """An abandoned job, now ours; None where somebody else was quicker, or its owner lives.

    That of a crashed owner is ours before its lease expires. counts: whether it is an attempt.
    """
    crashed = has_crashed(record.owner)
    return queue.take_over(record, new_lease(), crashed=crashed, counts=counts)


def take_abandoned(queue: SqlQueue[Record], **wanted: Any) -> Record | None:
    """The newest abandoned job of these columns, now ours for another attempt."""
    taken = (
        take_over(queue, one, counts=True) for one in queue.list(state=RUNNING, **wanted).items
    )
    return next((one for one in taken if one is not None), None)


def lost_workers(attempts: int, last: str | None) -> str:
    """Error message of a job that crashed every worker that ran it."""
    return (
        f"its worker was lost in {counted(attempts, 'attempt')} (the last was {last or 'nobody'}); "
        "it is not tried again by itself: `planner-cli queue retry ID` does"
    )
