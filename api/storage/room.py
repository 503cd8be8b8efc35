"""Room in a pool and quotas of a key, counted in the transaction that stores a request.

A running probe with a lease occupies its devices; with the lease the room is free again. Whoever
wants to start one asks in the transaction that stores it, in turn with all others of the pool, so
that two workers never take the same room.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, or_, select, text
from sqlalchemy.orm import Session

from planner.api.errors import QuotaError
from planner.api.identity import Asker
from planner.api.storage.clock import database_time
from planner.api.storage.job_records import OPEN, RUNNING, ProbeRecord, TaskRecord
from planner.api.storage.tables import PlanRow
from planner.errors import PlannerError
from planner.units import DAY

RETRY_DAILY_SECONDS, RETRY_QUEUE_SECONDS = 3600.0, 60.0


class NoRoomError(PlannerError):
    """The pool has no room for another probe of ours now."""

    kind = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Devices that a pool has for those who share it.

    devices: that probes can use at the same time.
    host: only probes of runners on this host count, where each host has a pool of its own.
    """

    pool: str
    devices: int
    host: str | None = None

    def taken(self, session: Session) -> int:
        devices = func.sum(func.coalesce(ProbeRecord.devices, ProbeRecord.num_gpus))
        query = select(devices).where(
            ProbeRecord.pool == self.pool,
            ProbeRecord.state == RUNNING,
            ProbeRecord.lease_until >= database_time(),
            *self._of_host(ProbeRecord),
        )
        return int(session.scalar(query) or 0)

    def check(self, session: Session, wanted: int, *, task_id: str, priority: int) -> None:
        """Raises NoRoomError where `wanted` devices are not free.

        Or where a study or run of a higher priority waits for room in this pool. A probe larger
        than the room has it for itself.
        """
        take_turns(session, f"room in {self.pool}")
        taken = self.taken(session)
        if taken and taken + wanted > self.devices:
            raise NoRoomError(f"{taken} of {self.devices} devices of {self.pool} are taken")
        before = (
            select(TaskRecord.id)
            .where(
                TaskRecord.state == RUNNING,
                TaskRecord.pool == self.pool,
                TaskRecord.wants_gpus.is_not(None),
                TaskRecord.lease_until >= database_time(),
                TaskRecord.priority > priority,
                TaskRecord.id != task_id,
                *self._of_host(TaskRecord),
            )
            .limit(1)
        )
        other = session.scalar(before)
        if other is not None:
            raise NoRoomError(f"{other} of a higher priority waits for {self.pool}")

    def _of_host(
        self, table: type[ProbeRecord] | type[TaskRecord]
    ) -> tuple[ColumnElement[bool], ...]:
        if self.host is None:
            return ()
        return (table.owner.startswith(f"{self.host}:", autoescape=True),)


def take_turns(session: Session, name: str) -> None:
    """Waits until no other transaction has this name's turn; ours has it until it ends.

    SQLite's writers take turns anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name}
        )


def check_quota(
    session: Session, asker: Asker, *, plans: int = 0, probes: int = 0, gpu_seconds: float = 0.0
) -> None:
    """Raises QuotaError where so much more would be too much. Others of the same key wait."""
    quota = asker.quota
    if quota is None:
        return
    take_turns(session, f"quota of {asker.name}")
    for name, more, count, seconds in (
        ("plans_per_day", plans, plans_today, RETRY_DAILY_SECONDS),
        ("queued_probes", probes, queued_probes, RETRY_QUEUE_SECONDS),
        ("gpu_seconds_per_day", gpu_seconds, gpu_seconds_today, RETRY_DAILY_SECONDS),
    ):
        used, limit = count(session, asker.name) if more else 0.0, getattr(quota, name)
        if more and used + more > limit:
            raise QuotaError(name, used, more, limit, retry_after_seconds=seconds)


def plans_today(session: Session, name: str) -> int:
    """Plans of the last 24 hours, and studies that make one."""
    recent = PlanRow.created_at > database_time(-DAY)
    made = select(func.count()).where(PlanRow.asked_by == name, recent)
    studied = select(func.count()).where(
        TaskRecord.asked_by == name, TaskRecord.kind == "study", TaskRecord.state.in_(OPEN)
    )
    return (session.scalar(made) or 0) + (session.scalar(studied) or 0)


def queued_probes(session: Session, name: str) -> int:
    query = select(func.count()).where(ProbeRecord.asked_by == name, ProbeRecord.state == "queued")
    return session.scalar(query) or 0


def gpu_seconds_today(session: Session, name: str) -> float:
    """GPU-seconds used in the last 24 hours, and all that what is open may use.

    An open study or run of a sweep counts with its budget, its own probes then do not.
    """
    open_tasks = select(TaskRecord.id).where(TaskRecord.state.in_(OPEN))
    own = or_(ProbeRecord.plan_id.is_(None), ProbeRecord.plan_id.not_in(open_tasks))
    recent = or_(ProbeRecord.state.in_(OPEN), ProbeRecord.finished_at > database_time(-DAY))
    probes = select(func.sum(ProbeRecord.gpu_seconds)).where(
        ProbeRecord.asked_by == name, own, recent
    )
    tasks = select(func.sum(TaskRecord.gpu_seconds)).where(
        TaskRecord.asked_by == name, TaskRecord.state.in_(OPEN)
    )
    return float(session.scalar(probes) or 0.0) + float(session.scalar(tasks) or 0.0)
