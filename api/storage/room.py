"""Room in a pool, as the database sees it: which probes run there, and who waits for more.

A running probe with a lease occupies its devices; with the lease the room is free again. Whoever
wants to start one asks in the transaction that stores it, in turn with all others of the pool, so
that two workers never take the same room.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select, text
from sqlalchemy.orm import Session

from planner.api.storage.clock import database_time
from planner.api.storage.tables import ProbeRow, TaskRow
from planner.errors import PlannerError

RUNNING = "running"


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
        query = select(func.coalesce(func.sum(self._occupied()), 0)).where(*self._running())
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
            select(TaskRow.id)
            .where(
                TaskRow.state == RUNNING,
                TaskRow.pool == self.pool,
                TaskRow.wants_gpus.is_not(None),
                TaskRow.lease_until >= database_time(),
                TaskRow.priority > priority,
                TaskRow.id != task_id,
                *self._of_host(TaskRow),
            )
            .limit(1)
        )
        other = session.scalar(before)
        if other is not None:
            raise NoRoomError(f"{other} of a higher priority waits for {self.pool}")

    def _running(self) -> tuple[ColumnElement[bool], ...]:
        return (
            ProbeRow.pool == self.pool,
            ProbeRow.state == RUNNING,
            ProbeRow.lease_until >= database_time(),
            *self._of_host(ProbeRow),
        )

    def _of_host(self, table: type[ProbeRow] | type[TaskRow]) -> tuple[ColumnElement[bool], ...]:
        if self.host is None:
            return ()
        return (table.owner.startswith(f"{self.host}:", autoescape=True),)

    @staticmethod
    def _occupied() -> ColumnElement[int]:
        return func.coalesce(ProbeRow.devices, ProbeRow.num_gpus)


def take_turns(session: Session, name: str) -> None:
    """Waits until no other transaction has this name's turn; ours has it until it ends.

    SQLite's writers take turns anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name}
        )
