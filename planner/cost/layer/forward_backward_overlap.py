"""How much communication an overlapped forward and backward of two microbatches hide.

Letters: K + 2 units (layers by kind, embedding, head), N layouts, U distinct layouts, C candidates
of a simulation, S stages, P pairs.
A profile's `pair_tp_hidden` and `pair_ep_hidden` are shares: how much of the exposed TP and EP
communication runs under the partner's compute. A backward hides its own exchanges; those of
recomputed forwards come all at once and stay exposed.
Sources: DeepSeek-V3 report, section 3.2.1 (DualPipe); torchtitan/distributed/dual_pipe_v.py
(overlap_callback: the two threads alternate compute and exchange of experts).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from planner.columns import FloatColumn, IntColumn
from planner.cost.layer.context import AXES
from planner.cost.layer.unit_costs import UnitCosts
from planner.cost.machine.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PairColumns:
    """Seconds of one microbatch on each unit, (K + 2, N), or on each stage, (C, S).

    forward_tp, forward_ep, backward_tp, backward_ep: communication that may hide.
    forward_cover, backward_cover: compute under which the partner's communication may hide.
    slowdown: compute seconds lost per second of hidden communication (not a column).
    """

    forward_tp: FloatColumn
    forward_ep: FloatColumn
    backward_tp: FloatColumn
    backward_ep: FloatColumn
    forward_cover: FloatColumn
    backward_cover: FloatColumn
    slowdown: float

    @property
    def forward_wire(self) -> FloatColumn:
        return self.forward_tp + self.forward_ep

    @property
    def backward_wire(self) -> FloatColumn:
        return self.backward_tp + self.backward_ep

    def of_stages(self, on_stages: Callable[[FloatColumn], FloatColumn]) -> "PairColumns":
        columns: dict[str, Any] = {
            one.name: on_stages(getattr(self, one.name))
            for one in fields(self)
            if one.name != "slowdown"
        }
        return replace(self, **columns)

    def saved_CP(self, forward: IntColumn, backward: IntColumn) -> FloatColumn:
        """Seconds that each pair takes less than its two parts one after the other.

        forward, backward (P,): stages of each pair's forward and backward.
        saved = (1 - slowdown) (min(wire of the forward, compute of the backward)
                                + min(wire of the backward, compute of the forward))
        """
        hidden = np.minimum(self.forward_wire[:, forward], self.backward_cover[:, backward])
        hidden += np.minimum(self.backward_wire[:, backward], self.forward_cover[:, forward])
        return np.asarray((1.0 - self.slowdown) * hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """TP and EP communication that one pair hides, and the seconds it saves, (N,) each."""

    tp: FloatColumn
    ep: FloatColumn
    saved: FloatColumn

    def spread(self, rows: IntColumn, size: int) -> "Relief":
        """Relief at `rows` of `size` layouts, zeros elsewhere."""
        spread = np.zeros((3, size))
        spread[:, rows] = self.tp, self.ep, self.saved
        return Relief(tp=spread[0], ep=spread[1], saved=spread[2])


def pair_columns(costs: UnitCosts, at: IntColumn, profile: Profile) -> PairColumns:
    """The columns of N layouts; `at` is the row of unit costs of each, the profile theirs."""
    shares = {"tp": profile.pair_tp_hidden, "ep": profile.pair_ep_hidden}
    forward = {
        axis: share * costs.exposed_forward[AXES.index(axis)][:, at]
        for axis, share in shares.items()
    }
    backward = {
        axis: np.minimum(share * costs.exposed_backward[AXES.index(axis)][:, at], forward[axis])
        for axis, share in shares.items()
    }
    return PairColumns(
        forward_tp=forward["tp"],
        forward_ep=forward["ep"],
        backward_tp=backward["tp"],
        backward_ep=backward["ep"],
        forward_cover=costs.forward_seconds[:, at],
        backward_cover=(
            costs.input_grad_seconds + costs.recompute_seconds + costs.weight_grad_seconds
        )[:, at],
        slowdown=profile.overlap_slowdown,
    )


def relief(pairs: PairColumns, units: FloatColumn, virtual_stages: IntColumn) -> Relief:
    """Relief by a mean pair of a rank; `units` (K + 2, N) are the units on that rank.

    The pair's forward is of one stage, its backward of another; both are means over the stages.
    hidden = min(wire of the forward, compute of the backward)
           + min(wire of the backward, compute of the forward)
    saved = (1 - slowdown) hidden
    """

    def of_stage(column: FloatColumn) -> FloatColumn:
        return np.asarray((units * column).sum(axis=0) / virtual_stages)

    forward, backward = of_stage(pairs.forward_wire), of_stage(pairs.backward_wire)
    under_backward = np.minimum(1.0, of_stage(pairs.backward_cover) / np.maximum(forward, 1e-30))
    under_forward = np.minimum(1.0, of_stage(pairs.forward_cover) / np.maximum(backward, 1e-30))
    tp = under_backward * of_stage(pairs.forward_tp) + under_forward * of_stage(pairs.backward_tp)
    ep = under_backward * of_stage(pairs.forward_ep) + under_forward * of_stage(pairs.backward_ep)
    return Relief(tp=tp, ep=ep, saved=(1.0 - pairs.slowdown) * (tp + ep))


def most_saved(costs: UnitCosts, profile: Profile) -> FloatColumn:
    """The most seconds that pairs can save of one microbatch on each unit, (K + 2, U)."""
    everywhere = pair_columns(costs, np.arange(costs.forward_seconds.shape[1]), profile)
    return np.asarray(
        (1.0 - everywhere.slowdown) * (everywhere.forward_wire + everywhere.backward_wire)
    )


def shares_of_wires(costs: UnitCosts, profile: Profile) -> FloatColumn:
    """An upper bound of `most_saved`, (K + 2, U): the shares of all communication that may hide.

    A unit's time less this never falls as its communication grows. So with each operation at the
    least of several methods it bounds the time under every one of them from below.
    """
    tp, ep = (AXES.index(name) for name in ("tp", "ep"))
    wires = costs.exposed_forward + costs.exposed_backward
    both = profile.pair_tp_hidden * wires[tp] + profile.pair_ep_hidden * wires[ep]
    return np.asarray((1.0 - profile.overlap_slowdown) * both)
