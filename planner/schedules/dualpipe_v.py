"""DualPipeV: DeepSeek's DualPipe cut in half.

A V of two stages per rank, whose F and B of two microbatches pair up.
"""

import numpy as np

from planner.schedules.actions import ActionColumns
from planner.schedules.base import (
    Exposed,
    FloatLike,
    Floats,
    IntLike,
    Schedule,
    ScheduleRule,
    two_stages_per_rank,
)
from planner.schedules.v_shape import VOrder


class DualPipeV(Schedule):
    """DualPipe's "cut-in-half".

    The steady phase is overlapped pairs. What communication they hide depends on durations, not on
    the order.
    Sources: DeepSeek-V3 report, section 3.2.1; github.com/deepseek-ai/DualPipe; Sea AI Lab.
    """

    name = "DualPipeV"
    single_stage = False
    splits_backward = True
    runtimes = frozenset({"torch"})
    search_order = 50
    v_shaped = True
    conditions = (
        two_stages_per_rank(name),
        ScheduleRule(  # torch raises ValueError with fewer
            field="micro_batch_size",
            rule="DualPipeV needs at least as many microbatches as stages: {m} < 2 x pp={pp}",
            remedy="lower micro_batch_size, dp or pp until there are 2 pp microbatches, or use "
            "ZBVZeroBubble",
            holds=lambda pp, v, m: m >= 2 * pp,
        ),
    )

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """As ScheduleDualPipeV of torch, its eight steps in order."""
        order, beyond = VOrder(rank, pp), pp - rank - 1
        for _ in range(2 * beyond):
            order.add(0, "F")
        for _ in range(rank + 1):
            order.add(0, "F")
            order.add(1, "F")
        for _ in range(beyond):
            order.add(1, "I")
            order.add_owed()
            order.add(1, "F")
        for turn in range(m - 2 * pp + rank + 1):
            if turn == 0 and beyond == 0:
                order.add(0, "F")
                order.add(1, "B")
            else:
                order.add_overlap(0, 1)
            order.add_overlap(1, 0)
        for _ in range(beyond):
            order.add(1, "B")
            order.add_overlap(1, 0)
        _drain(order, rank, beyond)
        return order.columns()

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """Half of the longest of these chains

            2 (p - 1) f
            (p - 1)(2 f + i - w)
            (p - 2) f + 2 (p - 1) i - (p - 1) w
            (p - 2) f + (p - 1) i

        Exact for equal stages and pairs that save nothing. The third is f short of DeepSeek-V3's
        (report, table 2), which in these letters is (p - 1)(f + 2 i - w) / 2. What pairs save comes
        off: see `pairs_on_critical_path`.
        """
        others = pp - 1
        drain = (pp - 2) * f + others * i
        chains = np.maximum(
            np.maximum(2 * others * f, others * (2 * f + i - w)),
            np.maximum(drain, drain + others * (i - w)),
        )
        return np.asarray(
            np.where(np.asarray(pp) > 1, chains, 0.0) / 2.0 + 0.0 * m, dtype=np.float64
        )

    def overlapped_pairs(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """2 m - 3 p + rank + 1, one less on the last rank. Exact."""
        first = np.where(np.asarray(rank) == pp - 1, 1.0, 0.0)
        return np.asarray(2.0 * m - 3.0 * pp + rank + 1.0 - first, dtype=np.float64)

    def pairs_on_critical_path(self, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """2 m - p - 2, more than any rank has: the chain changes ranks. Exact for equal stages."""
        return np.asarray(np.where(np.asarray(pp) > 1, 2.0 * m - pp - 2.0, 0.0), dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Always p + 1/2 on every rank. Exact; DeepSeek-V3 report, table 2, rounds up to p + 1."""
        return np.asarray(pp + 0.5 + 0.0 * rank + 0.0 * m, dtype=np.float64)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """Three points of the order. Exact.

        The pairs' steady p + 1/2; p - 1/2 with a half backward; the end of the drain, where rank +
        1 chunks wait for W.
        """
        whole = self.in_flight(rank, pp, v, m)
        zero = 0.0 * whole
        return (
            (whole, zero),
            (whole - 1.0, zero + 0.5),
            (zero + (pp - 1.0 - rank) / 2.0, zero + (rank + 1.0) / 2.0),
        )

    def split_share(self, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """On average (3 p - 1) / 4 m: 2 p - 1 - rank of a rank's 2 m chunks.

        The backwards of pairs are whole.
        """
        return np.asarray((3.0 * pp - 1.0) / (4.0 * m), dtype=np.float64)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """4 (p - 1) m / p + 3 p - 8.

        Pairs send when both halves are done, so neighbours have no slack, as in 1F1B.
        Where receives are posted late, or a rank waits for its sends: 4 m + 3 p - 12.
        Found in simulations, to a few sends.
        """
        hops = 4.0 * (pp - 1) / pp * m + 3.0 * pp - 8.0
        if exposed != "none":
            hops = np.maximum(hops, 4.0 * m + 3.0 * pp - 12.0)
        return np.asarray(np.where(np.asarray(pp) > 1, hops, 0.0), dtype=np.float64)


def _drain(order: VOrder, rank: int, beyond: int) -> None:
    """Steps 6 to 8 of torch's schedule.

    The second half of the remaining backwards leave their W for the gaps of the drain.
    """
    half, split = (rank + 1) // 2, False
    for turn in range(rank + 1):
        split = split or (turn == half and rank % 2 == 1)
        order.add(1, "I" if split else "B")
        split = split or (turn == half and rank % 2 == 0)
        order.add(0, "I" if split else "B")
    for _ in range(beyond):
        order.add_owed()
        order.add(0, "I" if split else "B")
    for _ in range(rank + 1):
        order.add_owed()
