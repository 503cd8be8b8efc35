"""Conformal prediction of memory: intervals with the coverage that they claim.

Deviations are stretched until measured peaks fall inside.
Source: Vovk, Gammerman, Shafer 2005.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.calibration.accuracy import Row
from planner.calibration.classes import PRIOR_UNITS
from planner.calibration.intervals import TWO_SIDED_90
from planner.columns import FloatColumn
from planner.cost.machine.stacks import memory_class
from planner.trainers.registry import code_of
from planner.units import GIB

COVERAGE = 0.9
# The least deviation, however many runs agree: a relative part, and the bytes by which contexts and
# communicators differ between drivers; judgement.
MEMORY_FLOOR = (0.02, 0.5 * GIB)
MEMORY_PRIOR = (0.05, 0.5 * GIB)  # before any run; judgement
LEAST_MEMORY_RUNS = 10
Unit = tuple[str, str, str, str]
Peak = tuple[Unit, float, float]


def memory_deviation(rows: Sequence[Row]) -> tuple[float, float]:
    """(relative, bytes): the deviation of log measured over predicted peak bytes.

    It is sqrt(relative^2 + (bytes / peak)^2). What the model misses grows with the peak (a tensor
    too many) or does not (workspaces, buffers of libraries). Both are fitted by maximum likelihood
    of a Laplace distribution on a grid, then stretched together until 90% fall inside. Every unit
    (`memory_unit`) counts once, however many peaks it has: a new place differs as units do. Runs
    that do not state all settings (no true `complete` label) show the missing settings more than
    the model.
    """
    found = _peaks(rows)
    return MEMORY_PRIOR if len(found) < LEAST_MEMORY_RUNS else _memory_deviation(found)


def memory_factors(rows: Sequence[Row]) -> dict[str, float]:
    """Factors on the deviation of all peaks, by `memory_class`."""
    found = _peaks(rows)
    return {} if len(found) < LEAST_MEMORY_RUNS else _factors(found, *_memory_deviation(found))


def _factors(peaks: Sequence[Peak], relative: float, fixed: float) -> dict[str, float]:
    """How far each class deviates, as a multiple of this deviation.

    The class of n units counts as n, and that of all as PRIOR_UNITS: variances are averaged.
    """
    factors = {}
    for name in {unit[-1] for unit, _, _ in peaks}:
        own = [peak for peak in peaks if peak[0][-1] == name]
        stretch, units = _stretch(own, relative, fixed), len({unit for unit, _, _ in own})
        mean = (units * stretch**2 + PRIOR_UNITS) / (units + PRIOR_UNITS)
        factors[name] = round(float(np.sqrt(mean)), 3)
    return factors


def memory_coverage(rows: Sequence[Row]) -> float | None:
    """Share of measured peaks inside 90% intervals, the mean over units.

    The deviation is that of the other sources' peaks, by class where they have some; None where no
    source has enough of others.
    """
    found, shares = _peaks(rows), {}
    for unit in {unit for unit, _, _ in found}:
        others = [peak for peak in found if peak[0][0] != unit[0]]
        if len(others) >= LEAST_MEMORY_RUNS:
            own, known = [peak for peak in found if peak[0] == unit], _memory_deviation(others)
            width = TWO_SIDED_90 * _factors(others, *known).get(unit[-1], 1.0)
            shares[unit] = float((_scores(own, *known) <= width).mean())
    return float(np.mean(list(shares.values()))) if shares else None


def memory_unit(row: Row) -> Unit:
    """(source, GPU, format, class) of a run: what tells runs of memory apart."""
    job = row.job
    return (
        str(job.labels.get("group")),
        job.cluster.gpu.name,
        job.layout.precision if job.layout else "",
        memory_class(code_of(job.training), job.cluster.gpu.vendor, experts=job.model.is_moe),
    )


def _peaks(rows: Sequence[Row]) -> list[Peak]:
    return [
        (memory_unit(row), *pair)
        for row in rows
        if row.job.labels.get("complete")
        for pair in (
            (row.predicted("peak_allocated_bytes"), row.measured.get("peak_allocated_bytes")),
            (row.predicted("peak_reserved_bytes"), row.measured.get("peak_reserved_bytes")),
        )
        if all(pair)
    ]


def _memory_deviation(peaks: Sequence[Peak]) -> tuple[float, float]:
    weight, predicted = _weights(peaks), np.array([peak[1] for peak in peaks])
    error = _scores(peaks, 1.0, 0.0)
    grid = [
        (relative, fixed)
        for relative in np.geomspace(0.005, 0.2, 24)
        for fixed in np.geomspace(0.02, 4.0, 24) * GIB
    ]
    deviations = np.array([np.hypot(relative, fixed / predicted) for relative, fixed in grid])
    best = grid[int(np.argmin((np.log(deviations) + error / deviations) @ weight))]
    factor = _stretch(peaks, *best)
    found = (value * factor for value in best)
    relative, fixed = (max(value, floor) for value, floor in zip(found, MEMORY_FLOOR, strict=True))
    return round(relative, 4), round(fixed, 0)


def _weights(peaks: Sequence[Peak]) -> FloatColumn:
    """One over the peaks of the same unit."""
    sizes = Counter(unit for unit, _, _ in peaks)
    return np.array([1.0 / sizes[unit] for unit, _, _ in peaks])


def _scores(peaks: Sequence[Peak], relative: float, fixed: float) -> FloatColumn:
    """Logarithms of measured over predicted bytes, over their deviation."""
    predicted, measured = np.array([peak[1:] for peak in peaks]).T
    return np.asarray(np.abs(np.log(measured / predicted)) / np.hypot(relative, fixed / predicted))


def _stretch(peaks: Sequence[Peak], relative: float, fixed: float) -> float:
    """Factor on a deviation with which COVERAGE of the peaks lies inside 90% intervals."""
    scores, weight = _scores(peaks, relative, fixed), _weights(peaks)
    order = np.argsort(scores)
    share = np.cumsum(weight[order]) / weight.sum()
    place = min(int(np.searchsorted(share, COVERAGE)), len(scores) - 1)
    return float(scores[order][place] / TWO_SIDED_90)
