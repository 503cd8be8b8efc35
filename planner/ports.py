"""Ports of the planner to the outside world: the time, fresh ids, a second core."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")


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


class Both(Protocol):
    """Runs two pieces of work, neither of which reads what the other changes."""

    def __call__(
        self, first: Callable[[], FirstT], second: Callable[[], SecondT]
    ) -> tuple[FirstT, SecondT]:
        """Returns both results. Changes that the second makes may be lost: it may run in a copy."""
        ...


def in_turn(first: Callable[[], FirstT], second: Callable[[], SecondT]) -> tuple[FirstT, SecondT]:
    """One after the other."""
    return first(), second()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The outside world as `recommend` is given it."""

    clock: Clock
    ids: IdFactory
    both: Both = in_turn
