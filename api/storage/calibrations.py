"""Stored calibrations in SQL, for SQLite and PostgreSQL alike."""

from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError

from api.storage.common import plain_text, row_of
from api.storage.paging import read_page
from api.storage.records import CalibrationRecord, Page
from api.storage.tables import CalibrationRow
from api.storage.transactions import reading, writing


class SqlCalibrationStore:
    """Keeps calibrations."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def save(self, record: CalibrationRecord) -> None:
        """Stores it; one of the same id stays, because equal runs give equal calibrations."""
        values = {
            **asdict(record),
            "software": dict(record.software),
            "document": dict(record.document),
        }
        with writing(self.engine) as session:
            try:
                with session.begin_nested():
                    session.add(CalibrationRow(**values))
            except IntegrityError:
                pass

    def get(self, calibration_id: str) -> CalibrationRecord:
        """The calibration of this id. Raises NotFoundError."""
        remedy = "GET /calibrations lists them"
        with reading(self.engine) as session:
            return _record(row_of(session, CalibrationRow, calibration_id, "calibration", remedy))

    def latest(
        self, trainer: str, gpu: str, *, until: datetime | None = None
    ) -> CalibrationRecord | None:
        """The newest of this trainer on this GPU, stored by `until`; None where there is none."""
        table = CalibrationRow
        query = select(table).where(
            table.trainer == plain_text(trainer), table.gpu == plain_text(gpu)
        )
        if until is not None:
            query = query.where(table.created_at <= until)
        query = query.order_by(table.created_at.desc(), table.id.desc()).limit(1)
        with reading(self.engine) as session:
            row = session.scalars(query).first()
            return None if row is None else _record(row)

    def list(self, cursor: str | None = None, limit: int = 50) -> Page[CalibrationRecord]:
        """All calibrations, newest first."""
        return read_page(self.engine, CalibrationRow, _record, cursor, limit)


def _record(row: CalibrationRow) -> CalibrationRecord:
    values: dict[str, Any] = {
        field.name: getattr(row, field.name) for field in fields(CalibrationRecord)
    }
    return CalibrationRecord(**values)
