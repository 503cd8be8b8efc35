"""Measurements in SQL, for SQLite and PostgreSQL alike."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select, tuple_, update

from planner.api.identity import asker
from planner.api.storage.audit import note
from planner.api.storage.common import TableStore, all_readable, flush_new, plain_text, readable
from planner.api.storage.job_records import ProbeRecord
from planner.api.storage.learning import believed_by, without_stale
from planner.api.storage.records import Subject
from planner.api.storage.tables import FIGURES, MeasurementRow
from planner.api.storage.transactions import reading, writing
from planner.cost.machine.knobs import StaleRuns
from planner.intake.measurements import read_measurement
from planner.specs.measurement import Measurement

KEYS = ("job_hash", "num_gpus", "layout_hash", "software_hash")


class SqlMeasurementStore(TableStore[Measurement]):
    """Keeps measurements, one entry a run: a repeated measurement is a second entry."""

    table, what = MeasurementRow, "measurement"
    where = "`planner-cli measurements list` shows the ids"

    def item(self, row: MeasurementRow) -> Measurement:
        with readable("measurement", row.id):
            found = read_measurement(
                row.body["row"],
                measurement_id=row.id,
                created_at=row.body["created_at"],
                allow_files=False,
            )
        own = {"asked_by": row.asked_by, "shared": row.shared, "refused": row.refused}
        return found.model_copy(update={**own, "confirmed": row.body.get("confirmed")})

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        rows = [measurement_row(measurement) for measurement in measurements]
        with writing(self.engine) as session:
            session.add_all(rows)
            flush_new(session, ", ".join(measurement.id for measurement in measurements[:3]))
            for measurement in measurements:
                who = measurement.asked_by or asker().name
                note(session, who, "measurement.imported", measurement.id)

    def matching(
        self, job_hash: str, subject: Subject
    ) -> tuple[tuple[Measurement, ...], StaleRuns | None]:
        """(measurements of this question that count for the owner's plans, what is left out).

        Oldest first. Left out is what was measured before a sweep found that step times changed.
        subject: what the question is about.
        """
        query = select(MeasurementRow).where(
            MeasurementRow.job_hash == plain_text(job_hash), *believed_by(subject.owner)
        )
        with reading(self.engine) as session:
            stale, query = without_stale(session, subject, query)
            rows = session.scalars(query.order_by(MeasurementRow.created_at, MeasurementRow.id))
            return tuple(all_readable(rows, self.item)), stale

    def newest_before(self, measurement: Measurement, owner: str = "") -> Measurement | None:
        """The newest earlier run of the same question, layout and rung that gave a step time.

        Of those that count for this owner's plans.
        """
        key, table = measurement.key(), MeasurementRow
        place = (datetime.fromisoformat(measurement.created_at), measurement.id)
        query = (
            select(table)
            .where(
                table.job_hash == key.job_hash,
                table.layout_hash == key.layout_hash,
                table.rung == measurement.measured.rung,
                table.status == "ok",
                tuple_(table.created_at, table.id) < tuple_(*place),
                *believed_by(owner),
            )
            .order_by(table.created_at.desc(), table.id.desc())
        )
        with reading(self.engine) as session:
            found = all_readable(session.scalars(query.limit(1)), self.item)
            return next(found, None)

    def delete(self, measurement_id: str) -> tuple[str, str]:
        """Removes it, and what pricing it found; the probe that measured it stays without it.

        Returns its trainer and GPU. Raises NotFoundError.
        """
        with writing(self.engine) as session:
            row = self.row(session, measurement_id, lock=True)
            found = (row.trainer, row.gpu)
            probes = update(ProbeRecord).where(ProbeRecord.measurement_id == measurement_id)
            session.execute(probes.values(measurement_id=None))
            session.delete(row)  # what pricing it found goes with it
            note(session, asker().name, "measurement.deleted", measurement_id)
        return found

    def share(
        self, *, measurement_id: str | None = None, asked_by: str | None = None
    ) -> Sequence[str]:
        """Lets this one, or all that somebody stored, count for everyone; returns their ids.

        One that is not believed counts for nobody and is not shared.
        """
        table = MeasurementRow
        unshared = update(table).where(~table.shared, table.refused.is_(None))
        query = unshared.values(shared=True).returning(table.id)
        if measurement_id is not None:
            query = query.where(table.id == plain_text(measurement_id))
        if asked_by is not None:
            query = query.where(table.asked_by == plain_text(asked_by))
        with writing(self.engine) as session:
            ids = session.scalars(query).all()
            for one in ids:
                note(session, asker().name, "measurement.shared", one)
        return sorted(ids)

    def refuse(self, measurement_id: str, reason: str) -> None:
        """From now on it is not believed, for this reason."""
        query = update(MeasurementRow).where(MeasurementRow.id == measurement_id)
        with writing(self.engine) as session:
            session.execute(query.values(refused=reason))
            note(session, asker().name, "measurement.refused", measurement_id)

    def believe(self, measurement_id: str, by: str) -> None:
        """From now on it counts, because `by` vouches for it. Raises NotFoundError."""
        with writing(self.engine) as session:
            row = self.row(session, measurement_id, lock=True)
            row.refused, row.body = None, {**row.body, "confirmed": by}
            note(session, by, "measurement.believed", measurement_id)


def measurement_row(measurement: Measurement) -> MeasurementRow:
    """The row of a measurement, with the columns that it is found by."""
    key, numbers, layout = measurement.key(), measurement.measured, measurement.job.layout
    return MeasurementRow(
        id=measurement.id,
        created_at=datetime.fromisoformat(measurement.created_at),
        model=plain_text(key.model),
        gpu=plain_text(key.gpu),
        layout=layout.short() if layout else "",
        **{name: getattr(key, name) for name in KEYS},
        **{name: getattr(numbers, name) for name in ("status", "rung", *FIGURES)},
        body={
            "created_at": measurement.created_at,
            "row": measurement.as_row(),
            "confirmed": measurement.confirmed,
        },
        trainer=plain_text(measurement.job.training.trainer),
        asked_by=None if measurement.asked_by is None else plain_text(measurement.asked_by),
        shared=measurement.shared,
        refused=measurement.refused,
    )
