"""Which layout to put first: the simplest of those that the model cannot tell from the best.

docs/decisions/0006 gives the reasons.

1. What may come first at all (`eligible`): nobody gives up more than MOST_GIVEN_UP of the speed on
    paper, of those layouts that can be launched as they are. What no run supports
    (`Mechanism.leads`: exchanges, memory budgets) is no speed, and a layout that runs out of memory
    in more than 1 of 100 runs (MOST_RISK) wants a probe first: both stand back where others come
    near.
2. Expected seconds are predicted seconds / (1 - P(out of memory))^RISK: a run that crashes has
    trained nothing, and somebody has to start another. They are UNPROVEN longer, and as much less
    certain, for every mechanism that no run behind the calibration used: a part of an unmeasured
    gain will not be real.
3. A layout cannot be told from the best if it is slower by less than SURE deviations of
    the *difference* of the two predictions, and by less than MOST_GIVEN_UP however certain
    the model is.
4. Of those, the one with the lowest value  log(expected seconds) + WORTH x points  comes first: a
    mechanism has to gain WORTH per point. Points are whole, so values less than half a point apart
    are equal: of equals the one whose widest group of ranks is narrowest comes first, then the one
    of fewest points. Then the same is asked of it: one of fewer points that is not SURE deviations
    behind replaces it.
5. If that one rests on what nobody measured, it stays only if it is faster than the best layout
    that does not by more than SURE deviations of what its mechanisms alone leave in doubt.

All candidates run on one stack, so two predictions err against each other by less than each errs by
itself (`spread_within_stack`). What the calibration's posterior shares cancels, and so does most of
a layout's own error if the two layouts are similar (`calibration.similarity`). Two budgets of one
layout can be distinguished at 1%, a pipeline and plain FSDP at about 5%.
Letters: N candidates, K of them near the best.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.calibration.basis import unseen_mechanisms, uses
from planner.calibration.correlated import CorrelatedErrors
from planner.calibration.intervals import TimeSpread, time_spread
from planner.calibration.mechanisms import points
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.columns.table import Table
from planner.cost.price import Pricer
from planner.specs.plan import MOST_RISK
from planner.trainers.registry import code_of

SURE = 1.0  # deviations: with a probability of five in six the one ahead is truly faster
MOST_GIVEN_UP = 0.05  # judgement: nobody gives up more than this for a simpler launch
WORTH = 0.02  # judgement: what a point has to gain
# Judgement: what a run that dies of memory costs, in runs: itself, and as much until somebody has
# found out, changed the layout and got the GPUs again. One percent of risk weighs as one point.
RISK = 2.0
# judgement: the share of a predicted gain that is lost if the mechanism is unmeasured
UNPROVEN = 0.03
PER_CLASS = 8  # candidates with equally many points that are compared
# Judgement: beside layouts this much slower, one that rests on an exchange without runs may lead,
# or one that runs out of memory more often than MOST_RISK.
FAR_BEHIND = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed(Table):
    """The mechanisms of N layouts.

    points (N,): the sum over the mechanisms that each layout uses.
    unmeasured (U, N): which of the U mechanisms it uses that no run behind the calibration used
        (`calibration.basis`), at every size. What all layouts of a job use is left out.
    supported (N,): whether it does without those among them that may not lead.
    """

    points: IntColumn
    unmeasured: BoolColumn
    supported: BoolColumn

    @classmethod
    def of(cls, batch: LayoutBatch, pricer: Pricer) -> "Weighed":
        lacking = [one for one in unseen_mechanisms(pricer.calibration, pricer) if not one.of_job]
        counts = np.array([not one.practised(pricer) for one in lacking], dtype=np.bool_)
        unmeasured = (uses(batch, pricer, lacking) & counts).T
        following = np.array([not one.leads for one in lacking], dtype=np.bool_)
        return cls(
            points=points(batch, pricer),
            unmeasured=unmeasured,
            supported=np.asarray(~unmeasured[following].any(axis=0)),
        )

    @property
    def proven(self) -> BoolColumn:
        """Whether a layout does without unmeasured mechanisms, (N,).

        What all of them use tells none apart and does not count.
        """
        some = self.unmeasured & ~self.unmeasured.all(axis=1, keepdims=True)
        return np.asarray(~some.any(axis=0))

    def expected(self, scores: FloatColumn, oom: FloatColumn) -> FloatColumn:
        """Scores (seconds, dollars, joules) over the chance to finish to the power of RISK, (N,).

        They are longer for unmeasured mechanisms.
        """
        unproven = np.exp(UNPROVEN * self.unmeasured.sum(axis=0))
        return np.asarray(scores * unproven / np.maximum(1.0 - oom, 1e-9) ** RISK)


def eligible(
    weighed: Weighed, scores: FloatColumn, expected: FloatColumn, oom: FloatColumn
) -> FloatColumn:
    """The expected scores, infinite for layouts that may not come first (rule 1), (N,).

    scores (N,): on paper; infinite for those that are out anyway.
    """
    able = np.isfinite(scores)
    for wanted in (weighed.supported, oom <= MOST_RISK):
        fewer = np.where(able & wanted, scores, np.inf)
        if fewer.min() <= FAR_BEHIND * scores[able].min():
            able &= wanted
    near = scores <= scores[able].min() * (1.0 + MOST_GIVEN_UP)
    return np.where(able & near, expected, np.inf)


def leaders(scores: FloatColumn, points: IntColumn, count: int = PER_CLASS) -> IntColumn:
    """Rows of the `count` lowest scores among those with equally many points.

    Fewest points come first. scores, points (N,).
    """
    order = np.lexsort((scores, points))
    _, first, sizes = np.unique(points[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(first, sizes)
    return np.asarray(order[place < count])


def spread_within_stack(pricer: Pricer, batch: LayoutBatch) -> TimeSpread:
    """Scales of log step seconds of N layouts of one job, for comparing them with each other.

    They run on one stack. So a layout's own error is what the runs of one stack scatter by among
    each other (`Calibration.own_run_sd`), not what runs of all stacks scatter by around the model.
    What was not measured does not widen it: `basis.WIDER` is how far whole stacks were off, which
    the layouts of a job share. An unmeasured mechanism is a direction that moves the layouts that
    use it by UNPROVEN.
    """
    found = time_spread(pricer, batch, pricer.price(batch))
    trainer, family = code_of(pricer.training), pricer.cluster.gpu.family
    _, rest = pricer.calibration.directions(trainer, family)
    unproven = UNPROVEN * Weighed.of(batch, pricer).unmeasured
    return replace(
        found,
        loadings=np.vstack([found.loadings, unproven]),
        own_sd=np.full(len(batch), np.sqrt(rest + pricer.calibration.own_run_sd**2)),
    )


def difference_sd(errors: CorrelatedErrors, row: int) -> FloatColumn:
    """Standard deviation of log(time of each layout / time of this one), (N,)."""
    squared = errors.variance + errors.variance[row] - 2.0 * errors.column(row)
    return np.asarray(np.sqrt(np.maximum(squared, 0.0)))


def widest_group(x: LayoutBatch) -> IntColumn:
    """Ranks of the widest group that each layout keeps in step, (N,).

    Tensor, context and pipeline ranks, those that experts are spread over, and those that the
    weights of a microbatch are gathered from. Who meets once a step does not count: replicas, and
    the shards of a pipeline that keeps its weights (ZeRO 1 and 2).
    """
    once = (x.zero_stage < 2) | ((x.zero_stage == 2) & (x.pp > 1))
    gathered = np.where(once, 1, x.dp_shard * x.cp)
    return np.asarray(np.max([x.tp, x.cp, x.pp, x.ep * x.etp, gathered], axis=0))


def prefer(
    layouts: LayoutBatch,
    weighed: Weighed,
    expected: FloatColumn,
    global_batch_size: int,
    spread: TimeSpread,
) -> int:
    """Row of the layout to put first.

    expected (N,): see `eligible`; infinite for those that may not come first.
    spread: of their times (`spread_within_stack`).
    """
    simplest = partial(_simplest, layouts, weighed, global_batch_size, spread)
    first, proven = simplest(expected), weighed.proven & np.isfinite(expected)
    if proven[first] or not proven.any():
        return first
    measured = simplest(np.where(proven, expected, np.inf))
    gain = np.log(expected[measured] / expected[first])
    apart = int((weighed.unmeasured[:, first] != weighed.unmeasured[:, measured]).sum())
    doubt = UNPROVEN * np.sqrt(apart)
    return first if gain > SURE * doubt else measured


def _simplest(
    layouts: LayoutBatch,
    weighed: Weighed,
    global_batch_size: int,
    spread: TimeSpread,
    expected: FloatColumn,
) -> int:
    """Row of the simplest of those that cannot be told from the best (rules 3 and 4)."""
    near = np.flatnonzero(expected <= expected.min() * (1.0 + MOST_GIVEN_UP))
    near = near[leaders(expected[near], weighed.points[near])]
    points, batch = weighed.points[near], layouts.take(near)
    errors = CorrelatedErrors.of(batch, spread.take(near), global_batch_size)
    # A less certain prediction counts as slower: the mean of a log-normal is exp(sd^2 / 2)
    # times its median.
    mean = np.log(expected[near]) + (errors.variance - errors.variance.min()) / 2.0
    chosen, reference = int(np.lexsort((points, mean))[0]), -1
    able = mean - mean[chosen] <= np.log1p(MOST_GIVEN_UP)
    while chosen != reference:
        reference = chosen
        alike = able & (mean - mean[reference] <= SURE * difference_sd(errors, reference))
        value = np.where(alike, mean + WORTH * points, np.inf)
        unequal = value > value.min() + WORTH / 2.0
        chosen = int(np.lexsort((np.round(value, 9), points, widest_group(batch), unequal))[0])
        able &= points < points[chosen]
        able[chosen] = True
    return int(near[chosen])
