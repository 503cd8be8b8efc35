"""Scores of nights, and how much they scatter and resemble each other.

Everything is found from differences of neighbouring nights, which a change of level leaves be.
Letters: A layouts, F families of layouts, T nights.
"""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from planner.calibration.drift.nights import BoolTable
from planner.calibration.intervals import upper_tail
from planner.columns import FloatColumn

WINDOW = 120  # nights that are looked back
FEWEST_BEFORE, FEWEST_AFTER = 3, 2  # nights on either side of a change
# Judgements, each worth so many nights until a history speaks for itself: nights differ by 1%, two
# layouts share a third of that, and a night resembles the one before by a tenth. Pairs of
# neighbouring nights: of all layouts, and of one family against all.
NIGHT_SD, SHARED, CARRIED = 0.01, 0.3, 0.1
PRIOR_NIGHTS, PRIOR_PAIRS, FAMILY_PAIRS = 8.0, 30.0, 90.0
MOST_CARRIED = 0.8
WINSOR, WINSORED = 2.0, 0.9205  # scores are cut there; a standard normal's square has this mean
MEDIAN_NORMAL = 0.6745  # median of |x|, x standard normal
MEDIAN_DIFFERENCE = 0.8  # median of |x - y| / sqrt(2): 0.67 of normal x, y; 0.81 of Student's t
FAR = 1.268  # scores of t with four degrees of freedom of so many normal ones have variance 1
AS_LIKELY = 3.84  # twice the log likelihood that a split may lose and still be where it changed
RECENT = 7  # newest nights that say nothing about noise
TOGETHER = 2  # nights between the first nights of layouts that changed together
MOST_MOVED = 5  # nights by which later ones may move the first night of a change
OUTLIER = 0.01  # nights on which some layout is called an outlier though nothing happened
COVERAGE = 0.9
RECOVERED_NIGHTS = 3  # of a slow host as fast as others, after which it counts again


def scales(steps: FloatColumn, counts: FloatColumn) -> FloatColumn:
    """Scale of each layout's log seconds, (A,), from differences of neighbouring nights (A, T).

    A level that has changed once hardly moves their median, and a steady slope is taken off. Few
    nights lean on those of the other layouts, and those on `NIGHT_SD`.
    """
    enough = counts > 1
    slope = np.where(enough, median_rows(steps), 0.0)
    width = median_rows(np.abs(steps - slope[:, None])) / MEDIAN_DIFFERENCE
    degrees = np.where(enough, counts - 1.0, 0.0)
    square = np.where(enough, np.nan_to_num(width) ** 2, 0.0) * np.where(
        enough, counts / np.maximum(degrees, 1.0), 0.0
    )
    pooled = (0.5 * PRIOR_NIGHTS * NIGHT_SD**2 + (degrees * square).sum()) / (
        0.5 * PRIOR_NIGHTS + degrees.sum()
    )
    return np.asarray(
        np.sqrt((PRIOR_NIGHTS * pooled + degrees * square) / (PRIOR_NIGHTS + degrees))
    )


def from_then_on(table: BoolTable) -> BoolTable:
    """Whether it is so on this night or a later one, (A, T)."""
    return np.asarray(np.logical_or.accumulate(table[:, ::-1], axis=1)[:, ::-1])


def settled(steps: FloatColumn) -> FloatColumn:
    """Differences (F, T) without those of the newest nights, where as many others are left.

    A change that has just begun shall not pass for noise.
    """
    older = np.isfinite(steps[:, :-RECENT]).sum(axis=1) >= RECENT
    newest = np.arange(steps.shape[1]) >= steps.shape[1] - RECENT
    return np.asarray(np.where(older[:, None] & newest, np.nan, steps))


def normal_steps(scores: FloatColumn) -> FloatColumn:
    """Differences to the last score before over sqrt(2), (F, T), detrended; NaN where none."""
    count = scores.shape[1]
    known = np.isfinite(scores)
    place = np.where(known, np.arange(count), -1)
    before = np.maximum.accumulate(place, axis=1)
    before = np.hstack([np.full((len(scores), 1), -1), before[:, :-1]])
    earlier = np.take_along_axis(scores, np.maximum(before, 0), axis=1)
    steps = np.where(known & (before >= 0), (scores - earlier) / np.sqrt(2.0), np.nan)
    return detrended(settled(steps))


def detrended(steps: FloatColumn) -> FloatColumn:
    """Differences (F, T) without a steady slope, cut at WINSOR deviations."""
    count = np.isfinite(steps).sum(axis=1)[:, None]
    slope = np.where(count > 1, median_rows(steps)[:, None], 0.0)
    steps = (steps - slope) * np.sqrt(count / np.maximum(count - (count > 1), 1))
    middle = median_rows(np.abs(steps))[:, None] / MEDIAN_NORMAL
    most = WINSOR * np.where(middle > 0, middle, np.inf)
    return np.asarray(np.clip(steps, -most, most))


def carried_share(steps: FloatColumn, prior: float, prior_pairs: float) -> float:
    """Correlation of neighbouring nights, from differences (F, T) that a change of level leaves be.

    Neighbouring differences of an AR(1) series are correlated by -(1 - r) / 2. One standard error
    is added: what is carried over looks like a change, so too little of it raises false alarms.
    """
    one, two = steps[:, :-1], steps[:, 1:]
    both = np.isfinite(one) & np.isfinite(two)
    pairs = float(both.sum())
    square = float((0.5 * (one[both] ** 2 + two[both] ** 2)).sum())
    margin = 1.0 / np.sqrt(prior_pairs + pairs)
    if not pairs or not square:
        return float(prior + margin)
    found = 1.0 + 2.0 * float((one[both] * two[both]).sum()) / square
    mixed = (prior_pairs * prior + pairs * found) / (prior_pairs + pairs)
    return float(np.clip(mixed + margin, 0.0, MOST_CARRIED))


