"""Counts in the database, for whoever watches the service."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine, func, select

from planner.api.storage.tables import MeasurementRow, PlanRow, ProbeRow, SweepRow, TaskRow
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
    failed = select(ProbeRow.failure, count).where(ProbeRow.failure.is_not(None))
    used = select(func.sum(ProbeRow.gpu_seconds)).where(ProbeRow.finished_at.is_not(None))
    with reading(engine) as session:
        probes = session.execute(select(ProbeRow.state, count).group_by(ProbeRow.state))
        tasks = session.execute(
            select(TaskRow.kind, TaskRow.state, count).group_by(TaskRow.kind, TaskRow.state)
        )
        return StoredNumbers(
            jobs={
                **{("probe", state): number for state, number in probes},
                **{(kind, state): number for kind, state, number in tasks},
            },
            failures={
                str(failure): number
                for failure, number in session.execute(failed.group_by(ProbeRow.failure))
            },
            totals={
                "probe_gpu_seconds": float(session.scalar(used) or 0.0),
                **{
                    table.__tablename__: session.scalar(select(count).select_from(table)) or 0
                    for table in (PlanRow, MeasurementRow, SweepRow)
                },
            },
            newest_measurement=session.scalar(newest.limit(1)),
        )
