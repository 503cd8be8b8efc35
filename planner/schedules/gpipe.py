"""GPipe: all forwards, then all backwards. Simple, and holds every microbatch's activations."""

from dataclasses import dataclass

import numpy as np

from planner.schedules.actions import BACKWARD, FORWARD, ActionColumns
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


@dataclass(frozen=True)
class GPipe(Schedule):
    """Fill and drain (Huang et al. 2018). torch puts no condition on the number of microbatches."""

    name: str = "GPipe"
    single_stage: bool = True
    splits_backward: bool = False
    runtimes: frozenset[Runtime] = frozenset({"torch"})
    search_order: int = 70

    def rank_order(
        self, rank: int, pp: int, virtual_stages: int, num_microbatches: int
    ) -> ActionColumns:
        """F0 .. F(m-1), B0 .. B(m-1).

        Backwards run in the same order as forwards, as in torch's ScheduleGPipe.
        """
        each = np.arange(num_microbatches)
        return ActionColumns(
            np.full(2 * num_microbatches, rank),
            np.repeat([FORWARD, BACKWARD], num_microbatches),
            np.concatenate([each, each]),
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
        """(p - 1)(f + b), exact for equal stages.

        Source: Huang et al. 2018, section 2.3: share (p - 1) / (m + p - 1).
        """
        return np.asarray(
            (pp - 1) * (forward_seconds + input_grad_seconds + weight_grad_seconds),
            dtype=np.float64,
        )

    def in_flight(
        self, rank: IntLike, pp: IntLike, virtual_stages: IntLike, num_microbatches: IntLike
    ) -> Floats:
        """m: the first backward waits for the last forward. Exact."""
        return np.asarray(num_microbatches + 0.0 * rank, dtype=np.float64)

    def sends_on_critical_path(
        self,
        pp: IntLike,
        virtual_stages: IntLike,
        num_microbatches: IntLike,
        exposed: Exposed = "none",
    ) -> Floats:
        """2 (p - 1): fill and drain, between which sends run beside compute.

        Where receives are posted late, or a rank waits for its sends: 2 m + 2 (p - 2).
        Exact for equal stages.
        """
        hidden = 2.0 * (pp - 1) + 0.0 * num_microbatches
        held = 2.0 * num_microbatches + 2.0 * (pp - 2)
        return np.asarray(
            hidden if exposed == "none" else np.maximum(hidden, held), dtype=np.float64
        )
