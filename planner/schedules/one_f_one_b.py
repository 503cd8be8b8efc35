"""1F1B (PipeDream-Flush): GPipe's bubble with at most p microbatches in flight."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.actions import ActionColumns
from planner.schedules.base import (
    Exposed,
    FloatLike,
    Floats,
    IntLike,
    Runtime,
    Schedule,
    ScheduleRule,
    one_stage_per_rank,
)
from planner.schedules.depth_first import chunks_in_flight, depth_first_order, exchanges


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward after a warm-up of p - 1 - rank forwards.

    Source: Narayanan et al. 2021, section 2.2.
    """

    name: str = "1F1B"
    single_stage: bool = True
    splits_backward: bool = False
    runtimes: frozenset[Runtime] = frozenset({"torch", "megatron"})
    search_order: int = 10

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """Warm-up min(m, p - 1 - rank), then F B in turn, then the remaining B."""
        return depth_first_order(rank, pp, 1, m, warmup=min(m, pp - 1 - rank), weight_delay=None)

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """One stage per rank; in torch at least p microbatches.

        torch's Schedule1F1B raises ValueError with fewer, Megatron runs them.
        """
        enough = ScheduleRule(
            field="micro_batch_size",
            rule="1F1B needs at least as many microbatches as stages: {m} < pp={pp}",
            remedy="lower micro_batch_size, dp or pp until the microbatches reach pp, or use GPipe",
            holds=lambda pp, v, m: m >= pp,
        )
        return (
            (one_stage_per_rank(self.name), enough)
            if runtime == "torch"
            else (one_stage_per_rank(self.name),)
        )

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """(p - 1)(f + b), exact for equal stages. Source: Narayanan et al. 2021, section 2.2.1."""
        return np.asarray((pp - 1) * (f + i + w), dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(m, p - rank). Exact."""
        return chunks_in_flight(pp - 1 - rank, 1, m)

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
