"""Interleaved zero bubble: interleaved 1F1B with the weight gradients split off to fill the bubble (torch's ZB1P)."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.base import FloatLike, Floats, IntLike, RankOrder, Runtime, Schedule, ScheduleRule, several_stages_per_rank
from planner.schedules.depth_first import (
    chunks_awaiting_weight_grad,
    chunks_in_flight,
    depth_first_order,
    microbatches_per_round,
    whole_rounds,
)


@dataclass(frozen=True)
class InterleavedZeroBubble(Schedule):
    """Depth-first over v stages per rank, W delayed by `rank` chunks (Qi et al. 2023, ZB-H1, interleaved)."""

    name: str = "InterleavedZeroBubble"
    single_stage: bool = False
    splits_backward: bool = True

    def rank_order(self, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> RankOrder:
        """Warm-up (v - 1) k + (p - 1 - rank) chunks, then F I W in turn with W late by `rank` chunks."""
        warmup = int(_warmup(rank, pp, virtual_stages, num_microbatches))
        return depth_first_order(
            rank, pp, virtual_stages, num_microbatches, warmup=min(warmup, virtual_stages * num_microbatches), weight_delay=rank
        )

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """At least two stages per rank; microbatches in equal rounds."""
        return (several_stages_per_rank(self.name), whole_rounds(self.name, runtime))

    def bubble_seconds(
        self,
        pp: IntLike,
        virtual_stages: IntLike,
        num_microbatches: IntLike,
        forward_seconds: FloatLike,
        input_grad_seconds: FloatLike,
        weight_grad_seconds: FloatLike,
    ) -> Floats:
        """(p - 1)(f + i - w) / v."""
        return np.asarray((pp - 1) * (forward_seconds + input_grad_seconds - weight_grad_seconds) / virtual_stages, dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """min(v m, (v - 1) k + (p - 1 - rank) + 1) / v. Exact."""
        return chunks_in_flight(_warmup(rank, pp, virtual_stages, num_microbatches), virtual_stages, num_microbatches)

    def weight_grad_held(self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """min(rank, v m - warm-up - 1) / v. Exact."""
        return chunks_awaiting_weight_grad(_warmup(rank, pp, virtual_stages, num_microbatches), rank, virtual_stages, num_microbatches)

    def sends_on_critical_path(self, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """2 (p - 1)."""
        return np.asarray(2.0 * (pp - 1) + 0.0 * num_microbatches, dtype=np.float64)

    def repeats_after(self, pp: int, virtual_stages: int, num_microbatches: int) -> int:
        """One round."""
        return int(microbatches_per_round(pp, num_microbatches))


def _warmup(rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> IntLike:
    return (virtual_stages - 1) * microbatches_per_round(pp, num_microbatches) + (pp - 1 - rank)
