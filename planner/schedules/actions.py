"""Pipeline actions: one by one, as PyTorch prints them, and as columns for orders of thousands.

A: actions of one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["F", "I", "W", "B"]
KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")
"""Their codes in columns are their places here."""
FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD = range(4)
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Action(NamedTuple):
    """One piece of compute. "2F0", as PyTorch prints it, is stage 2's forward of microbatch 0.

    kind: F forward, I gradient of the input, W gradient of the weights, B full backward (I and W in
        one).
    It is a NamedTuple because an order has thousands, and a frozen dataclass takes four times as
    long to build.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class OverlappedPair(NamedTuple):
    """A forward and a full backward of two microbatches that run as one.

    Each communicates under the other's compute. The pair starts when both inputs are there, and
    sends both outputs when it has ended, as torch's OVERLAP_F_B does.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Item = Action | OverlappedPair
RankOrder = tuple[Item, ...]
Order = tuple[RankOrder, ...]


def leaves(order: RankOrder) -> tuple[Action, ...]:
    """The order's actions one by one, the two of an overlapped pair as forward, backward."""
    return tuple(
        action
        for item in order
        for action in (item if isinstance(item, OverlappedPair) else (item,))
    )


def to_csv(actions: Order) -> str:
    """PyTorch's schedule CSV: a line per pipeline rank, actions in order ("0F0,0F1,0B0,...").

    `_PipelineScheduleRuntime._load_csv(file, format="compute_only")` reads the file; torch adds
    sends, receives and unshards itself.
    """
    return "".join(f"{','.join(map(str, rank))}\n" for rank in actions)


@dataclass(frozen=True, slots=True, eq=False)
class ActionColumns:
    """The actions of one rank, first to last, (A,). Those of a pair are forward, then backward.

    kind_A: places in KINDS.
    joined_A: whether the action is the backward of an overlapped pair, whose forward comes before
        it. None where there are no pairs.
    """

    stage_A: Ints
    kind_A: Ints
    microbatch_A: Ints
    joined_A: Bools | None = None

    @classmethod
    def of(cls, order: RankOrder) -> "ActionColumns":
        singles = leaves(order)
        stages, kinds, microbatches = zip(*singles, strict=True) if singles else ((), (), ())
        joined_A = None
        if len(singles) > len(order):
            joined_A = np.array([x for item in order for x in _JOINED[type(item)]], dtype=np.bool_)
        return cls(
            np.array(stages, dtype=np.int64),
            np.array([_CODES[kind] for kind in kinds], dtype=np.int64),
            np.array(microbatches, dtype=np.int64),
            joined_A,
        )

    def take(self, kept_A: Bools) -> "ActionColumns":
        """Some of the actions, both or neither of a pair."""
        return ActionColumns(
            self.stage_A[kept_A],
            self.kind_A[kept_A],
            self.microbatch_A[kept_A],
            None if self.joined_A is None else self.joined_A[kept_A],
        )

    def items(self) -> RankOrder:
        singles = [
            Action(stage, KINDS[kind], microbatch)
            for stage, kind, microbatch in zip(
                self.stage_A.tolist(), self.kind_A.tolist(), self.microbatch_A.tolist(), strict=True
            )
        ]
        if self.joined_A is None:
            return tuple(singles)
        starts = np.flatnonzero(~self.joined_A).tolist()
        ends = [*starts[1:], len(singles)]
        return tuple(
            OverlappedPair(*singles[start:end]) if end - start > 1 else singles[start]
            for start, end in zip(starts, ends, strict=True)
        )


_CODES = {kind: code for code, kind in enumerate(KINDS)}
_JOINED: dict[type, tuple[bool, ...]] = {Action: (False,), OverlappedPair: (False, True)}


def as_columns(order: Iterable[RankOrder | ActionColumns]) -> tuple[ActionColumns, ...]:
    return tuple(
        rank if isinstance(rank, ActionColumns) else ActionColumns.of(rank) for rank in order
    )
