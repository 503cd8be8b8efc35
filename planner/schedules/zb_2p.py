"""ZB-2p: twice ZB-1p's microbatches in flight and no bubble at all while f, i and w are alike."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.base import Exposed, FloatLike, Floats, IntLike
from planner.schedules.zb_1p import ZB1p


@dataclass(frozen=True)
class ZB2p(ZB1p):
    """The handcrafted ZB-H2: every rank holds at most 2p - 1 microbatches until their W.

    Source: Qi et al. 2023, section 2.2.
    """

    name: str = "ZB-2p"
    search_order: int = 90
    depth: int = 2

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
