"""Work that may run beside the caller's, on another core.

The planner starts no process. Who calls it may hand in something that does (`OtherCore`); without
it both pieces run one after the other, with the same results.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")
OtherT = TypeVar("OtherT")


class Piece(Protocol):
    """Work that was started."""

    def result(self) -> object:
        """Waits for the work, and returns what it returned."""
        ...

    def stop(self) -> None:
        """Nobody wants the result any more."""
        ...


class OtherCore(Protocol):
    """Runs work beside the caller's."""

    def start(self, work: Callable[[], object]) -> Piece:
        """Starts the work on a copy of all that it reads. What it changes stays in that copy."""
        ...


def both(
    beside: OtherCore | None, first: Callable[[], ResultT], second: Callable[[], OtherT]
) -> tuple[ResultT, OtherT]:
    """The results of two pieces of work, neither of which reads what the other changes.

    Only what they return may be used: the second may have run in a copy.
    """
    if beside is None:
        return first(), second()
    found: list[OtherT] = []
    piece = beside.start(second)
    try:
        mine = first()
    except BaseException:
        piece.stop()
        raise
    found.append(piece.result())  # type: ignore[arg-type]  # what `second` returned
    return mine, found[0]
