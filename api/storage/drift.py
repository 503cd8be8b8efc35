"""Histories of measured layouts in SQL, and the changes that were found in them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select

from planner.api.storage.common import Store, plain_text, record_of, values_of
from planner.api.storage.learning import believed_by
from planner.api.storage.records import DriftFinding, HistoryRow
from planner.api.storage.tables import DriftRow, MeasurementRow, ProbeRow
from planner.api.storage.transactions import reading, writing

MOST_READINGS = 50_000  # newest ones of the questions of a sweep


class SqlDriftStore(Store):
    """Repeated measurements, and since when they are different."""

    def history(self, measured: Sequence[str], pool: str, owner: str) -> Sequence[HistoryRow]:
        """All runs of the questions that these measurements answer, on this pool, oldest first.

        Only runs of layouts themselves that count for this owner.
        """
        table, asked = MeasurementRow, select(MeasurementRow.job_hash)
        numbers = table.body["row"]["measured"]
        query = (
            select(
                table.id, table.created_at, table.job_hash, table.layout_hash, table.software_hash,
                table.model, table.trainer, table.gpu, table.num_gpus, table.layout,
                table.step_seconds, table.shared, numbers["software"].label("software"),
                numbers["hosts"].label("hosts"), ProbeRow.plan_id,
                ProbeRow.request["trainer"].as_string().label("program"),
            )
            .join(ProbeRow, ProbeRow.measurement_id == table.id)
            .where(
                table.job_hash.in_(asked.where(table.id.in_(measured))),
                ProbeRow.pool == plain_text(pool),
                table.status == "ok",
                table.rung == "probed",
                table.step_seconds > 0,
                *believed_by(owner),
            )
            .order_by(table.created_at.desc(), table.id.desc())
            .limit(MOST_READINGS)
        )  # fmt: skip
        with reading(self.engine) as session:
            return [_history(row) for row in reversed(session.execute(query).all())]

    def replace(self, sweep_id: str, found: Sequence[DriftFinding]) -> None:
        """From now on these are what the sweep has found."""
        with writing(self.engine) as session:
            session.execute(delete(DriftRow).where(DriftRow.sweep_id == sweep_id))
            for one in found:
                values = values_of(one)
                texts = ("trainer", "gpu", "owner", "statement")
                plain = {name: plain_text(values[name]) for name in texts}
                session.add(DriftRow(sweep_id=sweep_id, **{**values, **plain}))


def _history(row: Any) -> HistoryRow:
    return record_of(
        HistoryRow,
        row,
        software=row.software or {},
        hosts=tuple(row.hosts or ()),
        run=row.plan_id or row.id,
        program=row.program or "",
    )
