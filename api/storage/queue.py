"""A queue of jobs with leases and fencing in SQL: what probes and tasks share.

Two workers never claim the same row: SQLite's writers take turns (BEGIN IMMEDIATE), PostgreSQL's
skip what another has locked. Every write of an owner names its fencing token, so that an owner
whose lease was taken over changes nothing. When a lease ends the database's clock says.

A job whose worker is lost waits before it is tried again, longer each time, and has failed with
LOST_WORKERS once all its attempts are made; `requeue` gives it new ones. That a worker was killed
is no attempt of its job, until MOST_LOSSES were lost.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Engine, Select, or_, select, update
from sqlalchemy.orm import Session

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import SHOWN_CHARACTERS, flush_new, plain_text
from planner.api.storage.fence import FencedStore, Record
from planner.api.storage.job_records import (
    CANCELLED,
    FAILED,
    QUEUED,
    RUNNING,
    JobEnd,
    JobRecord,
    Lease,
)
from planner.api.storage.transactions import reading, writing
from planner.errors import ConflictError

MESSAGE_CHARACTERS = 20_000
LOST_WORKERS = "lost_workers"  # the failure of a job that took down every worker it was given to
MOST_LOSSES = 10  # workers that may be killed under a job before each counts against it
LONGEST_LEASE_SECONDS = 60.0  # one that lasts longer was taken before the clock was put back
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 2.0, 300.0  # before a second attempt, before any
Check = Callable[[Session], None]


def delay_seconds(attempts: int, chance: float) -> float:
    """Seconds that a job waits after so many attempts: doubled each time, spread by half.

    chance: uniform in 0..1, so that jobs that failed together do not come back together.
    """
    most = min(FIRST_DELAY_SECONDS * 2.0 ** max(attempts - 1, 0), LONGEST_DELAY_SECONDS)
    return most * (0.5 + 0.5 * chance)


class SqlQueue(FencedStore[Record], ABC):
    """A queue on one table. Whoever claimed a job last may write it; anyone else: ConflictError."""

    texts: ClassVar[tuple[str, ...]] = ()  # columns that a user's words go into

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.away_at = -math.inf  # on the monotonic clock, when the database last gave no answer

    @abstractmethod
    def _end_values(self, session: Session, claimed: Record, end: JobEnd) -> dict[str, Any]:
        """The columns that an end sets beside the common ones; adds the rows stored with it."""

    @abstractmethod
    def _used_gpu_seconds(self, record: Record, end: JobEnd) -> float | None:
        """GPU-seconds that an ended job used."""

    def add(
        self,
        records: Sequence[Record],
        *,
        lease: Lease | None = None,
        check: Check = lambda _: None,
    ) -> Sequence[Record]:
        """Stores all or none. Raises ConflictError when an id is taken.

        lease: they are ours from the start: running, never queued, so no worker takes them.
        check: called before, in the same transaction; raises what forbids them.
        """
        with writing(self.engine) as session:
            check(session)
            rows = [replace(record) for record in records]
            for row in rows:
                for name in self.texts:
                    setattr(row, name, plain_text(getattr(row, name)))
                if lease is not None:
                    _claim(row, lease, counts=True)
            session.add_all(rows)
            for record in records:
                self._note(session, record, "asked")
            flush_new(session, ", ".join(record.id for record in records[:3]))
            return [whole(session, row) for row in rows]

    def claim(self, lease: Lease, *, job_id: str | None = None) -> Record | None:
        """The queued job of the highest priority, of equal ones the oldest, now running and ours.

        None where none is, or all have to wait.

        job_id: the queued one of this id instead, whether it has to wait or not.
        """
        table = self.table
        query = select(table).where(table.state == QUEUED, table.attempts < table.max_attempts)
        if job_id is not None:
            query = query.where(table.id == plain_text(job_id))
        else:
            waited = or_(
                table.not_before.is_(None),
                table.not_before <= database_time(),
                table.not_before > database_time(LONGEST_DELAY_SECONDS),  # its clock was put back
            )
            query = query.where(waited, *self._may_start())
        first = query.order_by(table.priority.desc(), table.created_at, table.id)
        return self._take(first, lease, counts=True, fresh=True)

    def _may_start(self) -> tuple[ColumnElement[bool], ...]:
        """Further conditions on a queued job that a worker takes."""
        return ()

    def _waits(self, session: Session, row: Any) -> bool:
        """Whether a job that was just chosen must wait after all; asked with its row locked."""
        return False

    def take_over(
        self, abandoned: Record, lease: Lease, *, crashed: bool, counts: bool = False
    ) -> Record | None:
        """A running job whose lease has expired, now ours; None where another was quicker.

        crashed: its owner is known to be gone, so its lease need not expire first.
        counts: whether that is an attempt.
        """
        table = self.table
        query = select(table).where(table.id == abandoned.id, table.state == RUNNING)
        same = table.fencing_token == abandoned.fencing_token
        query = query.where(same if crashed else table.lease_until < database_time())
        return self._take(query, lease, counts=counts)

    def _take(
        self, query: Select[Any], lease: Lease, *, counts: bool, fresh: bool = False
    ) -> Record | None:
        """fresh: it was queued, so it may have to wait."""
        with writing(self.engine) as session:
            first = query.limit(1).with_for_update(skip_locked=True)
            row: Record | None = session.scalars(first).first()
            if row is None or (fresh and self._waits(session, row)):
                return None
            _claim(row, lease, counts=counts)
            return whole(session, row)

    def heartbeat(self, claimed: Record, lease: Lease, **columns: Any) -> bool:
        """Renews the lease. Returns whether somebody asked to cancel.

        An expired lease that nobody has taken over is renewed too: its owner could not reach the
        database for a while.
        columns: of the row, to store with it, such as `progress`.
        """
        for name, value in columns.items():
            if isinstance(value, str):
                longest = MESSAGE_CHARACTERS if name == "folder" else SHOWN_CHARACTERS
                columns[name] = plain_text(value, longest)
        renewed = {"heartbeat_at": database_time(), "lease_until": database_time(lease.seconds)}
        with writing(self.engine) as session:
            row = self.write(session, claimed, {**columns, **renewed}, expired=True)
            return bool(row.cancel_requested)

    def finish(self, claimed: Record, end: JobEnd) -> Record:
        """Ends the job and stores its result, all or nothing, while the lease lasts."""
        with writing(self.engine) as session:
            return self._finish(session, claimed, end)

    def _finish(self, session: Session, claimed: Record, end: JobEnd) -> Record:
        message = None if end.message is None else plain_text(end.message, MESSAGE_CHARACTERS)
        values = {
            "state": end.state,
            "finished_at": database_time(),
            "lease_until": None,
            "failure": end.failure,
            "message": message,
            "progress": None,
            **self._end_values(session, claimed, end),
        }
        record = self.write(session, claimed, values)
        record.gpu_seconds = self._used_gpu_seconds(record, end)
        detail = f"{end.state}{f', {end.failure}' if end.failure else ''}; run by {record.owner}"
        self._note(session, record, "ended", detail)
        return record

    def _note(self, session: Session, record: Record, done: str, detail: str | None = None) -> None:
        """Writes into the audit trail what was done to a job of whoever asked for it."""
        action, seconds = f"{self.what}.{done}", record.gpu_seconds
        note(session, record.asked_by, action, record.id, gpu_seconds=seconds, detail=detail)

    def release(self, claimed: Record) -> Record:
        """Puts it back into the queue; the attempt does not count."""
        values = {**_WAITING, "attempts": max(claimed.attempts - 1, 0), "not_before": None}
        with writing(self.engine) as session:
            return self.write(session, claimed, values)

    def retry(self, claimed: Record, end: JobEnd, *, counts: bool = True) -> Record:
        """Puts it back into the queue for its next attempt, after a delay.

        end: how it ends instead where no attempt is left, or somebody asked to cancel it.
        counts: whether this attempt does.
        """
        with writing(self.engine) as session:
            row = self.row(session, claimed.id, lock=True)
            lost = row.fencing_token // 2  # a loss is a claim and a taking over
            counts = counts or lost >= MOST_LOSSES
            if (counts and row.attempts >= row.max_attempts) or row.cancel_requested:
                return self._finish(session, claimed, end)
            seconds = delay_seconds(max(row.attempts, lost), random.random())
            values = {
                **_WAITING,
                "attempts": row.attempts - (not counts),
                "not_before": database_time(seconds),
                "message": None if end.message is None else plain_text(end.message),
            }
            return self.write(session, claimed, values)

    def requeue(
        self,
        job_id: str,
        by: str | None,
        gpu_seconds: float | None = None,
        check: Check = lambda _: None,
    ) -> Record:
        """Gives a failed job new attempts. Raises NotFoundError; ConflictError for any other.

        gpu_seconds: the most that they may use. check: as of `add`.
        """
        with writing(self.engine) as session:
            check(session)
            row: Record = self.row(session, job_id, lock=True)
            if row.state != FAILED:
                now = f"{self.what} {job_id} is {row.state}"
                raise ConflictError(f"{now}; only a failed one can be queued again")
            row.state, row.attempts, row.not_before = QUEUED, 0, None
            row.gpu_seconds, row.cancel_requested = gpu_seconds, False
            row.finished_at = row.failure = row.message = row.owner = None
            note(session, by, f"{self.what}.requeued", job_id, gpu_seconds=gpu_seconds)
            return whole(session, row)

    def cancel(self, job_id: str, by: str | None = None) -> Record:
        """Cancels a queued job; asks the owner of a running one; an ended one stays as it is.

        by: who asks, for the audit trail.
        """
        with writing(self.engine) as session:
            row: Record = self.row(session, job_id, lock=True)
            if row.state in (QUEUED, RUNNING) and not row.cancel_requested:
                note(session, by, f"{self.what}.cancelled", job_id)
            if row.state == QUEUED:
                row.state, row.finished_at = CANCELLED, database_time()
                row.cancel_requested, row.gpu_seconds = True, 0.0
            elif row.state == RUNNING:
                row.cancel_requested = True
            return whole(session, row)

    def expired(self) -> Sequence[Record]:
        """Running jobs whose lease has expired, oldest first.

        Leases from before the clock was put back are cut: a living owner renews its own in time.
        """
        table, longest = self.table, database_time(LONGEST_LEASE_SECONDS)
        query = select(table).where(*self.has_expired).order_by(table.created_at, table.id)
        ahead = table.state == RUNNING, table.lease_until > longest
        with reading(self.engine) as session:
            found = tuple(session.scalars(query))
            to_cut = session.scalars(select(table.id).where(*ahead)).first() is not None
        if to_cut:
            with writing(self.engine) as session:
                session.execute(update(table).where(*ahead).values(lease_until=longest))
        return found


def whole(session: Session, row: Record) -> Record:
    """The row as the database has it, with times by its clock."""
    session.flush()
    session.refresh(row)
    return row


def _claim(row: JobRecord, lease: Lease, *, counts: bool) -> None:
    row.state, row.owner, row.not_before = RUNNING, plain_text(lease.owner), None
    row.fencing_token += 1
    row.attempts += counts
    row.heartbeat_at, row.lease_until = database_time(), database_time(lease.seconds)
    if row.started_at is None:
        row.started_at = database_time()


_NONE = dict.fromkeys(("owner", "lease_until", "heartbeat_at", "progress"))
_WAITING: dict[str, Any] = {"state": QUEUED, **_NONE}
