"""Ports of the planner to the outside world: the time, fresh ids."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """The present, in UTC, with its time zone."""
        ...


class IdFactory(Protocol):
    """Names new objects."""

    def new_id(self, prefix: str) -> str:
        """A name "prefix-..." that nothing else has; later names sort after earlier ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The outside world as `recommend` is given it."""

    clock: Clock
    ids: IdFactory
