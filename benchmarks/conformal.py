"""Conformal prediction of memory: intervals with the coverage that they claim.

Deviations are stretched until measured peaks fall inside.
Source: Vovk, Gammerman, Shafer 2005.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.calibration.accuracy import Row
from planner.calibration.intervals import TWO_SIDED_90
from planner.columns import FloatColumn
from planner.units import GIB

COVERAGE = 0.9
# The least deviation, however many runs agree: a relative part, and the bytes by which contexts and
# communicators differ between drivers; judgement.
MEMORY_FLOOR = (0.02, 0.5 * GIB)
MEMORY_PRIOR = (0.05, 0.5 * GIB)  # before any run; judgement
LEAST_MEMORY_RUNS = 10
Unit = tuple[str, str, str, bool]


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
    if len(found) < LEAST_MEMORY_RUNS:
        return MEMORY_PRIOR
    units, predicted, measured = zip(*found, strict=True)
    return _memory_deviation(units, np.array(predicted), np.array(measured))


def memory_coverage(rows: Sequence[Row]) -> float | None:
    """Share of measured peaks inside 90% intervals, the mean over units.

    The deviation is that of the other sources' peaks; None where no source has enough of others.
    """
    found, shares = _peaks(rows), {}
    for unit in {unit for unit, _, _ in found}:
        others = [peak for peak in found if peak[0][0] != unit[0]]
        own = np.array([peak[1:] for peak in found if peak[0] == unit])
        if len(others) >= LEAST_MEMORY_RUNS:
            units, predicted, measured = zip(*others, strict=True)
            relative, fixed = _memory_deviation(units, np.array(predicted), np.array(measured))
            width = TWO_SIDED_90 * np.hypot(relative, fixed / own[:, 0])
            shares[unit] = float((np.abs(np.log(own[:, 1] / own[:, 0])) <= width).mean())
    return float(np.mean(list(shares.values()))) if shares else None


def memory_unit(row: Row) -> Unit:
    """(source, GPU, format, whether it has experts) of a run: what tells runs of memory apart."""
    job = row.job
    return (
        str(job.labels.get("group")),
        job.cluster.gpu.name,
        job.layout.precision if job.layout else "",
        job.model.is_moe,
    )


def _peaks(rows: Sequence[Row]) -> list[tuple[Unit, float, float]]:
    return [
        (memory_unit(row), *pair)
        for row in rows
        if row.job.labels.get("complete")
        for pair in (
            (row.predicted_allocated_bytes, row.measured_allocated_bytes),
            (row.predicted_reserved_bytes, row.measured_reserved_bytes),
        )
        if all(pair)
    ]


def _memory_deviation(
    units: Sequence[Unit], predicted: FloatColumn, measured: FloatColumn
) -> tuple[float, float]:
    sizes = Counter(units)
    weight = np.array([1.0 / sizes[unit] for unit in units])
    error = np.abs(np.log(measured / predicted))
    grid = [
        (relative, fixed)
        for relative in np.geomspace(0.005, 0.2, 24)
        for fixed in np.geomspace(0.02, 4.0, 24) * GIB
    ]
    deviations = np.array([np.hypot(relative, fixed / predicted) for relative, fixed in grid])
    best = int(np.argmin((np.log(deviations) + error / deviations) @ weight))
    scores = error / deviations[best]
    order = np.argsort(scores)
    share = np.cumsum(weight[order]) / weight.sum()
    place = min(int(np.searchsorted(share, COVERAGE)), len(scores) - 1)
    factor = float(scores[order][place] / TWO_SIDED_90)
    found = (value * factor for value in grid[best])
    relative, fixed = (max(value, floor) for value, floor in zip(found, MEMORY_FLOOR, strict=True))
    return round(relative, 4), round(fixed, 0)
