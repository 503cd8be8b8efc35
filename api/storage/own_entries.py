"""Models, GPUs and clusters of the users' own, in SQL, for SQLite and PostgreSQL alike."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from planner.api.identity import asker
from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import Store, flush_new, plain_text
from planner.api.storage.tables import OwnEntry
from planner.api.storage.transactions import reading, writing


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
                    return newest
            version = 1 if newest is None else newest.version + 1
            row = OwnEntry(
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
            return row

    def find(self, kind: str, name: str, version: int | None = None) -> OwnEntry | None:
        """One version, or the newest; None where there is none."""
        with reading(self.engine) as session:
            if version is None:
                row = _newest(session, kind, name)
            else:
                row = session.get(OwnEntry, (kind, plain_text(name), version))
            return row

    def list(self, kind: str) -> "list[OwnEntry]":
        """The newest version of each name, by name."""
        table = OwnEntry
        query = select(table).where(table.kind == kind).order_by(table.name, table.version)
        with reading(self.engine) as session:
            newest = {entry.name: entry for entry in session.scalars(query)}
        return list(newest.values())


def _newest(session: Session, kind: str, name: str) -> OwnEntry | None:
    table = OwnEntry
    query = select(table).where(table.kind == kind, table.name == plain_text(name))
    return session.scalars(query.order_by(table.version.desc()).limit(1)).first()
