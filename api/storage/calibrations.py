"""Stored calibrations in SQL, for SQLite and PostgreSQL alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Engine,
    Select,
    delete,
    or_,
    select,
    union,
    update,
)
from sqlalchemy.exc import IntegrityError

from planner.api.storage.common import TableStore, plain_text, record_of
from planner.api.storage.job_records import ProbeRecord
from planner.api.storage.learning import read_inputs, timed
from planner.api.storage.records import LearningInputs, Subject
from planner.api.storage.room import take_turns
from planner.api.storage.tables import CalibrationRecord, MeasurementRow, PlanRow, PricedRunRow
from planner.api.storage.transactions import reading, writing


class SqlCalibrationStore(TableStore[CalibrationRecord]):
    """Keeps calibrations, one in use for each subject, and finds what they are made from.

    basis: of what pricing a run found; what was found on another is not used.
    """

    table, what, where = CalibrationRecord, "calibration", "GET /calibrations lists them"

    def __init__(self, engine: Engine, basis: str) -> None:
        super().__init__(engine)
        self.basis = basis

    def save(self, record: CalibrationRecord) -> None:
        """Stores it; one of the same id stays, because equal runs give equal calibrations."""
        with writing(self.engine) as session:
            try:
                with session.begin_nested():
                    session.add(replace(record))
            except IntegrityError:
                pass

    def put_in_use(
        self,
        subject: Subject,
        record: CalibrationRecord | None,
        inputs: LearningInputs,
        now: datetime,
    ) -> bool:
        """Takes this one into use instead of the one before; None: the subject has none any more.

        False, and nothing has changed, where the database holds other runs by now than those that
        it was made from: whoever made it has to make it anew.
        """
        table = CalibrationRecord
        with writing(self.engine) as session:
            take_turns(session, f"{subject.owner}\n{subject.trainer}\n{subject.gpu}")
            if read_inputs(session, subject, self.basis).digest != inputs.digest:
                return False
            kept = None if record is None else session.get(table, record.id)
            session.execute(
                update(table)
                .where(*_of(subject), table.superseded_at.is_(None))
                .values(superseded_at=now)
            )
            if record is not None and kept is None:
                session.add(replace(record))
            elif record is not None and kept is not None:
                kept.superseded_at, kept.built_from = None, record.built_from
        return True

    def latest(
        self, subject: Subject, *, until: datetime | None = None
    ) -> CalibrationRecord | None:
        """The one in use; None where there is none. until: the one that was in use then."""
        table = CalibrationRecord
        query = select(table).where(*_of(subject))
        if until is None:
            query = query.where(table.superseded_at.is_(None))
        else:
            later = or_(table.superseded_at.is_(None), table.superseded_at > until)
            query = query.where(table.created_at <= until, later)
        return self._newest(query)

    def before(self, record: CalibrationRecord) -> CalibrationRecord | None:
        """The one that was in use before it; None where it was its subject's first."""
        table = CalibrationRecord
        earlier = (table.created_at < record.created_at, table.built_from.is_not(None))
        query = select(table).where(*_of(record.subject), *earlier)
        return self._newest(query)

    def _newest(self, query: Select[Any]) -> CalibrationRecord | None:
        table = CalibrationRecord
        query = query.order_by(table.created_at.desc(), table.id.desc()).limit(1)
        with reading(self.engine) as session:
            return session.scalars(query).first()

    def plans_on(self, calibration_id: str) -> Sequence[str]:
        """Ids of the stored plans that rest on it, newest first."""
        query = select(PlanRow.id).where(PlanRow.calibration_id == plain_text(calibration_id))
        with reading(self.engine) as session:
            return session.scalars(query.order_by(PlanRow.created_at.desc())).all()

    def subjects(self, owner: str) -> Sequence[Subject]:
        table = CalibrationRecord
        query = select(table.trainer, table.gpu, table.owner).where(
            table.superseded_at.is_(None), table.owner == plain_text(owner)
        )
        with reading(self.engine) as session:
            return [record_of(Subject, row) for row in session.execute(query)]

    # ---- what they are made from ----------------------------------------------------------------

    def inputs(self, subject: Subject, software: Mapping[str, str] | None = None) -> LearningInputs:
        """The runs and settings that a calibration of this subject would be fitted to today.

        software: of the runs; where it is left out, that of the newest run.
        """
        with reading(self.engine) as session:
            return read_inputs(session, subject, self.basis, software)

    def keep(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Keeps what pricing these runs found, by id; of a run that is gone, nothing."""
        with writing(self.engine) as session:
            ids = select(MeasurementRow.id).where(MeasurementRow.id.in_(found)).with_for_update()
            there = session.scalars(ids).all()
            session.execute(delete(PricedRunRow).where(PricedRunRow.measurement_id.in_(there)))
            session.add_all(
                PricedRunRow(measurement_id=one, basis=self.basis, document=dict(found[one]))
                for one in there
            )

    def measured(self, gpu: str | None) -> list[tuple[str, str]]:
        """(trainer, GPU) of all runs and calibrations in use; of one GPU where it is named."""
        runs, made = MeasurementRow, CalibrationRecord
        query: CompoundSelect[Any] = union(
            select(runs.trainer, runs.gpu),
            select(made.trainer, made.gpu).where(made.superseded_at.is_(None)),
        )
        with reading(self.engine) as session:
            return [(row[0], row[1]) for row in session.execute(query) if gpu in (None, row[1])]

    def timed_gpus(self, gpu: str | None) -> Sequence[str]:
        """GPUs that kernels were timed on; only this one where it is named."""
        query = select(ProbeRecord.gpu).where(*timed()).distinct()
        if gpu is not None:
            query = query.where(ProbeRecord.gpu == plain_text(gpu))
        with reading(self.engine) as session:
            return session.scalars(query).all()

    def owners(self, trainer: str, gpu: str) -> Sequence[str]:
        """Owners of runs of this trainer on this GPU that are not shared, or were until now.

        Whose last run was deleted still has a calibration in use.
        """
        runs, made = MeasurementRow, CalibrationRecord
        trainer, gpu = plain_text(trainer), plain_text(gpu)
        unshared = (runs.trainer == trainer, runs.gpu == gpu, runs.shared.is_(False))
        used = (made.trainer == trainer, made.gpu == gpu, made.superseded_at.is_(None))
        query: CompoundSelect[Any] = union(
            select(runs.asked_by).where(*unshared), select(made.owner).where(*used)
        )
        with reading(self.engine) as session:
            return sorted(name for name in session.scalars(query) if name)


def _of(subject: Subject) -> tuple[ColumnElement[bool], ...]:
    table = CalibrationRecord
    return (
        table.trainer == plain_text(subject.trainer),
        table.gpu == plain_text(subject.gpu),
        table.owner == plain_text(subject.owner),
    )
