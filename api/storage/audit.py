"""The audit trail: who asked for, ran, cancelled and imported what, written with the thing."""

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from planner.api.storage.clock import database_time
from planner.api.storage.common import TableStore, decoded, plain_text, record_of, unknown_cursor
from planner.api.storage.records import AuditEvent
from planner.api.storage.tables import AuditRow
from planner.api.storage.transactions import writing
from planner.units import DAY

DETAIL_CHARACTERS = 1000
PRUNED_AT_ONCE = 1000


def note(
    session: Session,
    asked_by: str | None,
    action: str,
    subject: str,
    *,
    gpu_seconds: float | None = None,
    detail: str | None = None,
) -> None:
    row = AuditRow(
        at=database_time(),
        asked_by=None if asked_by is None else plain_text(asked_by),
        action=action,
        subject=plain_text(subject),
        gpu_seconds=gpu_seconds,
        detail=None if detail is None else plain_text(detail, DETAIL_CHARACTERS),
    )
    session.add(row)


class SqlAuditTrail(TableStore[AuditEvent]):
    """Reads and prunes the trail, and notes what no other store writes."""

    table, order = AuditRow, ("id",)

    def add(self, asked_by: str | None, action: str, subject: str, detail: str) -> None:
        with writing(self.engine) as session:
            note(session, asked_by, action, subject, detail=detail)

    def prune(self, days: float) -> int:
        """Deletes lines that are older than this; returns how many.

        Numbers of lines rise with time, so only the first ones are looked at, some at a time so
        that nobody else waits for long.
        """
        pruned = 0
        first = select(AuditRow.id).order_by(AuditRow.id).limit(PRUNED_AT_ONCE)
        old = (AuditRow.id.in_(first), AuditRow.at < database_time(-days * DAY))
        while True:
            with writing(self.engine) as session:
                deleted = session.scalars(delete(AuditRow).where(*old).returning(AuditRow.id))
                gone = len(deleted.all())
            pruned += gone
            if gone < PRUNED_AT_ONCE:
                return pruned

    def item(self, row: AuditRow) -> AuditEvent:
        return record_of(AuditEvent, row)

    def values_at(self, cursor: str) -> tuple[int]:
        number = decoded(cursor)
        if not number.isascii() or not number.isdigit() or len(number) > 18:
            raise unknown_cursor(cursor)
        return (int(number),)
