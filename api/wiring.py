"""Chooses who answers the planner's ports: the system clock, random ids, a SQL store."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from api.identity import TimeOrderedIds
from planner.ports import Clock, IdFactory, Ports

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from api.settings import Settings
    from api.storage.idempotency import IdempotencyStore
    from api.storage.store import SqlStore


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """The present, in UTC."""
        return datetime.now(UTC)


@dataclass
class Wiring:
    """Everything outside the planner, made when first asked for."""

    settings: "Settings"
    clock: Clock
    ids: IdFactory

    @property
    def ports(self) -> Ports:
        """What the use cases are given."""
        return Ports(clock=self.clock, ids=self.ids)

    @cached_property
    def engine(self) -> "Engine":
        """The database of the settings, not yet checked. Raises SpecError for a wrong URL."""
        from api.storage.engine import make_engine, normalise_url

        return make_engine(normalise_url(self.settings.database_url))

    @cached_property
    def store(self) -> "SqlStore":
        """The store, on a database that is at the right revision. Raises StoreError."""
        from api.storage.migrate import ensure_current
        from api.storage.store import SqlStore

        ensure_current(self.engine)
        return SqlStore(self.engine)

    @cached_property
    def idempotency(self) -> "IdempotencyStore":
        """Kept answers, on the same database."""
        from api.storage.idempotency import IdempotencyStore

        return IdempotencyStore(self.store.engine, self.clock)


def wire(settings: "Settings | None" = None) -> Wiring:
    """The real outside world. Raises SpecError for a wrong setting."""
    from api.settings import load_settings

    return Wiring(settings=settings or load_settings(), clock=SystemClock(), ids=TimeOrderedIds())
