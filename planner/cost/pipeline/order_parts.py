"""Orders of compute as columns: items, their single actions, and the transfers between ranks.

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
"""The order of one pipeline, a rank an entry."""
"""The order of one pipeline, a rank an entry."""


@dataclass(frozen=True, slots=True)
class OrderParts:
    """Columns of the items (A), of their single actions (leaves) and of the transfers (T).

    Leaf arrays end in _l.
    stage_l: in its pipeline; `first_stage_P` is added to number stages through all pipelines.
    first_l: whether the leaf begins an item.
    """

    ranks_P: Rows
    stages_P: Rows
    pipeline_A: Rows
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
    def of(cls, orders: Sequence[RankColumns]) -> "OrderParts":
        columns = [rank for order in orders for rank in order]
        ranks_P = np.array([len(order) for order in orders])
        lengths = np.array([len(rank.stage_A) for rank in columns])
        stage_l, kind_l, microbatch_l = (
            np.concatenate(column)
            for column in zip(
                *((rank.stage_A, rank.kind_A, rank.microbatch_A) for rank in columns), strict=True
            )
        )
        first_l = ~np.concatenate(
            [
                np.zeros(len(rank.stage_A), dtype=np.bool_)
                if rank.joined_A is None
                else rank.joined_A
                for rank in columns
            ]
        )
        item_l = np.cumsum(first_l) - 1
        rank_l = np.repeat(np.arange(len(columns)), lengths)
        pipeline_l = np.repeat(np.arange(len(orders)), ranks_P)[rank_l]
        stages_P = 1 + np.maximum.reduceat(
            stage_l, np.searchsorted(pipeline_l, np.arange(len(orders)))
        )
        source_l = _sources(
            item_l,
            stage_l + starts(stages_P)[pipeline_l],
            kind_l,
            microbatch_l,
            ends=(stage_l == 0, stage_l == stages_P[pipeline_l] - 1),
        )
        rank_A, index = rank_l[first_l], np.arange(item_l[-1] + 1)
        first_A = np.diff(rank_A, prepend=-1) != 0
        leaf_T = np.flatnonzero((source_l >= 0) & (rank_A[source_l] != rank_l))
        return cls(
            ranks_P=ranks_P,
            stages_P=stages_P,
            pipeline_A=pipeline_l[first_l],
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


def _sources(
    item_l: Rows, stage_l: Rows, kind_l: Rows, microbatch_l: Rows, ends: tuple[Mask, Mask]
) -> Rows:
    """Item whose output each action takes from another stage, -1 for none.

    stage_l: numbered through all pipelines.
    ends: whether the stage is its pipeline's first one, and last one.
    """
    first_l, last_l = ends
    shape = (2, int(stage_l.max()) + 3, int(microbatch_l.max()) + 1)
    where = np.full(shape, -1, dtype=np.int64)
    forward, backward = kind_l == FORWARD, (kind_l == INPUT_GRAD) | (kind_l == BACKWARD)
    where[0, stage_l[forward] + 1, microbatch_l[forward]] = item_l[forward]
    where[1, stage_l[backward] + 1, microbatch_l[backward]] = item_l[backward]
    needs_input = (forward & ~first_l) | (backward & ~last_l)
    found = np.where(forward, where[0, stage_l, microbatch_l], where[1, stage_l + 2, microbatch_l])
    if np.any(needs_input & (found < 0)):
        raise ValueError("an action waits for an input that no stage computes")
    return np.where(needs_input, found, -1)
