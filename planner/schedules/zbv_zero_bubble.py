"""ZBV: two stages per rank in a V, so that the last forward and the first backward of a microbatch share a rank."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.base import FloatLike, Floats, IntLike, RankOrder, Runtime, Schedule, ScheduleRule, two_stages_per_rank
from planner.schedules.v_shape import VOrder


@dataclass(frozen=True)
class ZBVZeroBubble(Schedule):
    """ZB-V (Qi et al. 2023, section 6): ZB-2p's bubble with 1F1B's memory while f, i and w are alike."""

    name: str = "ZBVZeroBubble"
    single_stage: bool = False
    splits_backward: bool = True
    v_shaped: bool = True

    def rank_order(self, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> RankOrder:
        """As ScheduleZBVZeroBubble of torch: built for at least 2p - 1 microbatches, those beyond m left out."""
        count = max(2 * pp - 1, num_microbatches)
        order = VOrder(rank, pp)
        _warm_up(order, rank, pp)
        while order.count(1, "F") < order.count(0, "F") or order.count(0, "F") < count:
            if order.count(0, "F") < count:
                order.add(0, "F")
            for chunk in (0, 1):
                if chunk == 1:
                    order.add(1, "F")
                order.add(chunk, "I")
                order.add_owed()
        _cool_down(order, rank, pp)
        return tuple(action for action in order.actions if action.microbatch < num_microbatches)

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """Exactly two stages per rank; torch puts no condition on the number of microbatches."""
        return (two_stages_per_rank(self.name),)

    def bubble_seconds(
        self,
        pp: IntLike,
        virtual_stages: IntLike,
        num_microbatches: IntLike,
        forward_seconds: FloatLike,
        input_grad_seconds: FloatLike,
        weight_grad_seconds: FloatLike,
    ) -> Floats:
        """(p - 1) f / 2."""
        return np.asarray((pp - 1) * forward_seconds / 2.0, dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """Up to p on every rank from 2p - 1 microbatches on. Source: Qi et al. 2023, section 6."""
        down, up = np.minimum(num_microbatches, 2 * pp - 1 - rank), np.minimum(num_microbatches, rank + 1)
        return np.asarray((down + up) / 2.0, dtype=np.float64)

    def sends_on_critical_path(self, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """2 (p - 1)."""
        return np.asarray(2.0 * (pp - 1) + 0.0 * num_microbatches, dtype=np.float64)


def _warm_up(order: VOrder, rank: int, pp: int) -> None:
    for _ in range(2 * (pp - rank) - 1):
        order.add(0, "F")
    for _ in range(rank):
        order.add(1, "F")
        order.add(0, "F")
    for _ in range(pp - rank):
        order.add(1, "F")
        order.add(1, "I")
        order.add_owed()


def _cool_down(order: VOrder, rank: int, pp: int) -> None:
    for _ in range(rank):
        order.add(0, "I")
        order.add(1, "I")
    for _ in range(pp - rank):
        order.add(0, "I")
        order.add_owed_of(0)
    while order.add_owed_of(1):
        pass
    while order.add_owed_of(0):
        pass
