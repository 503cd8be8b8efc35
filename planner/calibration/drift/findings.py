"""Findings in a history of nights, and a plain rule beside the scan: newest nights against old.

The scan needs a level to compare with. What becomes slower from the first nights on never has one,
and a steady slope passes for noise.
Letters: A layouts, T nights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn

FIRST, BEST = 3, 7  # nights of the first level, and of the best one; judgement
NEWEST = 2  # nights all of which have to be slower
LEAST = 0.03  # what is worth a word; judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """A change of level that is no noise.

    layouts: places of those that changed. found: the night after which it was found.
    since: its first night. last_before: the night before, on which one of them was measured.
    change: 0.02 is 2% slower; low, high: its 90% interval.
    versions: of software that changed then, (before, after) by name.
    hosts: all that the layouts ran on since.
    """

    layouts: tuple[int, ...]
    found: int
    since: int
    last_before: int
    change: float
    low: float
    high: float
    versions: Mapping[str, tuple[str | None, str | None]]
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowHost:
    """A host on which layouts take longer than on others.

    until: None while it is slow.
    newest: its change on the newest night; None where it measured nothing then.
    """

    host: str
    found: int
    since: int
    until: int | None
    change: float
    low: float
    high: float
    newest: float | None
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """One reading of the newest night far from those before. change: against their median."""

    layout: int
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Creep:
    """A layout whose newest nights are slower than its earlier level (`creeps`).

    change: 0.02 is 2% slower. first, last: the nights of that level. best: it is the best so far,
    not that of the first nights.
    """

    layout: int
    change: float
    first: int
    last: int
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Findings of a history.

    series: layouts, groups of them, and hosts that are watched.
    threshold: in standard deviations; None while nothing has enough nights.
    night_sd: of a layout's log step time from night to night, median of all; None likewise.
    """

    changes: tuple[StepChange, ...] = ()
    hosts: tuple[SlowHost, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    creeps: tuple[Creep, ...] = ()
    series: int = 0
    threshold: float | None = None
    night_sd: float | None = None


def creeps(
    seconds: FloatColumn, sd: FloatColumn, threshold: float, changes: Sequence[StepChange]
) -> Iterator[Creep]:
    """Layouts that are slower than they were, by more than the changes that were found.

    Slower is more than `threshold` standard deviations of such a difference, and more than LEAST.
    The best so far is the lowest of many medians of BEST nights, by about sqrt(2 log n) deviations
    of one, each 1.25 / sqrt(BEST) of a night's.
    seconds (A, T): log seconds, NaN where there are none. sd (A,): from night to night.
    """
    for layout, row in enumerate(seconds):
        nights = np.flatnonzero(np.isfinite(row))
        values = row[nights]
        if len(values) < FIRST + NEWEST:
            continue
        newest, spread = float(values[-NEWEST:].min()), float(sd[layout])
        limit = max(threshold * spread * np.sqrt(1 / FIRST + 1 / NEWEST), float(np.log1p(LEAST)))
        levels = [(0, FIRST, float(np.median(values[:FIRST])), limit)]
        if len(values) >= BEST + NEWEST:
            windows = np.lib.stride_tricks.sliding_window_view(values[:-NEWEST], BEST)
            medians = np.median(windows, axis=1)
            best = int(medians.argmin())
            lucky = 1.25 * spread * np.sqrt(2.0 * np.log(len(medians)) / BEST)
            levels.append((best, BEST, float(medians[best]), limit + lucky))
        for index, count, level, most in levels:
            known = sum(
                np.log1p(one.change)
                for one in changes
                if layout in one.layouts and one.since > nights[index]
            )
            if newest - level - max(known, 0.0) > most:
                yield Creep(
                    layout=layout,
                    change=float(np.expm1(newest - level)),
                    first=int(nights[index]),
                    last=int(nights[index + count - 1]),
                    best=count == BEST,
                )
                break
