"""What runs have taught, in SQL, for SQLite and PostgreSQL alike."""

from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.storage.common import (
    SHOWN_CHARACTERS,
    check_limit,
    cursor_of,
    is_id,
    plain_text,
    read_cursor,
)
from api.storage.engine import store_errors
from api.storage.tables import CalibrationRow
from planner.errors import NotFoundError
from planner.ports import CalibrationPage, CalibrationRecord


class SqlCalibrationStore:
    """A CalibrationStore on one engine; see `planner.ports` for what each method promises."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(planner_writes=True)

    def save(self, record: CalibrationRecord) -> None:
        """Stores it; one of the same id stays as it is."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add(
                CalibrationRow(
                    **{
                        **asdict(record),
                        "software": dict(record.software),
                        "document": dict(record.document),
                    }
                )
            )
            try:
                session.commit()
            except IntegrityError:
                session.rollback()

    def get(self, calibration_id: str) -> CalibrationRecord:
        """The calibration of this id."""
        with store_errors(self.engine), Session(self.engine) as session:
            row = session.get(CalibrationRow, calibration_id) if is_id(calibration_id) else None
            if row is None:
                raise NotFoundError(
                    f"no calibration of id {calibration_id[:SHOWN_CHARACTERS]!r}; GET "
                    "/calibrations lists them"
                )
            return _record(row)

    def latest(
        self, trainer: str, gpu: str, *, until: datetime | None = None
    ) -> CalibrationRecord | None:
        """The newest of this trainer on this GPU, or the newest at a moment."""
        mine = [
            CalibrationRow.trainer == plain_text(trainer),
            CalibrationRow.gpu == plain_text(gpu),
        ]
        if until is not None:
            mine.append(CalibrationRow.created_at <= until)
        query = (
            select(CalibrationRow)
            .where(*mine)
            .order_by(CalibrationRow.created_at.desc(), CalibrationRow.id.desc())
            .limit(1)
        )
        with store_errors(self.engine), Session(self.engine) as session:
            row = session.scalars(query).first()
            return None if row is None else _record(row)

    def list(self, cursor: str | None = None, limit: int = 50) -> CalibrationPage:
        """Newest first, by (created_at, id), which later ones never disturb."""
        check_limit(limit)
        query = select(CalibrationRow).order_by(
            CalibrationRow.created_at.desc(), CalibrationRow.id.desc()
        )
        if cursor is not None:
            query = query.where(
                tuple_(CalibrationRow.created_at, CalibrationRow.id) < tuple_(*read_cursor(cursor))
            )
        with store_errors(self.engine), Session(self.engine) as session:
            items = tuple(_record(row) for row in session.scalars(query.limit(limit + 1)))
        last = items[limit - 1] if len(items) > limit else None
        return CalibrationPage(
            items=items[:limit],
            next_cursor=None if last is None else cursor_of(last.created_at, last.id),
        )


def _record(row: CalibrationRow) -> CalibrationRecord:
    values: dict[str, Any] = {
        field.name: getattr(row, field.name) for field in fields(CalibrationRecord)
    }
    return CalibrationRecord(**values)
