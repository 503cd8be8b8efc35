"""ZB-1p: 1F1B with weight gradients split off and late.

It has a third of the bubble for the memory of p microbatches.
"""

from dataclasses import dataclass

import numpy as np

from planner.schedules.actions import ActionColumns
from planner.schedules.base import (
    ZERO_BUBBLE_FORK,
    Exposed,
    FloatLike,
    Floats,
    IntLike,
    Runtime,
    Schedule,
    ScheduleRule,
    one_stage_per_rank,
)
from planner.schedules.depth_first import (
    chunks_awaiting_weight_grad,
    chunks_in_flight,
    depth_first_order,
    exchanges,
    late_weight_grads,
)


@dataclass(frozen=True)
class ZB1p(Schedule):
    """The handcrafted ZB-H1: every rank holds at most p microbatches until their W.

    depth d: microbatches in flight for each rank that follows; ZB-2p has two.
    Source: Qi et al. 2023, section 2.1.
    """

    name: str = "ZB-1p"
    single_stage: bool = True
    splits_backward: bool = True
    runtimes: frozenset[Runtime] = frozenset({"megatron"})
    search_order: int = 80
    fork: str = ZERO_BUBBLE_FORK
    synchronous_end: bool = False
    depth: int = 1

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """Warm-up d (p - 1 - rank), then F I W in turn with W late by d rank microbatches."""
        return depth_first_order(
            rank,
            pp,
            1,
            m,
            warmup=min(m, self.depth * (pp - 1 - rank)),
            weight_delay=self.depth * rank,
        )

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        return (one_stage_per_rank(self.name),)

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

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(m, d (p - 1 - rank) + 1). Exact."""
        return chunks_in_flight(self.depth * (pp - 1 - rank), 1, m)

    def weight_grad_held(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(d rank, m - d (p - 1 - rank) - 1): with `in_flight`, d (p - 1) + 1 on every rank.

        Exact.
        """
        warmup = self.depth * (pp - 1 - rank)
        return chunks_awaiting_weight_grad(warmup, self.depth * rank, 1, m)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """Exact."""
        whole, half = (of(rank, pp, v, m) for of in (self.in_flight, self.weight_grad_held))
        return (whole, half), late_weight_grads(whole, self.depth * rank, 1, m)

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
