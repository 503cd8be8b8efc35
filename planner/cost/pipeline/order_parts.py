"""An order of compute as columns: items, their single actions, and the transfers between ranks.

Letters as in `lowering`, which adds the waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, ActionColumns

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
RankColumns = Sequence[ActionColumns]
"""The order of a pipeline, a rank an entry."""


@dataclass(frozen=True, slots=True)
class OrderParts:
    """Columns of the items (A), of their single actions (leaves) and of the transfers (T).

    Leaf arrays end in _l.
    first_l: whether the leaf begins an item.
    """

    num_ranks: int
    num_stages: int
    rank_A: Rows
    before_A: Rows
    after_A: Rows
    item_l: Rows
    first_l: Mask
    stage_l: Rows
    kind_l: Rows
    source_l: Rows
    sender_T: Rows
    receiver_T: Rows
    leaf_T: Rows

    @classmethod
    def of(cls, order: RankColumns) -> "OrderParts":
        stage_l, kind_l, microbatch_l = (
            np.concatenate(column)
            for column in zip(
                *((rank.stage_A, rank.kind_A, rank.microbatch_A) for rank in order), strict=True
            )
        )
        first_l = ~np.concatenate(
            [
                np.zeros(len(rank.stage_A), dtype=np.bool_)
                if rank.joined_A is None
                else rank.joined_A
                for rank in order
            ]
        )
        item_l = np.cumsum(first_l) - 1
        rank_l = np.repeat(np.arange(len(order)), [len(rank.stage_A) for rank in order])
        num_stages = 1 + int(stage_l.max())
        source_l = _sources(item_l, stage_l, kind_l, microbatch_l)
        rank_A, index = rank_l[first_l], np.arange(item_l[-1] + 1)
        first_A = np.diff(rank_A, prepend=-1) != 0
        leaf_T = np.flatnonzero((source_l >= 0) & (rank_A[source_l] != rank_l))
        return cls(
            num_ranks=len(order),
            num_stages=num_stages,
            rank_A=rank_A,
            before_A=np.where(first_A, -1, index - 1),
            after_A=np.where(np.append(first_A[1:], True), -1, index + 1),
            item_l=item_l,
            first_l=first_l,
            stage_l=stage_l,
            kind_l=kind_l,
            source_l=source_l,
            sender_T=source_l[leaf_T],
            receiver_T=item_l[leaf_T],
            leaf_T=leaf_T,
        )

    @property
    def node_T(self) -> Rows:
        return len(self.rank_A) + np.arange(len(self.sender_T))

    @property
    def from_T(self) -> Rows:
        return self.rank_A[self.sender_T]

    @property
    def to_T(self) -> Rows:
        return self.rank_A[self.receiver_T]


def starts(sizes: Rows) -> Rows:
    return np.cumsum(sizes) - sizes


def _sources(item_l: Rows, stage_l: Rows, kind_l: Rows, microbatch_l: Rows) -> Rows:
    """Item whose output each action takes from another stage, -1 for none."""
    shape = (2, int(stage_l.max()) + 3, int(microbatch_l.max()) + 1)
    where = np.full(shape, -1, dtype=np.int64)
    forward, backward = kind_l == FORWARD, (kind_l == INPUT_GRAD) | (kind_l == BACKWARD)
    where[0, stage_l[forward] + 1, microbatch_l[forward]] = item_l[forward]
    where[1, stage_l[backward] + 1, microbatch_l[backward]] = item_l[backward]
    needs_input = (forward & (stage_l > 0)) | (backward & (stage_l < stage_l.max()))
    found = np.where(forward, where[0, stage_l, microbatch_l], where[1, stage_l + 2, microbatch_l])
    if np.any(needs_input & (found < 0)):
        raise ValueError("an action waits for an input that no stage computes")
    return np.where(needs_input, found, -1)
