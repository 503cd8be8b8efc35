"""Which layout to put first: the simplest of those that the model cannot tell from the best.
docs/decisions/0006 says why.

  1. Expected seconds are predicted seconds / (1 - P(out of memory)): a run that dies has trained
  nothing. For every mechanism that no
     published run has they are UNPROVEN longer, and as much less sure: of gains that nobody
     measured a part will not be there.
  2. A layout cannot be told from the best while it is behind by less than SURE deviations of the
  *difference* of the two predictions,
     and by less than MOST_GIVEN_UP whatever the model thinks of itself.
  3. Of those the one with the lowest  log(expected seconds) + WORTH x points  comes first: a
  mechanism has to bring WORTH a point.

Errors of two layouts are correlated: what the calibration's posterior shares cancels, and so does
most of a layout's own error where two layouts are alike (`calibration.likeness`). Two budgets of
one layout are told apart at 1%, a pipeline from plain FSDP at about 5%.
Letters: N candidates, K of them near the best.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.calibration.correlated import CorrelatedErrors
from planner.calibration.intervals import TimeSpread
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.search.choice import mechanisms

SURE = 1.0  # deviations: five in six that the one ahead is truly faster
MOST_GIVEN_UP = 0.05  # judgement: more than this nobody gives up for a simpler launch
WORTH = 0.02  # judgement: what a point has to bring
# judgement: the share of a prediction that is lost where nobody has measured a mechanism
UNPROVEN = 0.03
PER_CLASS = 8  # candidates with equally many points that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """points (N,): of what each layout uses.  unmeasured (N, U): which of the mechanisms that
    nobody measured it uses.
    """

    points: IntColumn
    unmeasured: BoolColumn

    @classmethod
    def of(cls, batch: LayoutBatch, pricer: Pricer) -> "Weighed":
        """By the table of mechanisms, in the pricer's job."""
        setting = mechanisms.MechanismContext.of(pricer.model, pricer.cluster)
        return cls(
            points=mechanisms.points(batch, setting),
            unmeasured=mechanisms.unmeasured(batch, setting),
        )

    @property
    def proven(self) -> BoolColumn:
        """Where every mechanism has a published run, (N,)."""
        return np.asarray(~self.unmeasured.any(axis=1))

    def take(self, rows: IntColumn) -> "Weighed":
        """Of these layouts."""
        return Weighed(points=self.points[rows], unmeasured=self.unmeasured[rows])

    def expected(self, scores: FloatColumn, oom: FloatColumn) -> FloatColumn:
        """Scores (seconds, dollars, joules) over the chance to finish, longer where unproven,
        (N,).
        """
        unproven = np.exp(UNPROVEN * self.unmeasured.sum(axis=1))
        return np.asarray(scores * unproven / np.maximum(1.0 - oom, 1e-9))


def leaders(scores: FloatColumn, points: IntColumn, count: int = PER_CLASS) -> IntColumn:
    """Rows of the `count` lowest scores among those with equally many points, fewest points first.
    scores, points (N,).
    """
    order = np.lexsort((scores, points))
    _, first, sizes = np.unique(points[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(first, sizes)
    return np.asarray(order[place < count])


def difference_sd(errors: CorrelatedErrors, weighed: Weighed, row: int) -> FloatColumn:
    """Standard deviation of log(time of each layout / time of this one), (N,). weighed: of the same
    layouts.
    """
    squared = errors.variance + errors.variance[row] - 2.0 * errors.column(row)
    unproven = (weighed.unmeasured != weighed.unmeasured[row]).sum(axis=1)
    squared = np.maximum(squared, 0.0) + UNPROVEN**2 * unproven
    return np.asarray(np.sqrt(squared))


def prefer(
    layouts: LayoutBatch,
    weighed: Weighed,
    expected: FloatColumn,
    global_batch_size: int,
    spread_of: Callable[[IntColumn], TimeSpread],
) -> int:
    """Row of the layout to put first. expected (N,): see `Weighed.expected`.  spread_of: how sure
    the time of some of them is.
    """
    near = np.flatnonzero(expected <= expected.min() * (1.0 + MOST_GIVEN_UP))
    near = near[leaders(expected[near], weighed.points[near])]
    weighed = weighed.take(near)
    points = weighed.points
    spread = spread_of(near)
    errors = CorrelatedErrors.of(layouts.take(near), spread, global_batch_size)
    # A prediction that is less sure counts as slower: the mean of a log-normal is exp(sd^2 / 2)
    # times its median.
    mean = np.log(expected[near]) + (errors.variance - errors.variance.min()) / 2.0
    best = int(np.lexsort((points, mean))[0])
    tolerance = np.minimum(SURE * difference_sd(errors, weighed, best), np.log1p(MOST_GIVEN_UP))
    value = np.where(mean - mean[best] <= tolerance, mean + WORTH * points, np.inf)
    chosen = int(np.lexsort((points, np.round(value, 9)))[0])
    return int(near[chosen])
