"""Sweeps in SQL, for SQLite and PostgreSQL alike."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select, tuple_, update
from sqlalchemy.orm import Session

from api.storage.common import (
    SHOWN_CHARACTERS,
    check_limit,
    cursor_of,
    flush_new,
    is_id,
    plain_text,
    read_cursor,
)
from api.storage.engine import store_errors
from api.storage.tables import SweepRow, TaskRow
from planner.errors import ConflictError, NotFoundError
from planner.ports import SweepPage, SweepRecord, SweepState, TaskRecord


class SqlSweepStore:
    """A SweepStore on one engine; see `planner.ports` for what each method promises."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(planner_writes=True)

    def add(self, record: SweepRecord) -> None:
        """Stores it."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add(
                SweepRow(
                    **{**asdict(record), "name": plain_text(record.name), "spec": dict(record.spec)}
                )
            )
            flush_new(session, record.id)
            session.commit()

    def get(self, sweep_id: str) -> SweepRecord:
        """The sweep as it stands."""
        with store_errors(self.engine), Session(self.engine) as session:
            return _record(_found(session, sweep_id))

    def list(self, cursor: str | None = None, limit: int = 50) -> SweepPage:
        """Newest first, by (created_at, id), which later sweeps never disturb."""
        check_limit(limit)
        query = select(SweepRow).order_by(SweepRow.created_at.desc(), SweepRow.id.desc())
        if cursor is not None:
            query = query.where(
                tuple_(SweepRow.created_at, SweepRow.id) < tuple_(*read_cursor(cursor))
            )
        with store_errors(self.engine), Session(self.engine) as session:
            items = tuple(_record(row) for row in session.scalars(query.limit(limit + 1)))
        last = items[limit - 1] if len(items) > limit else None
        return SweepPage(
            items=items[:limit],
            next_cursor=None if last is None else cursor_of(last.created_at, last.id),
        )

    def due(self, now: datetime) -> Sequence[SweepRecord]:
        """Active sweeps whose moment has come, earliest first."""
        query = (
            select(SweepRow)
            .where(SweepRow.state == "active", SweepRow.next_due_at <= now)
            .order_by(SweepRow.next_due_at, SweepRow.id)
        )
        with store_errors(self.engine), Session(self.engine) as session:
            return tuple(_record(row) for row in session.scalars(query))

    def advance(
        self, sweep: SweepRecord, next_due_at: datetime | None, task: TaskRecord | None
    ) -> bool:
        """Whoever still finds the moment that it read moves on from it; the others change
        nothing.
        """
        here = (
            SweepRow.id == sweep.id,
            SweepRow.state == "active",
            SweepRow.next_due_at == sweep.next_due_at,
        )
        with store_errors(self.engine), Session(self._writer) as session:
            moved = session.execute(
                update(SweepRow).where(*here).values(next_due_at=next_due_at).returning(SweepRow.id)
            ).first()
            if moved is None:
                return False
            if task is not None:
                session.add(TaskRow(**{**asdict(task), "request": dict(task.request)}))
                flush_new(session, f"a run of {sweep.id} for {task.due_at}")
            session.commit()
        return True

    def change(self, sweep_id: str, state: SweepState, next_due_at: datetime | None) -> SweepRecord:
        """Pauses, resumes or cancels it."""
        with store_errors(self.engine), Session(self._writer) as session:
            row = _found(session, sweep_id, lock=True)
            if row.state == "cancelled" and state != "cancelled":
                raise ConflictError(f"sweep {sweep_id} was cancelled; schedule it anew")
            row.state, row.next_due_at = state, next_due_at
            record = _record(row)
            session.commit()
        return record


def _found(session: Session, sweep_id: str, *, lock: bool = False) -> SweepRow:
    row = session.get(SweepRow, sweep_id, with_for_update=lock) if is_id(sweep_id) else None
    if row is None:
        raise NotFoundError(
            f"no sweep of id {sweep_id[:SHOWN_CHARACTERS]!r}; `planner-cli sweep list` shows the "
            "ids"
        )
    return row


def _record(row: SweepRow) -> SweepRecord:
    values: dict[str, Any] = {field.name: getattr(row, field.name) for field in fields(SweepRecord)}
    return SweepRecord(**values)
