"""Learning in SQL: the runs that count, and what pricing them found."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Engine,
    Select,
    and_,
    delete,
    func,
    or_,
    select,
    union,
)
from sqlalchemy.orm import Session

from planner.api.storage.common import plain_text, record_of
from planner.api.storage.records import LearningInputs, RunRow, Subject
from planner.api.storage.tables import (
    CalibrationRecord,
    DriftFinding,
    MeasurementRow,
    PricedRunRow,
    ProbeRecord,
)
from planner.api.storage.transactions import reading, writing
from planner.cost.machine.knobs import StaleRuns
from planner.specs.measurement import TEACHING, software_hash

MOST_RUNS = 500  # newest runs that a calibration is made from
MOST_KERNEL_PROBES = 200  # newest probes of kernels that it is made from
OURS = "reference "  # begins the reference program's version
NO_KERNELS = ("[]", "null")  # JSON of a request that times none


class SqlLearningStore:
    """The runs and timed kernels that calibrations are made from.

    basis: of what pricing found; what was found on another is not used.
    """

    def __init__(self, engine: Engine, basis: str) -> None:
        self.engine = engine
        self.basis = basis

    def inputs(self, subject: Subject, software: Mapping[str, str] | None = None) -> LearningInputs:
        """Inputs of this subject's calibration as of now.

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
        query = select(ProbeRecord.gpu).where(*_timed()).distinct()
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


def read_inputs(
    session: Session, subject: Subject, basis: str, software: Mapping[str, str] | None = None
) -> LearningInputs:
    """The inputs as this transaction sees them."""
    table = MeasurementRow
    if software is None:
        newest = session.scalars(_counting(select(table.body), subject).limit(1)).first()
        software = None if newest is None else newest["row"]["measured"].get("software") or {}
    chosen = [] if software is None else _hashes_of(session, subject, software)
    software = software or {}
    runs: tuple[RunRow, ...] = ()
    stale: StaleRuns | None = None
    if chosen:
        columns = (table.id, table.created_at, table.job_hash, table.layout_hash)
        query = select(*columns, table.step_seconds, PricedRunRow.document).outerjoin(
            PricedRunRow, (PricedRunRow.measurement_id == table.id) & (PricedRunRow.basis == basis)
        )
        query = _counting(query.where(table.software_hash.in_(chosen)), subject)
        stale, query = without_stale(session, subject, query, chosen)
        query = query.limit(MOST_RUNS)
        runs = tuple(
            record_of(RunRow, row, layout=f"{row.job_hash}{row.layout_hash}", priced=row.document)
            for row in session.execute(query)
        )
    kernels = tuple(session.scalars(_kernel_probes(subject.gpu)))
    ids = sorted(run.id for run in runs)
    text = "\n".join([basis, *(chosen or [""]), *ids, "", *sorted(kernels)])
    if stale is not None:
        text += f"\n{stale.runs} stale since {stale.since}"
    return LearningInputs(
        software={str(key): str(value) for key, value in software.items()},
        runs=runs,
        kernel_probes=kernels,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        stale=stale,
    )


def _hashes_of(session: Session, subject: Subject, software: Mapping[str, str]) -> list[str]:
    """Hashes of these versions, and of the newest run by the other program under the same ones.

    The reference program's runs and the trainer's own teach together (`own_runs.REFERENCE`).
    """
    table, measured = MeasurementRow, MeasurementRow.body["row"]["measured"]
    version = func.coalesce(measured["software"]["trainer_version"].as_string(), "")
    ours = software.get("trainer_version", "").startswith(OURS)
    by_other = version.not_like(f"{OURS}%") if ours else version.like(f"{OURS}%")
    query = _counting(select(table.software_hash, table.body).where(by_other), subject)
    found = session.execute(query.limit(1)).first()
    hashes = [software_hash(software)]
    if found is not None:
        other = found.body["row"]["measured"].get("software") or {}
        common = (software.keys() & other.keys()) - {"trainer_version"}
        # a wheel's metadata leave out the local part of its version that torch itself names
        if all(_public(software[name]) == _public(other[name]) for name in common):
            hashes.append(found.software_hash)
    return hashes


def _public(version: str) -> str:
    return str(version).partition("+")[0]


def without_stale(
    session: Session, subject: Subject, query: Select[Any], software: Sequence[str] = ()
) -> tuple[StaleRuns | None, Select[Any]]:
    """(runs from before a change of their step times, the query without them).

    What did not fit into memory has no step time, and is never stale.
    software: hashes of versions, where the query is of their runs: the changes under these alone.
    """
    table, drift = MeasurementRow, DriftFinding
    changes = select(drift).where(
        drift.trainer == plain_text(subject.trainer),
        drift.gpu == plain_text(subject.gpu),
        drift.owner.in_(("", plain_text(subject.owner))),
    )
    if software:
        changes = changes.where(drift.software_hash.in_(software))
    found = session.scalars(changes).all()
    newest_first = sorted(found, key=lambda one: one.since, reverse=True)
    before = [
        and_(
            table.status == "ok",
            table.created_at < one.since,
            *([table.job_hash == one.job_hash] if one.job_hash else []),
            *([table.layout_hash == one.layout_hash] if one.layout_hash else []),
        )
        for one in newest_first
    ]
    old = query.with_only_columns(table.id, maintain_column_froms=True).order_by(None)
    count = select(func.count()).select_from(old.where(or_(False, *before)).subquery())
    runs = session.scalar(count) or 0
    if not runs:
        return None, query
    change = next(
        one
        for one, is_old in zip(newest_first, before, strict=True)
        if session.scalars(old.where(is_old).limit(1)).first() is not None
    )
    stale = StaleRuns(runs=runs, since=change.since.isoformat(), statement=change.statement)
    return stale, query.where(~or_(*before))


def _counting(query: Select[Any], subject: Subject) -> Select[Any]:
    """The query, of runs that teach this subject, newest first."""
    table, measured = MeasurementRow, MeasurementRow.body["row"]["measured"]
    return query.where(
        table.trainer == plain_text(subject.trainer),
        table.gpu == plain_text(subject.gpu),
        table.status == "ok",
        table.rung.in_(TEACHING),
        table.step_seconds > 0,
        # `Measured.disturbed`
        func.coalesce(measured["throttled"].as_boolean(), False).is_(False),
        func.coalesce(measured["intruded"].as_boolean(), False).is_(False),
        func.coalesce(measured["allocator_retries"].as_integer(), 0) == 0,
        *believed_by(subject.owner),
    ).order_by(table.created_at.desc(), table.id.desc())


def believed_by(owner: str) -> tuple[ColumnElement[bool], ...]:
    """Measurements that count for this owner's plans: believed, and shared or the owner's own."""
    table = MeasurementRow
    everyone = table.shared.is_(True)
    mine = or_(everyone, table.asked_by == owner) if owner else everyone
    return table.refused.is_(None), mine


def _kernel_probes(gpu: str) -> Select[Any]:
    return (
        select(ProbeRecord.id)
        .where(ProbeRecord.gpu == plain_text(gpu), *_timed())
        .order_by(ProbeRecord.created_at.desc(), ProbeRecord.id.desc())
        .limit(MOST_KERNEL_PROBES)
    )


def _timed() -> tuple[ColumnElement[bool], ...]:
    kernels = ProbeRecord.request["kernels"].as_string()
    return ProbeRecord.state == "done", kernels.is_not(None), kernels.not_in(NO_KERNELS)
