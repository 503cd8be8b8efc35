"""Findings of sweeps, in SQL: hosts that no run uses for a while, and changes of step times."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import Store, plain_text, record_of, values_of
from planner.api.storage.learning import believed_by
from planner.api.storage.records import DriftFinding, HistoryRow, QuarantinedHost
from planner.api.storage.tables import DriftRow, MeasurementRow, ProbeRow, QuarantinedHostRow
from planner.api.storage.transactions import reading, writing
from planner.errors import NotFoundError

LONGEST_SENTENCE = 500
MOST_READINGS = 50_000  # newest ones of the questions of a sweep


class SqlQuarantine(Store):
    """The hosts that are kept out, by pool; every worker that shares a pool keeps off them."""

    def add(
        self, pool: str, host: str, *, seconds: float, found_by: str, evidence: Sequence[str]
    ) -> None:
        row = QuarantinedHostRow(
            pool=plain_text(pool),
            host=plain_text(host),
            since=database_time(),
            until=database_time(seconds),
            found_by=found_by,
            evidence=[plain_text(one, LONGEST_SENTENCE) for one in evidence],
        )
        with writing(self.engine) as session:
            session.merge(row)
            note(session, None, "host.quarantined", found_by, detail=f"{host} of {pool}")

    def active(self, pool: str | None = None) -> tuple[QuarantinedHost, ...]:
        """Hosts that are kept out now, of one pool or of all, by name."""
        table = QuarantinedHostRow
        query = select(table).where(table.until > database_time())
        if pool is not None:
            query = query.where(table.pool == plain_text(pool))
        with reading(self.engine) as session:
            return tuple(
                record_of(QuarantinedHost, row, evidence=tuple(row.evidence))
                for row in session.scalars(query.order_by(table.pool, table.host))
            )

    def release(self, host: str, by: str | None, pool: str | None = None) -> int:
        """Lets a host in again, in one pool or in all; returns in how many.

        Raises NotFoundError.
        """
        table = QuarantinedHostRow
        query = delete(table).where(table.host == plain_text(host))
        if pool is not None:
            query = query.where(table.pool == plain_text(pool))
        with writing(self.engine) as session:
            released = session.scalars(query.returning(table.pool)).all()
            if not released:
                raise NotFoundError(
                    f"no host {host[:100]!r} is kept out; `planner-cli sweep hosts` lists them"
                )
            for name in released:
                note(session, by, "host.released", plain_text(host), detail=name)
        return len(released)


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
