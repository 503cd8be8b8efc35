"""A plain rule beside the scan: the newest nights against the first ones, and the best so far.

The scan needs a level to compare with. What becomes slower from the first nights on never has one,
and a steady slope passes for noise.
Letters: A layouts, T nights.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.calibration.drift.findings import Creep, StepChange
from planner.columns import FloatColumn

FIRST, BEST = 3, 7  # nights of the first level, and of the best one; judgement
NEWEST = 2  # nights all of which have to be slower
LEAST = 0.03  # what is worth a word; judgement


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
