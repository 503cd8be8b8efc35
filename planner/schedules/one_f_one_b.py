"""1F1B (PipeDream-Flush), and interleaved: GPipe's bubble with fewer microbatches in flight.

Interleaved, v stages per rank make the bubble v times smaller, for more sends and activations.
"""

import numpy as np

from planner.schedules.base import (
    Exposed,
    Floats,
    IntLike,
    ScheduleRule,
    one_stage_per_rank,
    several_stages_per_rank,
)
from planner.schedules.depth_first import (
    DepthFirst,
    exchanges,
    microbatches_per_round,
    whole_rounds,
)


class OneFOneB(DepthFirst):
    """One forward, one backward after a warm-up of p - 1 - rank forwards.

    Source: Narayanan et al. 2021, section 2.2.
    """

    name = "1F1B"
    single_stage = True
    splits_backward = False
    runtimes = frozenset({"torch", "megatron"})
    search_order = 10
    conditions = (
        one_stage_per_rank(name),
        # torch's Schedule1F1B raises ValueError with fewer, Megatron runs them
        ScheduleRule(
            field="micro_batch_size",
            rule="1F1B needs at least as many microbatches as stages: {m} < pp={pp}",
            remedy="lower micro_batch_size, dp or pp until the microbatches reach pp, or use GPipe",
            holds=lambda pp, v, m: m >= pp,
            runtimes=("torch",),
        ),
    )

    def warmup(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
        return pp - 1 - rank

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """2 (p - 1) m / p + 2 (p - 2), almost two sends per microbatch: neighbours have no slack.

        The longest circle zigzags over all ranks, with 2 (p - 1) sends for p microbatches. Exact up
        to rounding for m >= p.
        Where neighbours wait for each other's sends: 2 m + 2 p - 5, for two ranks m + 1. Exact for
        m >= p.
        """
        count = m
        hidden = 2.0 * (pp - 1) * count / pp + 2.0 * np.maximum(0, pp - 2)
        return np.asarray(
            hidden if exposed == "none" else np.maximum(hidden, exchanges(pp, count)),
            dtype=np.float64,
        )


class Interleaved1F1B(DepthFirst):
    """Depth-first over v stages per rank.

    Source: Narayanan et al. 2021, section 2.2.2; Llama 3, section 3.3.2.
    """

    name = "Interleaved1F1B"
    single_stage = False
    splits_backward = False
    runtimes = frozenset({"torch", "megatron"})
    search_order = 20
    conditions = (
        # Megatron core schedules.py: microbatch_group_size_per_vp_stage lies between p and the
        # number of microbatches
        ScheduleRule(
            key="interleaving needs pp microbatches",
            field="micro_batch_size",
            rule=f"{name} needs at least pp={{pp}} microbatches, not {{m}}",
            remedy="lower micro_batch_size, the data-parallel degree or pp",
            holds=lambda pp, v, m: m >= pp,
            runtimes=("megatron",),
        ),
        several_stages_per_rank(name),
        whole_rounds(name),
    )

    def warmup(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
        return (v - 1) * microbatches_per_round(pp, m) + 2 * (pp - 1 - rank)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """2 (p v - 1) where rounds hold p microbatches, 2 (p - 1) where they hold more.

        In rounds of p, each microbatch waits for its own return. The double warm-up hides the sends
        of the steady phase (Narayanan et al. 2021). Exact for equal stages.
        Where receives are posted late: half as many again for two ranks, which share one stream.
        Where ranks exchange in turns: 2 v m + 2 p - 4, for two ranks (2 v - 1/2) m.
        Where a rank waits for its sends: (2 v - 1) m + 2 p - 3.
        The last three are found in simulations.
        """
        tight = microbatches_per_round(pp, m) <= pp
        hops = (
            2.0
            * (np.where(tight, pp * v, pp) - 1)
            * np.where((exposed == "receive") & (np.asarray(pp) == 2), 1.5, 1.0)
        )
        if exposed == "turn":
            hops = np.maximum(
                hops,
                np.where(np.asarray(pp) > 2, 2.0 * v * m + 2.0 * pp - 4.0, (2.0 * v - 0.5) * m),
            )
        if exposed == "send":
            hops = np.maximum(hops, (2.0 * v - 1.0) * m + 2.0 * pp - 3.0)
        return np.asarray(np.where(np.asarray(pp) > 1, hops, 0.0), dtype=np.float64)
