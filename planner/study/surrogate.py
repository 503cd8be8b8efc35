"""Gaussian processes on the cost model's error: one for log step seconds, one for log memory.

They are defined over a finite set of candidates. Covariance of the errors of candidates i and j,
before any probe: scale^2 times that of `calibration.correlated`. `scale` is learnt: how wrong the
model turns out to be compared with the prior, whose deviations are scales of Student's t
(`calibration.student`).
Letters: N candidates, Q shared directions, n observations, A and B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.calibration import student
from planner.calibration.correlated import CorrelatedErrors
from planner.columns import FloatColumn, IntColumn

JITTER = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation of the error.

    row: the candidate, for an observation of one.
    loading (Q,): weights of shared directions, as a micro-probe gives.
    value: observed less predicted, in logs.
    variance: of the observation's own noise.
    """

    row: int | None
    value: float
    variance: float
    loading: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ErrorPosterior:
    """The errors after n observations.

    mean (N,): expected error.
    scale: see the module.
    seen: the observations.
    columns (n, N): prior covariance of every candidate with each observation, before scaling.
    lower (n, n): Cholesky factor of the covariance of the observations, noise included.
    """

    field: CorrelatedErrors
    seen: tuple[Observation, ...]
    mean: FloatColumn
    scale: float
    columns: FloatColumn
    lower: FloatColumn

    @cached_property
    def variance(self) -> FloatColumn:
        """Variance of every candidate's error, (N,), run-to-run noise left out."""
        white = _whitened(self.lower, self.scale**2 * self.columns)
        prior = self.scale**2 * self.field.variance
        return np.asarray(np.maximum(prior - np.einsum("nr,nr->r", white, white), JITTER))

    def covariance(self, rows: IntColumn) -> FloatColumn:
        """Covariance of the errors of these rows among themselves, (A, A)."""
        white = _whitened(self.lower, self.scale**2 * self.columns[:, rows])
        return np.asarray(self.scale**2 * self.field.between(rows, rows) - white.T @ white)

    def with_row(self, row: int) -> FloatColumn:
        """Covariance of every candidate's error with that of one, (N,)."""
        column = self.field.column(row)
        gain = _solved(self.lower, self.scale**2 * self.columns[:, row])
        return np.asarray(self.scale**2 * (column - gain @ self.columns))

    def along_each(self, loadings: Sequence[Sequence[float]]) -> tuple[FloatColumn, FloatColumn]:
        """Covariance with every candidate's error (E, N), and variance (E,), of E weighted sums.

        loadings (E, Q): weights of the shared directions in each.
        """
        weights = np.array(loadings)
        columns = weights @ self.field.factor.T
        inner = self.scale**2 * np.array(
            [
                columns[:, one.row] if one.row is not None else weights @ np.array(one.loading)
                for one in self.seen
            ]
        ).reshape(len(self.seen), len(weights))
        gains = _solved(self.lower, inner)
        effects = self.scale**2 * (columns - gains.T @ self.columns)
        own = self.scale**2 * (weights**2).sum(axis=1) - (gains * inner).sum(axis=0)
        return effects, np.maximum(own, JITTER)


def condition(prior: CorrelatedErrors, seen: Sequence[Observation]) -> ErrorPosterior:
    """The posterior of the errors given these observations.

    scale^2 = (degrees + y^T (K + noise)^-1 y) / (degrees + n): a multivariate t given n of its
    values y has this times the covariance of a normal distribution. A few runs of near twins that
    are as predicted leave other layouts nearly as uncertain.
    Source: Ding 2016, On the Conditional Distribution of the Multivariate t Distribution.
    """
    count = len(seen)
    columns = np.array([_column(prior, one) for one in seen]).reshape(count, len(prior.sd))
    inner = np.array(
        [[_entry(prior, columns[i], seen[i], other) for other in seen] for i in range(count)]
    ).reshape(count, count)
    values = np.array([one.value for one in seen])
    noise = np.diag([one.variance + JITTER for one in seen]) if count else np.zeros((0, 0))
    white = _whitened(np.linalg.cholesky(inner + noise), values)
    scale = float(np.sqrt((student.DEGREES + white @ white) / (student.DEGREES + count)))
    lower = np.linalg.cholesky(scale**2 * inner + noise)
    mean = scale**2 * (_solved(lower, values) @ columns)
    return ErrorPosterior(
        field=prior, seen=tuple(seen), mean=mean, scale=scale, columns=columns, lower=lower
    )


def _whitened(lower: FloatColumn, values: FloatColumn) -> FloatColumn:
    """L^-1 values: their squares sum to values^T (L L^T)^-1 values."""
    return np.asarray(np.linalg.solve(lower, values))


def _solved(lower: FloatColumn, values: FloatColumn) -> FloatColumn:
    """(L L^T)^-1 values."""
    return np.asarray(np.linalg.solve(lower.T, np.linalg.solve(lower, values)))


def _column(prior: CorrelatedErrors, one: Observation) -> FloatColumn:
    return prior.column(one.row) if one.row is not None else prior.factor @ np.array(one.loading)


def _entry(
    prior: CorrelatedErrors, column: FloatColumn, one: Observation, other: Observation
) -> float:
    """Covariance of two observations before any noise."""
    if other.row is not None:
        return float(column[other.row])
    if one.row is not None:
        return float(prior.factor[one.row] @ np.array(other.loading))
    return float(np.array(one.loading) @ np.array(other.loading))
