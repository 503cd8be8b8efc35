"""Interleaved 1F1B: v stages per rank make the bubble v times smaller.

It takes more sends and more activations.
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
    chunks_in_flight,
    depth_first_order,
    microbatches_per_round,
    whole_rounds,
)


@dataclass(frozen=True)
class Interleaved1F1B(Schedule):
    """Depth-first over v stages per rank.

    Source: Narayanan et al. 2021, section 2.2.2; Llama 3, section 3.3.2.
    """

    name: str = "Interleaved1F1B"
    single_stage: bool = False
    splits_backward: bool = False
    runtimes: frozenset[Runtime] = frozenset({"torch", "megatron"})
    search_order: int = 20

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """Warm-up of (v - 1) k + 2 (p - 1 - rank) chunks, then F B in turn.

        k: microbatches per round.
        """
        warmup = int(_warmup(rank, pp, v, m))
        return depth_first_order(rank, pp, v, m, warmup=min(warmup, v * m), weight_delay=None)

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """At least two stages per rank; microbatches in equal rounds, under Megatron of at least p.

        Source: Megatron core schedules.py, where microbatch_group_size_per_vp_stage lies between p
            and the
        number of microbatches.
        """
        rounds = (several_stages_per_rank(self.name), whole_rounds(self.name))
        enough = ScheduleRule(
            key="interleaving needs pp microbatches",
            field="micro_batch_size",
            rule=f"{self.name} needs at least pp={{pp}} microbatches, not {{m}}",
            remedy="lower micro_batch_size, the data-parallel degree or pp",
            holds=lambda pp, v, m: m >= pp,
        )
        return (enough, *rounds) if runtime == "megatron" else rounds

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """((p - 1) + (v - 1) max(0, p - m)) (f + b) / v.

        The second term is the wait for a microbatch to come round when fewer than p keep the loop
        busy. Exact for equal stages.
        Source: Narayanan et al. 2021, section 2.2.2 (m a multiple of p); the second term by
            counting
        stages.
        """
        waits = (pp - 1) + (v - 1) * np.maximum(0, pp - m)
        return np.asarray(waits * (f + i + w) / v, dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(v m, (v - 1) k + 2 (p - 1 - rank) + 1) / v. Exact."""
        return chunks_in_flight(_warmup(rank, pp, v, m), v, m)

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

    def repeats_after(self, pp: int, v: int, m: int) -> int:
        """One round."""
        return int(microbatches_per_round(pp, m))


def _warmup(rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
    return (v - 1) * microbatches_per_round(pp, m) + 2 * (pp - 1 - rank)
