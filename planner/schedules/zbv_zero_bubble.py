"""ZBV: two stages per rank in a V.

The last forward and the first backward of a microbatch are on one rank.
"""

import numpy as np

from planner.schedules.actions import ActionColumns
from planner.schedules.base import (
    Exposed,
    FloatLike,
    Floats,
    IntLike,
    Schedule,
    two_stages_per_rank,
)
from planner.schedules.v_shape import VOrder


class ZBVZeroBubble(Schedule):
    """ZB-V: ZB-2p's bubble with 1F1B's memory while f, i and w are alike.

    Source: Qi et al. 2023, section 6.
    """

    name = "ZBVZeroBubble"
    single_stage = False
    splits_backward = True
    runtimes = frozenset({"torch"})
    search_order = 30
    v_shaped = True
    conditions = (two_stages_per_rank(name),)  # and any number of microbatches

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """As ScheduleZBVZeroBubble of torch.

        The order is built for at least 2p - 1 microbatches, and those beyond m are left out.
        """
        count = max(2 * pp - 1, m)
        order = VOrder(rank, pp)
        _warm_up(order, rank, pp)
        while order.count(1, "F") < order.count(0, "F") or order.count(0, "F") < count:
            if order.count(0, "F") < count:
                order.add(0, "F")
            for chunk in (0, 1):
                if chunk == 1:
                    order.add(1, "F")
                order.add(chunk, "I")
                order.add_owed()
        _cool_down(order, rank, pp)
        return order.columns(m)

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """Half of the longest of several chains; from 2p - 1 microbatches on they are

            2 (p - 1)(i - w)
            (p - 1) i
            (2p - 3) f - (p - 2) i
            (p - 2) w + max(f, i)
            (2p - 3) f + i - 2 (p - 1) w
            (p - 1) f

        Ranks end together, so the stagger of their starts remains, (p - 1) f / 2 where f = i = w.
        The bubble is zero only without a common end.
        With fewer microbatches they are

            2 max(0, p - m) f + 2 (p - 1) i - 2 max(0, m - p) w
            (2p - 1 - m)(f + i)
            (p - 1) max(f, i)
            (2p - m) max(f, i) + (m - p - 1) w      for m > p

        Exact for equal stages, w <= f <= i and m >= 2p - 1. Below, the step is up to a tenth short.
        Source: Qi et al. 2023, section 6; chains found in simulations.
        """
        others, short = pp - 1, np.maximum(0, 2 * pp - 1 - m)
        back = 2 * (
            np.maximum(0, pp - m) * f + others * i - np.maximum(0, np.minimum(others, m - pp)) * w
        )
        mixed = np.where(
            short <= pp - 2, (1 + short) * np.maximum(f, i) + (pp - 2 - short) * w, 0.0
        )
        chains = np.maximum(
            np.maximum(back, mixed), np.maximum(short * (f + i), others * np.maximum(f, i))
        )
        full = np.maximum((2 * pp - 3) * f - (pp - 2) * i, (2 * pp - 3) * f + i - 2 * others * w)
        chains = np.where(short == 0, np.maximum(chains, full), chains)
        return np.asarray(np.where(np.asarray(pp) > 1, chains / 2.0, 0.0), dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Up to p on every rank from 2p - 1 microbatches on. Source: Qi et al. 2023, section 6."""
        down, up = (np.minimum(m, 2 * pp - 1 - rank), np.minimum(m, rank + 1))
        return np.asarray((down + up) / 2.0, dtype=np.float64)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """The usual, and the end of the cool-down, from 2p - 1 microbatches on.

        There 2 rank + 1 chunks wait for W and p - 1 - rank chunks for I.
        """
        usual = super().peak_candidates(rank, pp, v, m)
        enough = np.where(np.asarray(m) >= 2 * pp - 1, 0.5, 0.0)
        return (
            *usual,
            (np.asarray(enough * (pp - 1.0 - rank)), np.asarray(enough * (2.0 * rank + 1.0))),
        )

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """6 p - 8: the drain crosses the V three times.

        Found in simulations with m >= 2p - 1 and i - w > i / 2; fewer elsewhere.
        Where a rank waits for its sends: 2 m + 3 p - 3, found in simulations.
        """
        hops = 6.0 * pp - 8.0 + 0.0 * m
        if exposed not in ("none", "receive"):
            hops = np.maximum(hops, 2.0 * m + 3.0 * pp - 3.0)
        return np.asarray(np.where(np.asarray(pp) > 1, hops, 0.0), dtype=np.float64)


def _warm_up(order: VOrder, rank: int, pp: int) -> None:
    for _ in range(2 * (pp - rank) - 1):
        order.add(0, "F")
    for _ in range(rank):
        order.add(1, "F")
        order.add(0, "F")
    for _ in range(pp - rank):
        order.add(1, "F")
        order.add(1, "I")
        order.add_owed()


def _cool_down(order: VOrder, rank: int, pp: int) -> None:
    for _ in range(rank):
        order.add(0, "I")
        order.add(1, "I")
    for _ in range(pp - rank):
        order.add(0, "I")
        order.add_owed_of(0)
    while order.add_owed_of(1):
        pass
    while order.add_owed_of(0):
        pass
