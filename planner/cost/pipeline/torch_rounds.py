"""The rounds in which torch's lowering pass (`_add_send_recv`) comes to the actions of an order.

It goes round the ranks and gives each at most one action whose input has arrived.
Letters: A items of the orders, rank after rank; D inputs of one item; L places of stages on a rank.
Arrays of single actions (leaves) end in _l.
"""

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline.waves import waves

Rows = NDArray[np.int64]


def rounds(rank_A: Rows, before_A: Rows, source_DA: Rows, entries_A: Rows) -> Rows:
    """Round in which the pass comes to each item, (A,).

    An item comes after its rank's previous one and its inputs; lower ranks come first in a round.
    before_A, source_DA: the items that these are, -1 for none.
    entries_A: rounds that the rank spends on entries which torch puts before the item.
    Raises ValueError where items wait for each other in a circle.
    """
    needs_DA = np.concatenate([before_A[None], source_DA])
    later_DA = np.concatenate([1 + entries_A[None], rank_A[source_DA] > rank_A])
    round_A = np.full(len(rank_A) + 1, -1, dtype=np.int64)  # the last one is that of "none"
    for wave in waves(needs_DA):
        round_A[wave] = (round_A[needs_DA[:, wave]] + later_DA[:, wave]).max(axis=0)
    return round_A[:-1]


ACTIVE_STAGES = 3
"""Stages that `_add_unshard_reshard` keeps gathered."""


def entries_before(rank_A: Rows, item_l: Rows, stage_l: Rows) -> Rows:
    """Entries that torch puts before each item, (A,).

    They gather and release stages (`_add_unshard_reshard` keeps the next ACTIVE_STAGES distinct
    stages of a rank gathered) and reduce a stage's gradients after its last action
    (`_add_reduce_grad`).
    stage_l: no stage is on two ranks.
    """
    count = len(rank_A)
    end_A = np.cumsum(np.bincount(rank_A))[rank_A]
    place_l = _places(rank_A[item_l], stage_l)
    coming_LA = np.empty((int(place_l.max()) + 1, count), dtype=np.int64)
    soonest = np.tile(end_A, (ACTIVE_STAGES, 1))
    for place, coming_A in enumerate(coming_LA):
        coming_A[:] = count
        here = item_l[place_l == place]
        coming_A[here] = here
        coming_A[:] = np.minimum(np.minimum.accumulate(coming_A[::-1])[::-1], end_A)
        later = coming_A
        for k in range(ACTIVE_STAGES):
            soonest[k], later = np.minimum(soonest[k], later), np.maximum(soonest[k], later)
    entries_A = np.zeros(count, dtype=np.int64)
    first_A = np.diff(rank_A, prepend=-1) != 0
    for coming_A in coming_LA:
        wanted = (coming_A <= soonest[-1]) & (coming_A < end_A)
        entries_A += wanted ^ (np.append(False, wanted[:-1]) & ~first_A)
    last = np.full(int(stage_l.max()) + 1, -1, dtype=np.int64)
    last[stage_l] = item_l
    last = last[last >= 0]
    done = last[last + 1 < end_A[last]] + 1
    return entries_A + np.bincount(done, minlength=count)


def _places(rank_l: Rows, stage_l: Rows) -> Rows:
    """Each action's stage as a number among the stages of its rank."""
    rank_of = np.full(int(stage_l.max()) + 1, -1, dtype=np.int64)
    rank_of[stage_l] = rank_l
    order = np.argsort(rank_of, kind="stable")
    ranks = rank_of[order]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.searchsorted(ranks, ranks)
    return place[stage_l]
