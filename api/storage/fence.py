"""Fences around jobs of a queue: only the owner who claimed one last may write it."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, update
from sqlalchemy.orm import Session

from planner.api.storage.clock import database_time
from planner.api.storage.common import row_of
from planner.api.storage.job_records import RUNNING, JobRecord
from planner.api.storage.tables import LeasedRow
from planner.errors import ConflictError


@dataclass(frozen=True, slots=True)
class Fence:
    """Access to one table whose rows are written under the fencing token of their newest claim.

    what: the name of its jobs in messages.
    where: how a user lists them.
    """

    table: type[LeasedRow]
    what: str
    where: str

    @property
    def expired(self) -> tuple[ColumnElement[bool], ...]:
        """Conditions on a running job whose lease has expired."""
        return self.table.state == RUNNING, self.table.lease_until < database_time()

    def row(self, session: Session, job_id: str, *, lock: bool = False) -> LeasedRow:
        """The row of a job. Raises NotFoundError."""
        remedy = f"{self.where} lists them"
        return row_of(session, self.table, job_id, self.what, remedy, lock=lock)

    def write(
        self, session: Session, claimed: JobRecord, values: dict[str, Any], *, expired: bool = False
    ) -> Any:
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
        row = self.row(session, claimed.id)
        if written is None:
            raise self._lost(row, claimed)
        return row

    def _lost(self, row: LeasedRow, claimed: JobRecord) -> ConflictError:
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
