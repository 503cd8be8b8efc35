"""What was measured, in SQL, for SQLite and PostgreSQL alike."""

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime

from sqlalchemy import Engine, select, tuple_
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
from api.storage.tables import MeasurementRow
from planner.errors import NotFoundError
from planner.intake.measurements import read_measurement
from planner.ports import MeasurementFilter, MeasurementPage
from planner.specs.measurement import Measurement


class SqlMeasurementStore:
    """A MeasurementStore on one engine; see `planner.ports` for what each method promises."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(planner_writes=True)

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores all or none."""
        rows = [measurement_row(measurement) for measurement in measurements]
        with store_errors(self.engine), Session(self._writer) as session:
            session.add_all(rows)
            flush_new(session, ", ".join(measurement.id for measurement in measurements[:3]))
            session.commit()

    def get(self, measurement_id: str) -> Measurement:
        """The measurement as it was stored."""
        with store_errors(self.engine), Session(self.engine) as session:
            row = session.get(MeasurementRow, measurement_id) if is_id(measurement_id) else None
            if row is None:
                raise NotFoundError(
                    f"no measurement of id {measurement_id[:SHOWN_CHARACTERS]!r}; "
                    "`planner-cli measurements list` shows the ids"
                )
            return _measurement(row)

    def list(
        self, wanted: MeasurementFilter | None = None, cursor: str | None = None, limit: int = 50
    ) -> MeasurementPage:
        """Newest first, by (created_at, id), which later measurements never disturb."""
        check_limit(limit)
        query = select(MeasurementRow).order_by(
            MeasurementRow.created_at.desc(), MeasurementRow.id.desc()
        )
        for field in fields(MeasurementFilter):
            value = getattr(wanted or MeasurementFilter(), field.name)
            if value is not None:
                query = query.where(getattr(MeasurementRow, field.name) == plain_text(value))
        if cursor is not None:
            query = query.where(
                tuple_(MeasurementRow.created_at, MeasurementRow.id) < tuple_(*read_cursor(cursor))
            )
        with store_errors(self.engine), Session(self.engine) as session:
            rows = session.scalars(query.limit(limit + 1)).all()
            items = tuple(_measurement(row) for row in rows[:limit])
            last = rows[limit - 1] if len(rows) > limit else None
            return MeasurementPage(
                items=items,
                next_cursor=None if last is None else cursor_of(last.created_at, last.id),
            )

    def matching(self, job_hash: str) -> Sequence[Measurement]:
        """Measurements of this question, oldest first."""
        query = select(MeasurementRow).where(MeasurementRow.job_hash == plain_text(job_hash))
        with store_errors(self.engine), Session(self.engine) as session:
            rows = session.scalars(query.order_by(MeasurementRow.created_at, MeasurementRow.id))
            return tuple(_measurement(row) for row in rows)


def measurement_row(measurement: Measurement) -> MeasurementRow:
    """The row of a measurement, with the columns that it is found by."""
    key, numbers, layout = measurement.key(), measurement.measured, measurement.job.layout
    return MeasurementRow(
        id=measurement.id,
        created_at=datetime.fromisoformat(measurement.created_at),
        job_hash=key.job_hash,
        model=plain_text(key.model),
        gpu=plain_text(key.gpu),
        num_gpus=key.num_gpus,
        layout=layout.short() if layout else "",
        layout_hash=key.layout_hash,
        software_hash=key.software_hash,
        status=numbers.status,
        rung=numbers.rung,
        step_seconds=numbers.step_seconds,
        tokens_per_second_per_gpu=numbers.tokens_per_second_per_gpu,
        peak_allocated_bytes=numbers.peak_allocated_bytes,
        peak_reserved_bytes=numbers.peak_reserved_bytes,
        device_bytes=numbers.device_bytes,
        body={"created_at": measurement.created_at, "row": measurement.as_row()},
    )


def _measurement(row: MeasurementRow) -> Measurement:
    return read_measurement(
        row.body["row"], measurement_id=row.id, created_at=row.body["created_at"], allow_files=False
    )
