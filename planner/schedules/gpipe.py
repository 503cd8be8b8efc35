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

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """F0 .. F(m-1), B0 .. B(m-1).

        Backwards run in the same order as forwards, as in torch's ScheduleGPipe.
        """
        each = np.arange(m)
        return ActionColumns(
            np.full(2 * m, rank), np.repeat([FORWARD, BACKWARD], m), np.concatenate([each, each])
        )

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        return (one_stage_per_rank(self.name),)

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """(p - 1)(f + b), exact for equal stages.

        Source: Huang et al. 2018, section 2.3: share (p - 1) / (m + p - 1).
        """
        return np.asarray((pp - 1) * (f + i + w), dtype=np.float64)

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
