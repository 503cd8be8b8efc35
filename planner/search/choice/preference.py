"""Which layout to put first: the simplest of those that the model cannot tell from the best.

docs/decisions/0006 gives the reasons.

1. Expected seconds are predicted seconds / (1 - P(out of memory)): a run that crashes has trained
    nothing. They are UNPROVEN longer, and as much less certain, for every mechanism that no run
    behind the calibration used: a part of an unmeasured gain will not be real.
2. A layout cannot be told from the best if it is slower by less than SURE deviations of
    the *difference* of the two predictions, and by less than MOST_GIVEN_UP however certain
    the model is.
3. Of those, the one with the lowest  log(expected seconds) + WORTH x points  comes first: a
    mechanism has to gain WORTH per point.
4. If that one rests on what nobody measured, it stays only if it is faster than the best layout
    that does not by more than SURE deviations of their difference, which is its own doubt:
    predictions of unmeasured mechanisms are wider (`calibration.basis.widening`).

Errors of two layouts are correlated. What the calibration's posterior shares cancels, and so does
most of a layout's own error if the two layouts are similar (`calibration.similarity`). Two budgets
of one layout can be distinguished at 1%, a pipeline and plain FSDP at about 5%.
Letters: N candidates, K of them near the best.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.calibration.basis import unmeasured_mechanisms, uses
from planner.calibration.correlated import CorrelatedErrors
from planner.calibration.intervals import TimeSpread
from planner.calibration.mechanisms import points
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import Pricer

SURE = 1.0  # deviations: with a probability of five in six the one ahead is truly faster
MOST_GIVEN_UP = 0.05  # judgement: nobody gives up more than this for a simpler launch
WORTH = 0.02  # judgement: what a point has to gain
# judgement: the share of a predicted gain that is lost if the mechanism is unmeasured
UNPROVEN = 0.03
PER_CLASS = 8  # candidates with equally many points that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The mechanisms of N layouts.

    points (N,): the sum over the mechanisms that each layout uses.
    unmeasured (N, U): which of the U mechanisms it uses that no run behind the calibration used
        (`calibration.basis`). What all layouts of a job use tells none of them apart: left out.
    """

    points: IntColumn
    unmeasured: BoolColumn

    @classmethod
    def of(cls, batch: LayoutBatch, pricer: Pricer) -> "Weighed":
        """From the table of mechanisms, for the pricer's job."""
        lacking = [
            one for one in unmeasured_mechanisms(pricer.calibration, pricer) if not one.of_job
        ]
        return cls(points=points(batch, pricer), unmeasured=uses(batch, pricer, lacking))

    @property
    def proven(self) -> BoolColumn:
        """Whether a layout does without unmeasured mechanisms, (N,).

        What all of them use tells none apart and does not count.
        """
        some = self.unmeasured & ~self.unmeasured.all(axis=0)
        return np.asarray(~some.any(axis=1))

    def take(self, rows: IntColumn) -> "Weighed":
        """The mechanisms of these layouts."""
        return Weighed(points=self.points[rows], unmeasured=self.unmeasured[rows])

    def expected(self, scores: FloatColumn, oom: FloatColumn) -> FloatColumn:
        """Scores (seconds, dollars, joules) over the chance to finish, (N,).

        They are longer for unmeasured mechanisms.
        """
        unproven = np.exp(UNPROVEN * self.unmeasured.sum(axis=1))
        return np.asarray(scores * unproven / np.maximum(1.0 - oom, 1e-9))


def leaders(scores: FloatColumn, points: IntColumn, count: int = PER_CLASS) -> IntColumn:
    """Rows of the `count` lowest scores among those with equally many points.

    Fewest points come first. scores, points (N,).
    """
    order = np.lexsort((scores, points))
    _, first, sizes = np.unique(points[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(first, sizes)
    return np.asarray(order[place < count])


def difference_sd(errors: CorrelatedErrors, weighed: Weighed, row: int) -> FloatColumn:
    """Standard deviation of log(time of each layout / time of this one), (N,).

    weighed: of the same layouts.
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
    """Row of the layout to put first.

    expected (N,): see `Weighed.expected`; infinite for those that may not come first.
    spread_of: the uncertainty of the times of some of them.
    """

    def simplest(among: FloatColumn) -> int:
        return _simplest(layouts, weighed, among, global_batch_size, spread_of)

    first, proven = simplest(expected), weighed.proven & np.isfinite(expected)
    if proven[first] or not proven.any():
        return first
    pair = np.array([first, simplest(np.where(proven, expected, np.inf))])
    errors = CorrelatedErrors.of(layouts.take(pair), spread_of(pair), global_batch_size)
    mean = np.log(expected[pair]) + errors.variance / 2.0
    doubt = SURE * difference_sd(errors, weighed.take(pair), 0)[1]
    return int(pair[0] if mean[1] - mean[0] > doubt else pair[1])


def _simplest(
    layouts: LayoutBatch,
    weighed: Weighed,
    expected: FloatColumn,
    global_batch_size: int,
    spread_of: Callable[[IntColumn], TimeSpread],
) -> int:
    """Row of the simplest of those that cannot be told from the best (rules 1 to 3)."""
    near = np.flatnonzero(expected <= expected.min() * (1.0 + MOST_GIVEN_UP))
    near = near[leaders(expected[near], weighed.points[near])]
    weighed = weighed.take(near)
    points = weighed.points
    spread = spread_of(near)
    errors = CorrelatedErrors.of(layouts.take(near), spread, global_batch_size)
    # A less certain prediction counts as slower: the mean of a log-normal is exp(sd^2 / 2)
    # times its median.
    mean = np.log(expected[near]) + (errors.variance - errors.variance.min()) / 2.0
    best = int(np.lexsort((points, mean))[0])
    tolerance = np.minimum(SURE * difference_sd(errors, weighed, best), np.log1p(MOST_GIVEN_UP))
    value = np.where(mean - mean[best] <= tolerance, mean + WORTH * points, np.inf)
    chosen = int(np.lexsort((points, np.round(value, 9)))[0])
    return int(near[chosen])
