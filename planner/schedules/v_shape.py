"""The order of a rank that holds both ends of a V.

They are stage `rank` on the way down and stage 2p - 1 - rank on the way up.
"""

from collections import Counter

import numpy as np

from planner.schedules.actions import KINDS, WEIGHT_GRAD, ActionColumns, Kind


class VOrder:
    """Appends actions of the two local stages, and counts their microbatches itself.

    Chunk 0 is the stage on the way down, chunk 1 the one on the way up.
    """

    def __init__(self, rank: int, pp: int) -> None:
        self._actions: list[tuple[int, int, int, bool]] = []
        self._stages = (rank, 2 * pp - 1 - rank)
        self._done: Counter[tuple[int, Kind]] = Counter()
        self._owed: list[tuple[int, int]] = []

    def add(self, chunk: int, kind: Kind, *, joined: bool = False) -> None:
        """Appends the next microbatch of this kind on this chunk.

        B counts as I and W; after I its W is owed.
        joined: overlapped with the action before it.
        """
        key: tuple[int, Kind] = (chunk, "I" if kind == "B" else kind)
        microbatch = self._done[key]
        self._done[key] += 1
        self._actions.append((self._stages[chunk], KINDS.index(kind), microbatch, joined))
        if kind == "I":
            self._owed.append((self._stages[chunk], microbatch))

    def add_overlap(self, forward_chunk: int, backward_chunk: int) -> None:
        """Appends an overlapped pair: the next forward of one chunk, the next B of the other."""
        self.add(forward_chunk, "F")
        self.add(backward_chunk, "B", joined=True)

    def add_owed(self) -> None:
        """Appends the W that has been owed longest, or nothing."""
        if self._owed:
            self._weight_grad(0)

    def add_owed_of(self, chunk: int) -> bool:
        """Appends the W of this chunk that has been owed longest; False where none is owed."""
        for index, (stage, _) in enumerate(self._owed):
            if stage == self._stages[chunk]:
                self._weight_grad(index)
                return True
        return False

    def _weight_grad(self, index: int) -> None:
        stage, microbatch = self._owed.pop(index)
        self._actions.append((stage, WEIGHT_GRAD, microbatch, False))

    def columns(self, m: int | None = None) -> ActionColumns:
        """All that was appended; with a number, only for the microbatches below it."""
        stage_A, kind_A, microbatch_A, joined_A = np.array(self._actions, dtype=np.int64).T
        order = ActionColumns(
            stage_A, kind_A, microbatch_A, joined_A > 0 if joined_A.any() else None
        )
        return order if m is None else order.take(microbatch_A < m)

    def count(self, chunk: int, kind: Kind) -> int:
        return self._done[(chunk, kind)]
