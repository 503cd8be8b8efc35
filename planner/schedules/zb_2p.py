"""ZB-2p: twice ZB-1p's microbatches in flight and no bubble at all while f, i and w are alike."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.base import (
    ZERO_BUBBLE_FORK,
    Exposed,
    FloatLike,
    Floats,
    IntLike,
    RankOrder,
    Runtime,
    Schedule,
    ScheduleRule,
    one_stage_per_rank,
)
from planner.schedules.depth_first import (
    chunks_awaiting_weight_grad,
    chunks_in_flight,
    depth_first_order,
    late_weight_grads,
)


@dataclass(frozen=True)
class ZB2p(Schedule):
    """The handcrafted ZB-H2: every rank holds at most 2p - 1 microbatches until their W.

    Source: Qi et al. 2023, section 2.2.
    """

    name: str = "ZB-2p"
    single_stage: bool = True
    splits_backward: bool = True
    runtimes: frozenset[Runtime] = frozenset({"megatron"})
    search_order: int = 90
    published: bool = True
    fork: str = ZERO_BUBBLE_FORK
    synchronous_end: bool = False

    def rank_order(
        self, rank: int, pp: int, virtual_stages: int, num_microbatches: int
    ) -> RankOrder:
        """Warm-up 2 (p - 1 - rank), then F I W in turn with W late by 2 rank microbatches."""
        return depth_first_order(
            rank,
            pp,
            1,
            num_microbatches,
            warmup=min(num_microbatches, 2 * (pp - 1 - rank)),
            weight_delay=2 * rank,
        )

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """One stage per rank."""
        return (one_stage_per_rank(self.name),)

    def bubble_seconds(
        self,
        pp: IntLike,
        virtual_stages: IntLike,
        num_microbatches: IntLike,
        forward_seconds: FloatLike,
        input_grad_seconds: FloatLike,
        weight_grad_seconds: FloatLike,
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
        delayed = np.minimum(2 * others, num_microbatches - 1)
        short = 2 * others - delayed
        drain = others * (forward_seconds + input_grad_seconds) - delayed * weight_grad_seconds
        chain = (others - delayed) * forward_seconds + others * input_grad_seconds
        fill = short // 2 * forward_seconds + (short + 1) // 2 * input_grad_seconds
        return np.asarray(np.maximum(np.maximum(drain, chain), fill), dtype=np.float64)

    def in_flight(
        self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike
    ) -> Floats:
        """min(m, 2 (p - rank) - 1). Exact."""
        return chunks_in_flight(2 * (pp - 1 - rank), 1, num_microbatches)

    def weight_grad_held(
        self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike
    ) -> Floats:
        """min(2 rank, m - 2 (p - 1 - rank) - 1): with `in_flight`, 2p - 1 on every rank. Exact."""
        return chunks_awaiting_weight_grad(2 * (pp - 1 - rank), 2 * rank, 1, num_microbatches)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """Exact."""
        whole, half = (
            of(rank, pp, virtual_stages, num_microbatches)
            for of in (self.in_flight, self.weight_grad_held)
        )
        return (whole, half), late_weight_grads(whole, 2 * rank, 1, num_microbatches)

    def sends_on_critical_path(
        self,
        pp: IntLike,
        virtual_stages: IntLike,
        num_microbatches: IntLike,
        exposed: Exposed = "none",
    ) -> Floats:
        """2 (p - 1): fill and drain; the double warm-up hides the rest.

        Found in simulations with m >= 2p - 1.
        Where a rank waits for its sends: m + 2 p - 3, only the last rank's own.
        """
        hidden = 2.0 * (pp - 1) + 0.0 * num_microbatches
        seen = num_microbatches + 2.0 * pp - 3.0
        return np.asarray(
            np.maximum(hidden, seen) if exposed == "send" else hidden, dtype=np.float64
        )
