"""The cost model's errors on several layouts: how large they are, and how they are correlated.

Covariance of the errors of candidates i and j, before any probe:
  sum_q factor_iq factor_jq + sd_i sd_j (shift + additive mean_g k_g(i, j) + joint prod_g k_g(i, j)
  + nugget [i = j])
with k_g the groups of `similarity`. The directions of the calibration's posterior are shared
errors; a layout's own errors are as similar as the layouts.
Letters: N candidates, Q shared directions, A and B rows.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner.calibration.intervals import TimeSpread
from planner.calibration.similarity import Group, groups
from planner.columns import FloatColumn, IntColumn, LayoutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Shares of a candidate's own variance, summing to 1.

    nugget: the share that no other layout has in common, not even a near twin.
    """

    shift: float
    additive: float
    joint: float
    nugget: float


# Judgement. The published sweeps, each predicted by a calibration without its group, are likelier
# with half the lengths and 1.4 times the deviations (log likelihood 172 instead of -116, by
# `benchmarks/replay.py --likelihood`), but studies of generated landscapes take more probes then.
TIME = Weights(shift=0.3, additive=0.35, joint=0.34, nugget=0.01)
# Judgement: a memory model is wrong by the same share for most layouts (fragmentation, context).
MEMORY = Weights(shift=0.4, additive=0.3, joint=0.295, nugget=0.005)


@dataclass(frozen=True, kw_only=True)
class CorrelatedErrors:
    """The errors of N candidates before any probe.

    known: columns of the covariance computed so far, by row.
    """

    sd: FloatColumn
    factor: FloatColumn
    groups: tuple[Group, ...]
    weights: Weights
    known: dict[int, FloatColumn] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, batch: LayoutBatch, spread: TimeSpread, global_batch_size: int
    ) -> "CorrelatedErrors":
        return cls(
            sd=spread.own_sd,
            factor=spread.loadings.T,
            groups=groups(batch, global_batch_size),
            weights=TIME,
        )

    @cached_property
    def variance(self) -> FloatColumn:
        return np.asarray(np.einsum("nq,nq->n", self.factor, self.factor) + self.sd**2)

    def column(self, row: int) -> FloatColumn:
        """Covariance of every candidate with this one, (N,)."""
        if row not in self.known:
            self.known[row] = self.between(np.arange(len(self.sd)), np.array([row]))[:, 0]
        return self.known[row]

    def between(self, first: IntColumn, second: IntColumn) -> FloatColumn:
        """Covariance of rows `first` (A,) with rows `second` (B,), (A, B)."""
        mean, product = np.zeros((len(first), len(second))), np.ones((len(first), len(second)))
        for group in self.groups:
            alike = group.between(first, second)
            mean += alike
            product *= alike
        mean = mean / len(self.groups) if self.groups else np.ones_like(mean)
        same, w = first[:, None] == second[None, :], self.weights
        correlation = w.shift + w.additive * mean + w.joint * product + w.nugget * same
        own = self.sd[first][:, None] * self.sd[second][None, :] * correlation
        return np.asarray(self.factor[first] @ self.factor[second].T + own)
