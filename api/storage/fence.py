"""Tables whose rows only the owner who claimed one last may write."""

from typing import Any, TypeVar

from sqlalchemy import ColumnElement, update
from sqlalchemy.orm import Session

from planner.api.storage.clock import database_time
from planner.api.storage.common import TableStore
from planner.api.storage.job_records import RUNNING, JobRecord
from planner.errors import ConflictError

Record = TypeVar("Record", bound=JobRecord)


class FencedStore(TableStore[Record]):
    """Jobs of a queue, each written under the fencing token of its newest claim."""

    @property
    def has_expired(self) -> tuple[ColumnElement[bool], ...]:
        """Conditions on a running job whose lease has expired."""
        return self.table.state == RUNNING, self.table.lease_until < database_time()

    def write(
        self, session: Session, claimed: Record, values: dict[str, Any], *, expired: bool = False
    ) -> Record:
        """Locks the row and sets these values. Raises ConflictError where the lease was lost.

        expired: whether a lease that has expired, and was not taken over, will do.
        """
        table = self.table
        ours = update(table).where(
            table.id == claimed.id,
            table.state == RUNNING,
            table.fencing_token == claimed.fencing_token,
        )
        if not expired:
            ours = ours.where(table.lease_until >= database_time())
        setting = ours.values(**values).returning(table.id)
        setting = setting.execution_options(synchronize_session=False)
        written = session.execute(setting).first()
        session.expire_all()
        row: Record = self.row(session, claimed.id)
        if written is None:
            raise self._lost(row, claimed)
        return row

    def _lost(self, row: Record, claimed: Record) -> ConflictError:
        owner = row.owner or "nobody"
        if row.state == RUNNING and row.fencing_token == claimed.fencing_token:
            return ConflictError(
                f"{self.what} {claimed.id}: the lease of {claimed.owner} was lost, it ended at "
                f"{row.lease_until:%H:%M:%S} UTC; what it did since is not stored"
            )
        return ConflictError(
            f"{self.what} {claimed.id} is {row.state}, owned by {owner}: the lease of "
            f"{claimed.owner} was lost"
        )
