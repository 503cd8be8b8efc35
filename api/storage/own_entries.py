"""Models, GPUs and clusters of the users' own, in SQL, for SQLite and PostgreSQL alike."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from planner.api.identity import asker
from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import Store, flush_new, plain_text, record_of
from planner.api.storage.tables import CatalogEntryRow
from planner.api.storage.transactions import reading, writing


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEntry:
    """One version of one entry. It never changes.

    kind: models, gpus or clusters. spec: as a job writes it. asked_by: whose it is.
    """

    kind: str
    name: str
    version: int
    created_at: datetime
    asked_by: str | None
    spec: dict[str, Any]


class SqlOwnEntries(Store):
    """Keeps the entries, each in versions 1, 2, ... All methods raise StoreError."""

    def add(self, kind: str, name: str, spec: dict[str, Any]) -> OwnEntry:
        """A new version, or the newest one where it says the same.

        Raises ForbiddenError for somebody else's name, ConflictError where another version was
        stored in this very moment.
        """
        who = asker()
        with writing(self.engine) as session:
            newest = _newest(session, kind, name)
            if newest is not None:
                who.check_owner("entry", name, newest.asked_by)
                if newest.spec == spec:
                    return record_of(OwnEntry, newest)
            version = 1 if newest is None else newest.version + 1
            row = CatalogEntryRow(
                kind=kind,
                name=plain_text(name),
                version=version,
                created_at=database_time(),
                asked_by=plain_text(who.name),
                spec=spec,
            )
            session.add(row)
            flush_new(session, f"version {version} of {name}")
            note(session, who.name, "entry.added", f"{kind}/{name}@{version}")
            session.refresh(row)
            return record_of(OwnEntry, row)

    def find(self, kind: str, name: str, version: int | None = None) -> OwnEntry | None:
        """One version, or the newest; None where there is none."""
        with reading(self.engine) as session:
            if version is None:
                row = _newest(session, kind, name)
            else:
                row = session.get(CatalogEntryRow, (kind, plain_text(name), version))
            return None if row is None else record_of(OwnEntry, row)

    def list(self, kind: str) -> "list[OwnEntry]":
        """The newest version of each name, by name."""
        table = CatalogEntryRow
        query = select(table).where(table.kind == kind).order_by(table.name, table.version)
        with reading(self.engine) as session:
            newest = {row.name: record_of(OwnEntry, row) for row in session.scalars(query)}
        return list(newest.values())


def _newest(session: Session, kind: str, name: str) -> CatalogEntryRow | None:
    table = CatalogEntryRow
    query = select(table).where(table.kind == kind, table.name == plain_text(name))
    return session.scalars(query.order_by(table.version.desc()).limit(1)).first()
