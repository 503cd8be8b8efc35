"""The posterior of a study: step time and memory of every candidate, and which are promising.

Letters: N candidates, M rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.study import normal
from planner.study.records import Record
from planner.study.regret import ExpectedRegret, expected_regret
from planner.study.surrogate import ErrorPosterior

RIVALS = 128  # candidates in the regret: those with the largest expected improvement
# rows whose bound is computed together; rows of them that are evaluated first
CHUNK, FIRST = 8192, 256


@dataclass(frozen=True, slots=True, kw_only=True)
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
    known_promising: dict[tuple[bytes, int, float], list[int]] = field(
        default_factory=dict, compare=False, repr=False
    )
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

    def deviation(self, row: int) -> float:
        """Standard deviation of the logarithm of `expected_seconds`."""
        record = self.believed.get(row)
        own = None if record is None else record.variance
        return float(np.sqrt(self.time.variance(np.array([row]))[0] if own is None else own))

    def risk(self, rows: IntColumn) -> FloatColumn:
        """P(device memory > usable), (M,); 0 for what ran and what needs no more than that."""
        return np.where(self.fits[rows], 0.0, risk_of(self.log_share, self.memory, rows))

    def improvement(self, rows: IntColumn) -> FloatColumn:
        """Expected improvement over the best in log seconds, about a share of the step, (M,).

        On condition that the layout fits.
        """
        return normal.expected_excess(
            self.log_seconds[rows] - self.best, np.sqrt(self.time.variance(rows))
        )

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
                mean, covariance, 1.0 - self.risk(rows), 0, seed=seed
            )
        return self.known_regrets[compared]

    def promising(self, allowed: BoolColumn, count: int, *, risk_limit: float = 1.0) -> list[int]:
        """The allowed rows with the largest expected improvement x P(fits), best first.

        At most `count` of them, none with a risk of running out of memory above risk_limit.
        """
        key = (allowed.tobytes(), count, risk_limit)
        if key not in self.known_promising:
            self.known_promising[key] = self._promising(allowed, count, risk_limit)
        return self.known_promising[key]

    def _promising(self, allowed: BoolColumn, count: int, risk_limit: float) -> list[int]:
        """Exact, by two upper bounds of the value.

        Rows are visited in the order of a loose bound (variance before any observation, certain to
        fit) until it decides. Of these, only rows whose tighter bound (variance after a few
        observations) is high enough are evaluated.
        """
        rows = np.flatnonzero(allowed)
        if not len(rows):
            return []
        bound = normal.expected_excess(
            self.log_seconds[rows] - self.best, np.sqrt(self.time.widest()[rows])
        )
        chosen, values = np.zeros(0, dtype=np.int64), np.zeros(0)
        for order in _descending(bound):
            part = rows[order]
            ceiling = normal.expected_excess(
                self.log_seconds[part] - self.best, np.sqrt(self.time.at_most(part))
            )
            first = np.argsort(-ceiling, kind="stable")[:FIRST]
            chosen, values = self._best_of(chosen, values, part[first], count, risk_limit)
            ceiling[first] = -1.0
            least = values[-1] if len(values) == count else -0.5
            chosen, values = self._best_of(chosen, values, part[ceiling > least], count, risk_limit)
            if len(values) == count and bound[order].min() <= values[-1]:
                break
        return [int(row) for row in chosen]

    def _best_of(
        self, chosen: IntColumn, values: FloatColumn, more: IntColumn, count: int, risk_limit: float
    ) -> tuple[IntColumn, FloatColumn]:
        """The best `count` of the chosen rows and of more rows within the risk, with values."""
        risk = self.risk(more)
        value = np.where(risk <= risk_limit, self.improvement(more) * (1.0 - risk), -1.0)
        chosen, values = (
            np.concatenate([chosen, more[value >= 0]]),
            np.concatenate([values, value[value >= 0]]),
        )
        best = np.lexsort((chosen, -values))[:count]
        return chosen[best], values[best]


def _descending(values: FloatColumn) -> Iterator[IntColumn]:
    """Indices of the values in chunks, largest values first.

    Everything is sorted only if a second chunk is asked for.
    """
    if len(values) > CHUNK:
        first = np.argpartition(-values, CHUNK)
        yield first[:CHUNK]
        rest = first[CHUNK:]
        ordered = rest[np.argsort(-values[rest], kind="stable")]
    else:
        ordered = np.arange(len(values))
    for start in range(0, len(ordered), CHUNK):
        yield ordered[start : start + CHUNK]


def risk_of(log_share: FloatColumn, memory: ErrorPosterior, rows: IntColumn) -> FloatColumn:
    """P(device memory > usable) of these rows, (M,). log_share (N,): log predicted over usable."""
    distance = -(log_share[rows] + memory.mean[rows])
    return normal.upper_tail(distance / np.sqrt(memory.variance(rows)))
