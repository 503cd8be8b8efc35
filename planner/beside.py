"""Work that may run beside the caller's, on another core.

The planner starts no process. Who calls it may hand in something that does (`OtherCore`); without
it both pieces run one after the other, with the same results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, TypeVarTuple

ResultT = TypeVar("ResultT")
OtherT = TypeVar("OtherT")
StateT = TypeVar("StateT")
AskedT = TypeVarTuple("AskedT")


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

    def partner(self, state: object) -> "Partner | None":
        """What works on a copy of this state, or on the state itself; None if nothing can."""
        ...


class Partner(Protocol):
    """A state on the other core, which keeps what was done to it."""

    def start(self, work: Callable[..., object], *asked: object) -> Piece:
        """Starts `work(state, *asked)`, a function of a class or a module."""
        ...

    def stop(self) -> None:
        """Nobody asks any more."""
        ...


@dataclass(frozen=True, slots=True)
class Sides(Generic[StateT]):
    """States that are worked on side by side, the last one by a partner if there is one.

    The same is asked of each, and none reads what is done to another.
    """

    states: list[StateT]
    partner: Partner | None

    def each(self, work: Callable[[StateT, *AskedT], ResultT], *asked: *AskedT) -> list[ResultT]:
        """What `work(state, *asked)` returns of each state."""
        if self.partner is None:
            return [work(state, *asked) for state in self.states]
        piece = self.partner.start(work, *asked)
        try:
            found = [work(state, *asked) for state in self.states[:-1]]
        except BaseException:
            piece.stop()
            raise
        return [*found, piece.result()]  # type: ignore[list-item]  # what `work` returned


@contextmanager
def sides(beside: OtherCore | None, states: list[StateT]) -> Iterator[Sides[StateT]]:
    """The states side by side; each may change itself, and only what it returns may be used."""
    partner = None if beside is None or len(states) == 1 else beside.partner(states[-1])
    try:
        yield Sides(states, partner)
    finally:
        if partner is not None:
            partner.stop()


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
