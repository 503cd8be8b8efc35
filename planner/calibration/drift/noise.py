"""Evidence for a change of level, from the scores of the last nights.

Letters: A layouts, F families of layouts, T nights.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from planner.calibration import student
from planner.calibration.drift.findings import Outlier
from planner.calibration.drift.nights import BoolTable
from planner.calibration.drift.scores import (
    CARRIED,
    FAMILY_PAIRS,
    FAR,
    FEWEST_AFTER,
    FEWEST_BEFORE,
    OUTLIER,
    PRIOR_NIGHTS,
    PRIOR_PAIRS,
    SHARED,
    WINDOW,
    as_normal,
    carried_share,
    detrended,
    from_then_on,
    mean_rows,
    mean_variance,
    median_rows,
    normal_steps,
    scales,
    settled,
    two_levels,
    variance_of,
    winsored_mean,
)
from planner.columns import FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Families' scores (F, T), standard normal, with what their scale rests on.

    carried (F,): correlation with the night before. degrees (F,): nights behind the scale.
    night_sd (F,): of the mean of the members' scores on one night.
    """

    scores: FloatColumn
    carried: FloatColumn
    degrees: FloatColumn
    night_sd: FloatColumn


class Noise:
    """Recent nights as scores: log seconds over their level, in units of their scatter.

    first: night of the first column of all that follows. seconds (A, T): log seconds.
    level (A,): their median on the present level.
    scale (A,): of log seconds, of a Student t with four degrees of freedom, which makes a far
        reading count little more than a near one.
    scores (A, T): normal scores about the level. unit: their standard deviation before they were
        divided by it.
    carried: correlation of a score with that of the night before.
    layout_sd (A,): of log seconds.
    """

    def __init__(
        self, seconds: FloatColumn, steps: FloatColumn, starts: NDArray[np.int64], first: int
    ) -> None:
        self.first, self.seconds = first, seconds
        steps = settled(steps)
        self.counts = np.isfinite(steps).sum(axis=1).astype(np.float64)
        self.scale = scales(steps, self.counts)
        here = np.arange(first, first + seconds.shape[1]) >= starts[:, None]
        level = np.where(here, seconds, np.nan)
        self.level = median_rows(level)
        raw = self._scores(level, self.level, slice(None))
        every = as_normal(detrended(steps) / self.scale[:, None], student.DEGREES)
        self.carried = carried_share(every, CARRIED, PRIOR_PAIRS)
        self.unit = float(np.sqrt(variance_of(every.reshape(1, -1), self.carried, 1.0)[0]))
        self.scores = raw / self.unit
        self.layout_sd = self.scale * self.unit

    @classmethod
    def at(
        cls, seconds: FloatColumn, steps: FloatColumn, starts: NDArray[np.int64], night: int
    ) -> "Noise | None":
        """Noise of the nights up to this one; None where no layout has been measured often enough.

        steps (A, T): differences to the night before on the same level, over sqrt(2).
        starts (A,): first nights of the levels.
        """
        first = max(0, night + 1 - WINDOW)
        window = slice(first, night + 1)
        measured = np.isfinite(seconds[:, window]).sum(axis=1)
        if not len(measured) or measured.max() < FEWEST_BEFORE + FEWEST_AFTER:
            return None
        return cls(seconds[:, window], steps[:, window], starts, first)

    def _scores(
        self, seconds: FloatColumn, level: FloatColumn, rows: "slice | list[int]"
    ) -> FloatColumn:
        return as_normal((seconds - level[:, None]) / self.scale[rows, None], student.DEGREES)

    def series_of(self, members: BoolTable) -> Series:
        """Series of these families (F, A): their members' sums, by how much those scatter."""
        total = _sums(self.scores, members)
        steps = normal_steps(total)
        carried = np.array([carried_share(row[None], self.carried, FAMILY_PAIRS) for row in steps])
        size = members.sum(axis=1).astype(np.float64)
        variance = variance_of(steps, carried, 1.0 + (size - 1.0) * SHARED)
        alone = size == 1.0
        # one layout's scale is known already; a sum is never surer than of independent layouts
        variance = np.where(alone, 1.0, np.maximum(variance, 1.0))
        nights = np.where(alone, members @ self.counts, np.isfinite(steps).sum(axis=1))
        scores = total / np.sqrt(variance)[:, None]
        return Series(
            # a night on which all are far off counts little more than one layout that is
            scores=np.where(alone[:, None], scores, as_normal(FAR * scores, student.DEGREES)),
            carried=carried,
            degrees=PRIOR_NIGHTS + nights,
            night_sd=np.sqrt(variance / size),
        )

    def evidence(self, members: BoolTable) -> FloatColumn:
        """For a change of each family at each night, in standard deviations, (F, T)."""
        series = self.series_of(members)
        return two_levels(series.scores, series.carried, series.degrees)

    def changed(self, members: BoolTable, since: int) -> tuple[int, ...]:
        """Members that share the family's change; not those that it plainly passed by."""
        rows = np.flatnonzero(members)
        sides = self.scores[rows, : since - self.first], self.scores[rows, since - self.first :]
        before, after = (mean_rows(side) for side in sides)
        gap = np.nan_to_num(after - before)
        counts = (np.isfinite(side).sum(axis=1) for side in sides)
        sd = np.sqrt(sum(mean_variance(count, self.carried) for count in counts))
        whole = float(np.mean(gap))
        small = np.abs(gap) < student.TWO_SIDED_90 * sd
        passed_by = small & (np.abs(gap - whole) > student.TWO_SIDED_90 * sd)
        against = (np.sign(gap) != np.sign(whole)) & (np.abs(gap) > sd)
        kept = rows[~(passed_by | against)]
        return tuple(int(row) for row in (kept if len(kept) else rows))

    def likelihoods(self, rows: list[int], before: int, after: int) -> dict[int, float]:
        """Twice the log likelihood of each first night between two others, less a constant."""
        low = max(before - self.first, 0)
        part = self.seconds[rows, low : max(after - self.first, low)]
        if not part.shape[1]:
            return {}
        scores = self._scores(part, median_rows(part), rows) / self.unit
        total = _sums(scores, np.ones((1, len(rows)), dtype=np.bool_))
        found = two_levels(total, np.array([self.carried]), np.array([np.inf]))[0]
        return {
            int(at) + low + self.first: float(found[at] ** 2) for at in np.flatnonzero(found > 0)
        }

    def level_change(
        self, rows: list[int], before: int, since: int, after: int
    ) -> tuple[float, float, float]:
        """(log ratio of the levels, its standard error, degrees of freedom)."""
        at = max(since - self.first, 0)
        sides = [
            self.seconds[rows, max(before - self.first, 0) : at],
            self.seconds[rows, at : max(after - self.first, at)],
        ]
        gaps, sds = [], self.layout_sd[rows]
        for old, new, sd in zip(*sides, sds, strict=True):
            means = winsored_mean(old, sd), winsored_mean(new, sd)
            if means[0] is not None and means[1] is not None:
                gaps.append(means[1] - means[0])
        counts = np.array([np.count_nonzero(np.isfinite(side).any(axis=0)) for side in sides])
        members = np.zeros((1, len(self.scale)), dtype=np.bool_)
        members[0, rows] = True
        series = self.series_of(members)
        spread = float(np.sqrt(np.mean(sds**2)) * series.night_sd[0])
        sd = spread * float(np.sqrt(mean_variance(counts, self.carried).sum()))
        return float(np.mean(gaps)) if gaps else 0.0, sd, float(series.degrees[0])

    def host_evidence(self, on: BoolTable) -> tuple[float, int] | None:
        """(standard score of a slow host, the night since when); None without evidence.

        It compares the scores of its readings with those of other hosts over the same nights.
        A host counts where it slows two layouts, or one that ran elsewhere meanwhile.
        """
        here = on[:, self.first : self.first + self.scores.shape[1]]
        there = np.isfinite(self.scores)
        own, others = here & there, ~here & there
        if not own.any() or not others.any():
            return None
        mine, n, v = self._from_then_on(own)
        rest, m, w = self._from_then_on(others)
        nights = np.cumsum(np.asarray(own.any(axis=0))[::-1])[::-1]
        layouts = from_then_on(own)
        elsewhere = layouts & from_then_on(others)
        told_apart = (layouts.sum(axis=0) >= 2) | elsewhere.any(axis=0)
        enough = (nights >= FEWEST_AFTER) & (n >= FEWEST_BEFORE) & (m >= FEWEST_BEFORE)
        with np.errstate(invalid="ignore", divide="ignore"):
            carried = (1.0 + self.carried) / (1.0 - self.carried)
            found = (mine / n - rest / m) / np.sqrt(carried * (v / n**2 + w / m**2))
        found = np.where(enough & told_apart, found, 0.0)
        found = as_normal(found, PRIOR_NIGHTS + float(self.counts.sum()))
        at = int(np.argmax(found))
        return (float(found[at]), at + self.first) if found[at] > 0 else None

    def _from_then_on(self, table: BoolTable) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
        """Sum of these scores, their count, and the sum's variance from each night on, (T,)."""
        count = table.sum(axis=0).astype(np.float64)
        values = np.where(table, self.scores, 0.0).sum(axis=0)
        variance = count * (1.0 + np.maximum(count - 1.0, 0.0) * self._shared())
        back = [np.cumsum(one[::-1])[::-1] for one in (values, count, variance)]
        return back[0], back[1], back[2]

    def _shared(self) -> float:
        """Correlation of two layouts' scores of one night."""
        size = len(self.scale)
        if size < 2:
            return SHARED
        series = self.series_of(np.ones((1, size), dtype=np.bool_))
        variance = float(series.night_sd[0]) ** 2 * size
        return float(np.clip((variance - 1.0) / (size - 1.0), 0.0, 1.0))

    def outliers(self) -> list[Outlier]:
        """Readings of the newest night that are far from their level."""
        newest, counts = self.scores[:, -1], np.isfinite(self.scores).sum(axis=1)
        measured = int(np.isfinite(newest).sum())
        if not measured:
            return []
        limit = -NormalDist().inv_cdf(0.5 * OUTLIER / measured)
        far = np.flatnonzero((np.abs(newest) > limit) & (counts > FEWEST_BEFORE))
        change = np.expm1(self.seconds[:, -1] - self.level)
        return [Outlier(layout=int(row), change=float(change[row])) for row in far]


def _sums(scores: FloatColumn, members: BoolTable) -> FloatColumn:
    """Sum of the members' scores of each night over the root of their number, (F, T)."""
    there = np.isfinite(scores)
    weights = members.astype(np.float64)
    count = weights @ there
    with np.errstate(invalid="ignore", divide="ignore"):
        total = weights @ np.where(there, scores, 0.0) / np.sqrt(count)
    return np.where(count > 0, total, np.nan)
