"""DualPipeV: DeepSeek's DualPipe cut in half, a V of two stages per rank whose F and B of two microbatches pair up."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.base import FloatLike, Floats, IntLike, RankOrder, Runtime, Schedule, ScheduleRule, two_stages_per_rank
from planner.schedules.v_shape import VOrder


@dataclass(frozen=True)
class DualPipeV(Schedule):
    """DualPipe's "cut-in-half" (DeepSeek-V3 report, section 3.2.1; github.com/deepseek-ai/DualPipe; Sea AI Lab).

    torch's overlapped pairs "(sFm;tBn)OVERLAP_F_B" are emitted as two actions in a row, F first, which is how torch's own
    runtime executes them; hiding expert all-to-all behind the partner is a matter of durations, not of the order.
    """

    name: str = "DualPipeV"
    single_stage: bool = False
    splits_backward: bool = True
    v_shaped: bool = True

    def rank_order(self, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> RankOrder:
        """As ScheduleDualPipeV of torch, its eight steps in order."""
        order, beyond = VOrder(rank, pp), pp - rank - 1
        for _ in range(2 * beyond):
            order.add(0, "F")
        for _ in range(rank + 1):
            order.add(0, "F")
            order.add(1, "F")
        for _ in range(beyond):
            order.add(1, "I")
            order.add_owed()
            order.add(1, "F")
        for _ in range(num_microbatches - 2 * pp + rank + 1):
            order.add(0, "F")
            order.add(1, "B")
            order.add(1, "F")
            order.add(0, "B")
        for _ in range(beyond):
            order.add(1, "B")
            order.add(1, "F")
            order.add(0, "B")
        _drain(order, rank, beyond)
        return tuple(order.actions)

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """Exactly two stages per rank; at least as many microbatches as stages (torch raises ValueError)."""
        enough = ScheduleRule(
            field="micro_batch_size",
            rule="DualPipeV needs at least as many microbatches as stages: {m} < 2 x pp={pp}",
            remedy="lower micro_batch_size, dp or pp until there are 2 pp microbatches, or use ZBVZeroBubble",
            holds=lambda pp, v, m: m >= 2 * pp,
        )
        return (two_stages_per_rank(self.name), enough)

    def bubble_seconds(
        self,
        pp: IntLike,
        virtual_stages: IntLike,
        num_microbatches: IntLike,
        forward_seconds: FloatLike,
        input_grad_seconds: FloatLike,
        weight_grad_seconds: FloatLike,
    ) -> Floats:
        """max((p - 1)(f + i - w), 2 (p - 1) i - (p - 1) w - f, (p - 1) i - f, (p - 1) f, 0) / 2.

        Exact for equal stages, w <= f <= i and pairs run one after the other. DeepSeek-V3 report, table 2, in these letters:
        (p - 1)(f + 2 i - w) / 2 without overlap, the second chain with its fill.
        """
        f, i, w, others = forward_seconds, input_grad_seconds, weight_grad_seconds, pp - 1
        chains = np.maximum(others * (f + i - w), 2 * others * i - others * w - f)
        chains = np.maximum(chains, np.maximum(others * i - f, others * f))
        return np.asarray(np.maximum(0.0, chains) / 2.0 + 0.0 * num_microbatches, dtype=np.float64)

    def in_flight(self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """Always p + 1/2 on every rank. Exact; DeepSeek-V3 report, table 2, rounds up to p + 1."""
        return np.asarray(pp + 0.5 + 0.0 * rank + 0.0 * num_microbatches, dtype=np.float64)

    def sends_on_critical_path(self, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike) -> Floats:
        """6 (p - 1): the drain crosses the V three times. Read off simulations where the second chain of the bubble is the longest."""
        return np.asarray(6.0 * (pp - 1) + 0.0 * num_microbatches, dtype=np.float64)


def _drain(order: VOrder, rank: int, beyond: int) -> None:
    """Steps 6 to 8: the second half of the remaining backwards leave their W for the gaps of the drain."""
    half, split = (rank + 1) // 2, False
    for turn in range(rank + 1):
        split = split or (turn == half and rank % 2 == 1)
        order.add(1, "I" if split else "B")
        split = split or (turn == half and rank % 2 == 0)
        order.add(0, "I" if split else "B")
    for _ in range(beyond):
        order.add_owed()
        order.add(0, "I" if split else "B")
    for _ in range(rank + 1):
        order.add_owed()
