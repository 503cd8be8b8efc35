"""The posterior of a study: step time and memory of every candidate, and which are promising.

Letters: N candidates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.study import normal
from planner.study.records import Record
from planner.study.regret import ExpectedRegret, expected_regret
from planner.study.surrogate import ErrorPosterior

RIVALS = 128  # candidates in the regret: those with the largest expected improvement


@dataclass(frozen=True, kw_only=True)
class StudyPosterior:
    """The posterior of step time and memory of every candidate at one point of the study.

    log_seconds (N,): expected log step seconds, by measurements and model together.
    winner: the answer so far, the fastest layout that ran itself; the leader if none has.
    leader: the fastest expected of all measured ones, at any fidelity; before the first, the
        fastest expected that fits. Proposals are compared with it.
    measured: whether anything was measured.
    fits, barred (N,): whether memory is known to suffice, whether it is excluded.
    log_share (N,): log of predicted over usable memory.
    believed: records of candidates that ran themselves, by row.
    """

    time: ErrorPosterior
    memory: ErrorPosterior
    log_seconds: FloatColumn
    winner: int
    leader: int
    measured: bool
    fits: BoolColumn
    barred: BoolColumn
    log_share: FloatColumn
    believed: Mapping[int, Record]
    known_regrets: dict[int, ExpectedRegret] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def best(self) -> float:
        """Expected log seconds of the leader."""
        return float(self.log_seconds[self.leader])

    def expected_seconds(self, row: int) -> float:
        """Seconds of a step: as measured if that is believed, else from the posterior."""
        record = self.believed.get(row)
        own = None if record is None else record.log_seconds
        return float(np.exp(self.log_seconds[row] if own is None else own))

    @cached_property
    def risk(self) -> FloatColumn:
        """P(device memory > usable), (N,); 0 for what ran and what needs no more than that."""
        return np.where(self.fits, 0.0, risk_of(self.log_share, self.memory))

    @cached_property
    def improvement(self) -> FloatColumn:
        """Expected improvement over the best in log seconds, about a share of the step, (N,).

        On condition that the layout fits.
        """
        return normal.expected_excess(self.log_seconds - self.best, np.sqrt(self.time.variance))

    def regret(self, *, seed: int = 0, of: int | None = None) -> ExpectedRegret:
        """Expected regret of the winner, or of row `of`, against all that are not ruled out.

        A candidate that ran enters with its own time and noise, not with its posterior.
        """
        compared = self.winner if of is None else of
        if compared not in self.known_regrets:
            rivals = self.promising(~self.barred, RIVALS)
            rows = np.array([compared, *(row for row in rivals if row != compared)])
            mean, covariance = self.log_seconds[rows], self.time.covariance(rows)
            for index, row in enumerate(rows):
                record = self.believed.get(int(row))
                if record is not None:
                    mean[index], covariance[index], covariance[:, index] = (
                        record.log_seconds,
                        0.0,
                        0.0,
                    )
                    covariance[index, index] = record.variance
            self.known_regrets[compared] = expected_regret(
                mean, covariance, 1.0 - self.risk[rows], 0, seed=seed
            )
        return self.known_regrets[compared]

    def promising(self, allowed: BoolColumn, count: int, *, risk_limit: float = 1.0) -> list[int]:
        """The allowed rows with the largest expected improvement x P(fits), best first.

        At most `count` of them, none with a risk of running out of memory above risk_limit.
        """
        rows = np.flatnonzero(allowed & (self.risk <= risk_limit))
        value = self.improvement[rows] * (1.0 - self.risk[rows])
        best = np.argsort(-value, kind="stable")[:count]
        return [int(row) for row in rows[best]]


def risk_of(log_share: FloatColumn, memory: ErrorPosterior) -> FloatColumn:
    """P(device memory > usable) of every candidate, (N,).

    log_share (N,): log of predicted over usable memory.
    """
    distance = -(log_share + memory.mean)
    return normal.upper_tail(distance / np.sqrt(memory.variance))
