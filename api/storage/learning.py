"""Queries of learning: the runs that count, what pricing them found, and the kernels timed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, or_, select
from sqlalchemy.orm import Session

from planner.api.storage.common import plain_text, record_of
from planner.api.storage.records import LearningInputs, RunRow, Subject
from planner.api.storage.tables import DriftFinding, MeasurementRow, PricedRunRow, ProbeRecord
from planner.cost.machine.knobs import StaleRuns
from planner.specs.measurement import TEACHING, software_hash

MOST_RUNS = 500  # newest runs that a calibration is made from
MOST_KERNEL_PROBES = 200  # newest probes of kernels that it is made from
OURS = "reference "  # begins the reference program's version
NO_KERNELS = ("[]", "null")  # JSON of a request that times none


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
        .where(ProbeRecord.gpu == plain_text(gpu), *timed())
        .order_by(ProbeRecord.created_at.desc(), ProbeRecord.id.desc())
        .limit(MOST_KERNEL_PROBES)
    )


def timed() -> tuple[ColumnElement[bool], ...]:
    kernels = ProbeRecord.request["kernels"].as_string()
    return ProbeRecord.state == "done", kernels.is_not(None), kernels.not_in(NO_KERNELS)
