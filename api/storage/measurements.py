"""Measurements in SQL, for SQLite and PostgreSQL alike."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Engine, select

from api.storage.common import all_readable, flush_new, plain_text, readable, row_of
from api.storage.paging import read_page
from api.storage.records import MeasurementFilter, Page
from api.storage.tables import MeasurementRow
from api.storage.transactions import reading, writing
from planner.intake.measurements import read_measurement
from planner.specs.measurement import Measurement


class SqlMeasurementStore:
    """Keeps measurements, one entry a run: a repeated measurement is a second entry."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        rows = [measurement_row(measurement) for measurement in measurements]
        with writing(self.engine) as session:
            session.add_all(rows)
            flush_new(session, ", ".join(measurement.id for measurement in measurements[:3]))

    def get(self, measurement_id: str) -> Measurement:
        """The measurement as it was stored. Raises NotFoundError."""
        remedy = "`planner-cli measurements list` shows the ids"
        with reading(self.engine) as session:
            return _measurement(
                row_of(session, MeasurementRow, measurement_id, "measurement", remedy)
            )

    def list(
        self, wanted: MeasurementFilter | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[Measurement]:
        """The wanted measurements, newest first."""
        return read_page(self.engine, MeasurementRow, _measurement, cursor, limit, wanted=wanted)

    def matching(self, job_hash: str) -> Sequence[Measurement]:
        """Measurements of this question, oldest first."""
        query = select(MeasurementRow).where(MeasurementRow.job_hash == plain_text(job_hash))
        with reading(self.engine) as session:
            rows = session.scalars(query.order_by(MeasurementRow.created_at, MeasurementRow.id))
            return tuple(all_readable(rows, _measurement))


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
    with readable("measurement", row.id):
        return read_measurement(
            row.body["row"],
            measurement_id=row.id,
            created_at=row.body["created_at"],
            allow_files=False,
        )
