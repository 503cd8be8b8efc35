"""The order of a rank that holds both ends of a V.

They are stage `rank` on the way down and stage 2p - 1 - rank on the way up.
"""

from collections import Counter

from planner.schedules.base import Action, Item, Kind, OverlappedPair


class VOrder:
    """Appends actions of the two local stages, and counts their microbatches itself.

    Chunk 0 is the stage on the way down, chunk 1 the one on the way up.
    """

    def __init__(self, rank: int, pp: int) -> None:
        self.actions: list[Item] = []
        self._stages = (rank, 2 * pp - 1 - rank)
        self._done: Counter[tuple[int, Kind]] = Counter()
        self._owed: list[tuple[int, int]] = []

    def add(self, chunk: int, kind: Kind) -> None:
        """Appends the next microbatch of this kind on this chunk.

        B counts as I and W; after I its W is owed.
        """
        action = self._next(chunk, kind)
        self.actions.append(action)
        if kind == "I":
            self._owed.append((action.stage, action.microbatch))

    def add_overlap(self, forward_chunk: int, backward_chunk: int) -> None:
        """Appends an overlapped pair: the next forward of one chunk, the next B of the other."""
        self.actions.append(
            OverlappedPair(self._next(forward_chunk, "F"), self._next(backward_chunk, "B"))
        )

    def _next(self, chunk: int, kind: Kind) -> Action:
        key: tuple[int, Kind] = (chunk, "I" if kind == "B" else kind)
        microbatch = self._done[key]
        self._done[key] += 1
        return Action(self._stages[chunk], kind, microbatch)

    def add_owed(self) -> None:
        """Appends the W that has been owed longest, or nothing."""
        if self._owed:
            stage, microbatch = self._owed.pop(0)
            self.actions.append(Action(stage, "W", microbatch))

    def add_owed_of(self, chunk: int) -> bool:
        """Appends the W of this chunk that has been owed longest; False where none is owed."""
        for index, (stage, microbatch) in enumerate(self._owed):
            if stage == self._stages[chunk]:
                del self._owed[index]
                self.actions.append(Action(stage, "W", microbatch))
                return True
        return False

    def count(self, chunk: int, kind: Kind) -> int:
        """How many actions of this kind the chunk has."""
        return self._done[(chunk, kind)]
