"""Hosts that no run uses for a while, in SQL; every worker that shares a pool keeps off them."""

from collections.abc import Sequence

from sqlalchemy import delete, select

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import Store, plain_text, record_of
from planner.api.storage.records import QuarantinedHost
from planner.api.storage.tables import QuarantinedHostRow
from planner.api.storage.transactions import reading, writing
from planner.errors import NotFoundError

LONGEST_SENTENCE = 500


class SqlQuarantine(Store):
    """The hosts that are kept out, by pool."""

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
