"""Zero bubble: 1F1B whose weight gradients are split off and late, and fill the bubble.

ZB-1p has a third of 1F1B's bubble for the memory of p microbatches. ZB-2p holds twice as many and
has none while f, i and w are alike. Interleaved it is torch's ZB1P.
"""

import numpy as np

from planner.schedules.base import (
    ZERO_BUBBLE_FORK,
    Exposed,
    FloatLike,
    Floats,
    IntLike,
    one_stage_per_rank,
    several_stages_per_rank,
)
from planner.schedules.depth_first import (
    DepthFirst,
    exchanges,
    microbatches_per_round,
    whole_rounds,
)


class ZB1p(DepthFirst):
    """The handcrafted ZB-H1: every rank holds at most p microbatches until their W.

    depth d: microbatches in flight for each rank that follows; ZB-2p has two.
    Source: Qi et al. 2023, section 2.1.
    """

    name = "ZB-1p"
    single_stage = True
    splits_backward = True
    runtimes = frozenset({"megatron"})
    search_order = 80
    fork = ZERO_BUBBLE_FORK
    synchronous_end = False
    depth = 1
    conditions = (one_stage_per_rank(name),)

    def warmup(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
        return self.depth * (pp - 1 - rank)

    def delay(self, rank: IntLike) -> IntLike:
        """D rank: with what is in flight, d (p - 1) + 1 microbatches on every rank."""
        return self.depth * rank

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """max((p - 1)(f + i) - d w, (p - 1 - d) f + (p - 1) i), d = min(p - 1, m - 1).

        From p microbatches on: (p - 1) max(f + i - w, i). It is that of the longest rank's span,
        see `synchronous_end`. Exact for equal stages and w <= f <= i.
        Source: Qi et al. 2023, table 1, (p - 1)(f + i - w).
        """
        others = pp - 1
        delayed = np.minimum(others, m - 1)
        drain = others * (f + i) - delayed * w
        return np.asarray(np.maximum(drain, (others - delayed) * f + others * i), dtype=np.float64)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """4 (p - 1): warm-up and late W leave each neighbour's gradient one send behind.

        Found in simulations with m > p.
        Where a rank waits for its sends: as for 1F1B, 2 m + 2 p - 5.
        """
        hidden = 4.0 * (pp - 1) + 0.0 * m
        return np.asarray(
            np.maximum(hidden, exchanges(pp, m)) if exposed == "send" else hidden, dtype=np.float64
        )


class ZB2p(ZB1p):
    """The handcrafted ZB-H2: every rank holds at most 2p - 1 microbatches until their W.

    Source: Qi et al. 2023, section 2.2.
    """

    name = "ZB-2p"
    search_order = 90
    depth = 2
    conditions = (one_stage_per_rank(name),)

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """The longest of three chains, where d = min(2 (p - 1), m - 1) and e = 2 (p - 1) - d:

            (p - 1)(f + i) - d w
            (p - 1 - d) f + (p - 1) i
            e // 2 f + (e + 1) // 2 i

        From 2p - 1 microbatches on: (p - 1) max(f + i - 2 w, i - f, 0). It is that of the longest
        rank's span, see `synchronous_end`. Exact for equal stages and w <= f <= i.
        Source: Qi et al. 2023, table 1, (p - 1)(f + i - 2 w).
        """
        others = pp - 1
        delayed = np.minimum(2 * others, m - 1)
        short = 2 * others - delayed
        drain = others * (f + i) - delayed * w
        chain = (others - delayed) * f + others * i
        fill = short // 2 * f + (short + 1) // 2 * i
        return np.asarray(np.maximum(np.maximum(drain, chain), fill), dtype=np.float64)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """2 (p - 1): fill and drain; the double warm-up hides the rest.

        Found in simulations with m >= 2p - 1.
        Where a rank waits for its sends: m + 2 p - 3, only the last rank's own.
        """
        hidden = 2.0 * (pp - 1) + 0.0 * m
        seen = m + 2.0 * pp - 3.0
        return np.asarray(
            np.maximum(hidden, seen) if exposed == "send" else hidden, dtype=np.float64
        )


class InterleavedZeroBubble(DepthFirst):
    """Depth-first over v stages per rank, with W delayed by `rank` chunks.

    Source: Qi et al. 2023, ZB-H1, interleaved.
    """

    name = "InterleavedZeroBubble"
    single_stage = False
    splits_backward = True
    runtimes = frozenset({"torch"})
    search_order = 40
    conditions = (several_stages_per_rank(name), whole_rounds(name))

    def warmup(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
        return (v - 1) * microbatches_per_round(pp, m) + (pp - 1 - rank)

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """(p - 1) max(f + i - w, f, i) / v from p microbatches on.

        Exact for equal stages and w <= f <= i. In general it is the longest of five chains over v,
        where q = max(0, p - m), a = p - 1 + (v - 1) q and d = min(p - 1, m - 1):

            a f + (p - 1) i - d w
            (a - d) f + (p - 1) i
            a f + max(q, a - v m + 1) i
            a (f + i) - (v m - 1) w                 for m < p
            (a - d) f + a i - (v - 1) m w           for m < p

        Source: Qi et al. 2023, ZB-H1; chains found in simulations.
        """
        missing = np.maximum(0, pp - m)
        around = pp - 1 + (v - 1) * missing
        delayed = np.minimum(pp - 1, m - 1)
        few = missing > 0
        chains = np.maximum(
            around * f + (pp - 1) * i - delayed * w, (around - delayed) * f + (pp - 1) * i
        )
        chains = np.maximum(chains, around * f + np.maximum(missing, around - v * m + 1) * i)
        loops = np.maximum(
            around * (f + i) - (v * m - 1) * w,
            (around - delayed) * f + around * i - (v - 1) * m * w,
        )
        return np.asarray(np.where(few, np.maximum(chains, loops), chains) / v, dtype=np.float64)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """(v + 3) p - 4: the single warm-up hides fewer sends than interleaved 1F1B's.

        Found in simulations with m > p, f + i - w > i.
        Where receives are posted late: (2 v + 2) p - 4.
        Where a rank waits for its sends: 2 v m + 2 p - 5.
        The last two are found in simulations.
        """
        zero = 0.0 * m
        hops = (v + 3.0) * pp - 4.0 + zero
        if exposed == "receive":
            hops = (2.0 * v + 2.0) * pp - 4.0 + zero
        elif exposed != "none":
            hops = np.maximum(hops, 2.0 * v * m + 2.0 * pp - 5.0)
        return np.asarray(np.where(np.asarray(pp) > 1, hops, 0.0), dtype=np.float64)
