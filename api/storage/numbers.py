"""Counts in the database, for whoever watches the service."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine, func, literal, select

from planner.api.storage.tables import MeasurementRow, PlanRow, ProbeRecord, SweepRecord, TaskRecord
from planner.api.storage.transactions import reading


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNumbers:
    """Counts of everything that is stored.

    jobs: by (kind, state); a kind is probe, study or sweep.
    failures: probes that ended without a result, by the failure's name.
    totals: GPU-seconds that ended probes used; stored plans, measurements and sweeps.
    newest_measurement: its id; None where there is none.
    """

    jobs: Mapping[tuple[str, str], int]
    failures: Mapping[str, int]
    totals: Mapping[str, float]
    newest_measurement: str | None


def stored_numbers(engine: Engine) -> StoredNumbers:
    """The numbers of this moment. Raises StoreError."""
    count = func.count()
    newest = select(MeasurementRow.id).order_by(
        MeasurementRow.created_at.desc(), MeasurementRow.id.desc()
    )
    failed = select(ProbeRecord.failure, count).where(ProbeRecord.failure.is_not(None))
    used = select(func.sum(ProbeRecord.gpu_seconds)).where(ProbeRecord.finished_at.is_not(None))
    probes = select(literal("probe"), ProbeRecord.state, count).group_by(ProbeRecord.state)
    tasks = select(TaskRecord.kind, TaskRecord.state, count).group_by(
        TaskRecord.kind, TaskRecord.state
    )
    with reading(engine) as session:
        jobs = (*session.execute(probes), *session.execute(tasks))
        failures = session.execute(failed.group_by(ProbeRecord.failure))
        totals = {"probe_gpu_seconds": float(session.scalar(used) or 0.0)}
        for table in (PlanRow, MeasurementRow, SweepRecord):
            number = session.scalar(select(count).select_from(table))
            totals[table.__tablename__] = number or 0
        return StoredNumbers(
            jobs={(kind, state): number for kind, state, number in jobs},
            failures={str(failure): number for failure, number in failures},
            totals=totals,
            newest_measurement=session.scalar(newest.limit(1)),
        )
