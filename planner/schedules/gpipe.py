"""All forwards, then all backwards: GPipe, and LoopedBFS over several stages per rank.

Simple, and every microbatch's activations are saved.
"""

import numpy as np

from planner.schedules.actions import BACKWARD, FORWARD, ActionColumns
from planner.schedules.base import (
    Exposed,
    Floats,
    IntLike,
    Schedule,
    one_stage_per_rank,
    several_stages_per_rank,
)


class GPipe(Schedule):
    """Fill and drain (Huang et al. 2018). torch puts no condition on the number of microbatches."""

    name = "GPipe"
    single_stage = True
    splits_backward = False
    runtimes = frozenset({"torch"})
    search_order = 70
    conditions = (one_stage_per_rank(name),)

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """F0 .. F(m-1), B0 .. B(m-1).

        Backwards run in the same order as forwards, as in torch's ScheduleGPipe.
        """
        each = np.arange(m)
        return ActionColumns(
            np.full(2 * m, rank), np.repeat([FORWARD, BACKWARD], m), np.concatenate([each, each])
        )

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """m: the first backward waits for the last forward. Exact."""
        return np.asarray(m + 0.0 * rank, dtype=np.float64)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """2 (p - 1): fill and drain, between which sends run beside compute.

        Where receives are posted late, or a rank waits for its sends: 2 m + 2 (p - 2).
        Exact for equal stages.
        """
        hidden = 2.0 * (pp - 1) + 0.0 * m
        held = 2.0 * m + 2.0 * (pp - 2)
        return np.asarray(
            hidden if exposed == "none" else np.maximum(hidden, held), dtype=np.float64
        )


class LoopedBFS(Schedule):
    """Breadth-first pipeline (Lamy-Poirier 2023, BFS-PP).

    torch puts no condition on the number of microbatches.
    """

    name = "LoopedBFS"
    single_stage = False
    splits_backward = False
    runtimes = frozenset({"torch"})
    search_order = 60
    conditions = (several_stages_per_rank(name),)

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """All F stage by stage, then all B from the last stage on.

        B takes microbatches in reverse, as in torch's ScheduleLoopedBFS.
        """
        stage_k = np.repeat(np.arange(rank, pp * v, pp), m)
        microbatch_k = np.tile(np.arange(m), v)
        return ActionColumns(
            np.concatenate([stage_k, stage_k[::-1]]),
            np.repeat([FORWARD, BACKWARD], len(stage_k)),
            np.concatenate([microbatch_k, microbatch_k[::-1]]),
        )

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """m: the first backward waits for the last forward. Exact."""
        return np.asarray(m + 0.0 * rank, dtype=np.float64)

    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """2 (p - 1): fill and drain. Up to p microbatches 2 (p v - 1). Exact.

        Up to p microbatches the next stage waits for the first one's return.
        Where receives are posted late, or a rank waits for its sends: 2 v m + 2 (p - 2), exact for
            m > p.
        Two ranks that share one stream: (4 v - 2) m.
        """
        hops = 2.0 * (np.where(np.asarray(m) <= pp, pp * v, pp) - 1)
        if exposed != "none":
            shared = (exposed == "receive") & (np.asarray(pp) == 2)
            hops = np.maximum(
                hops, np.where(shared, (4.0 * v - 2.0) * m, 2.0 * v * m + 2.0 * (pp - 2))
            )
        return np.asarray(np.where(np.asarray(pp) > 1, hops, 0.0), dtype=np.float64)