def variance_of(
    steps: FloatColumn, carried: float | FloatColumn, prior: float | FloatColumn
) -> FloatColumn:
    """Variance of the scores of each row, (F,), from their differences (F, T).

    prior: as good as so many nights.
    """
    square = np.nansum(steps**2, axis=1) / WINSORED / (1.0 - np.asarray(carried))
    count = np.isfinite(steps).sum(axis=1)
    return np.asarray((PRIOR_NIGHTS * prior + square) / (PRIOR_NIGHTS + count))


def mean_variance(
    count: FloatColumn | NDArray[np.int64], carried: float | FloatColumn
) -> FloatColumn:
    """Variance of the mean of so many scores in a row, each resembling the one before."""
    n, r = np.maximum(count, 1).astype(np.float64), np.asarray(carried)
    return np.asarray(((1 + r) / (1 - r) - 2 * r * (1 - r**n) / (n * (1 - r) ** 2)) / n)


def two_levels(scores: FloatColumn, carried: FloatColumn, degrees: FloatColumn) -> FloatColumn:
    """Evidence (F, T) that scores differ before and from each night on; 0 where too few."""
    known = np.isfinite(scores)
    values = np.where(known, scores, 0.0)
    n, total = np.cumsum(known, axis=1), np.cumsum(values, axis=1)
    before, sums = n - known, total - values
    after = n[:, -1:] - before
    r = carried[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = (total[:, -1:] - sums) / after - sums / before
        evidence = np.abs(gap) / np.sqrt(mean_variance(before, r) + mean_variance(after, r))
    enough = known & (before >= FEWEST_BEFORE) & (after >= FEWEST_AFTER)
    return np.where(enough, as_normal(np.nan_to_num(evidence), degrees[:, None]), 0.0)


def as_normal(values: FloatColumn, degrees: float | FloatColumn) -> FloatColumn:
    """The normal deviate as rare as these of Student's t with so many degrees of freedom.

    Source: Wallace 1959, Bounds on normal approximations to Student's and the chi-square
    distributions.
    """
    finite = np.minimum(degrees, 1e6)
    shrink = (8.0 * finite + 1.0) / (8.0 * finite + 3.0)
    return np.asarray(np.sign(values) * shrink * np.sqrt(finite * np.log1p(values**2 / finite)))


def student_quantile(probability: float, degrees: float) -> float:
    """The value that Student's t exceeds with 1 - probability, as `as_normal` has it."""
    z = NormalDist().inv_cdf(probability) * (8.0 * degrees + 3.0) / (8.0 * degrees + 1.0)
    return float(np.sqrt(degrees * np.expm1(z * z / degrees)))


def median_rows(values: FloatColumn) -> FloatColumn:
    """Median of each row without NaN, (A,); NaN of an empty one."""
    ordered = np.sort(values, axis=1)  # NaN last
    count = np.isfinite(values).sum(axis=1)
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    rows = np.arange(len(values))
    high = np.minimum(high, np.maximum(count - 1, 0))
    return np.asarray(0.5 * (ordered[rows, low] + ordered[rows, high]))


def mean_rows(values: FloatColumn) -> FloatColumn:
    """Mean of each row without NaN, (A,); NaN of an empty one."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0.0).sum(axis=1) / known.sum(axis=1))


def winsored_mean(values: FloatColumn, sd: float) -> float | None:
    """Mean of these, each at most WINSOR deviations from their median; None of none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    middle = float(np.median(known))
    return float(np.clip(known, middle - WINSOR * sd, middle + WINSOR * sd).mean())


def threshold_of(runs_per_false_alarm: float, series: int, window: int = WINDOW) -> float:
    """Standard deviations that a split must reach, so that one of so many series does so rarely.

    runs = sqrt(2 pi) exp(h^2 / 2) / (h * integral of x v(x)^2 dx), x from h / sqrt(window) to
    h / sqrt(fewest nights after the change)

    It is solved for h, with the runs of one series: as many times more as there are series.
    v(x): share of the overshoot, (2 / x)(F(x/2) - 1/2) / ((x/2) F(x/2) + f(x/2)), F and f of the
    standard normal.
    Source: Siegmund and Venkatraman 1995, Using the generalized likelihood ratio statistic for
    sequential detection of a change-point.
    """
    wanted = np.log(runs_per_false_alarm * max(1, series))
    low, high = 1.0, 12.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        if _log_runs(middle, window) < wanted:
            low = middle
        else:
            high = middle
    return high


def _log_runs(h: float, window: int) -> float:
    x = np.linspace(h / np.sqrt(window), h / np.sqrt(FEWEST_AFTER), 200)
    upper = 1.0 - upper_tail(x / 2.0)
    density = np.exp(-(x**2) / 8.0) / np.sqrt(2.0 * np.pi)
    overshoot = (2.0 / x) * (upper - 0.5) / (x / 2.0 * upper + density)
    area = np.trapezoid(x * overshoot**2, x)
    return float(0.5 * np.log(2.0 * np.pi) + h * h / 2.0 - np.log(h * area))
