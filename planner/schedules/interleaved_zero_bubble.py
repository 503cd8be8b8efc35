"""Interleaved zero bubble: interleaved 1F1B whose weight gradients fill the bubble.

It is torch's ZB1P.
"""

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
    several_stages_per_rank,
)
from planner.schedules.depth_first import (
    chunks_awaiting_weight_grad,
    chunks_in_flight,
    depth_first_order,
    late_weight_grads,
    microbatches_per_round,
    whole_rounds,
)


@dataclass(frozen=True)
class InterleavedZeroBubble(Schedule):
    """Depth-first over v stages per rank, with W delayed by `rank` chunks.

    Source: Qi et al. 2023, ZB-H1, interleaved.
    """

    name: str = "InterleavedZeroBubble"
    single_stage: bool = False
    splits_backward: bool = True
    runtimes: frozenset[Runtime] = frozenset({"torch"})
    search_order: int = 40

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """Warm-up of (v - 1) k + (p - 1 - rank) chunks, then F I W in turn.

        W is late by `rank` chunks.
        """
        warmup = int(_warmup(rank, pp, v, m))
        return depth_first_order(rank, pp, v, m, warmup=min(warmup, v * m), weight_delay=rank)

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """At least two stages per rank; microbatches in equal rounds."""
        return (several_stages_per_rank(self.name), whole_rounds(self.name))

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

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(v m, (v - 1) k + (p - 1 - rank) + 1) / v. Exact."""
        return chunks_in_flight(_warmup(rank, pp, v, m), v, m)

    def weight_grad_held(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(rank, v m - warm-up - 1) / v. Exact."""
        return chunks_awaiting_weight_grad(_warmup(rank, pp, v, m), rank, v, m)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """Exact."""
        whole, half = (of(rank, pp, v, m) for of in (self.in_flight, self.weight_grad_held))
        return (whole, half), late_weight_grads(whole, rank, v, m)

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

    def repeats_after(self, pp: int, v: int, m: int) -> int:
        """One round."""
        return int(microbatches_per_round(pp, m))


def _warmup(rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
    return (v - 1) * microbatches_per_round(pp, m) + (pp - 1 - rank)
