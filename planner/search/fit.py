"""Which layouts are likely enough to fit on their devices."""

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.columns.bisect import bisected
from planner.cost.chunks import slices
from planner.cost.price import Pricer
from planner.specs.estimate import OOM_LIMIT as OOM_LIMIT


def fitting(pricer: Pricer, device_bytes: FloatColumn, risk: float = OOM_LIMIT) -> BoolColumn:
    """Whether layouts that need these bytes at the least run out of memory rarely enough, (N,).

    risk: the largest P(out of memory) allowed.
    """
    least = np.maximum(device_bytes, 1.0)
    return np.asarray(oom_probability(pricer.profile, pricer.cluster, least) <= risk)


def priced_and_fitting(
    pricer: Pricer, batch: LayoutBatch, risk: float = OOM_LIMIT
) -> tuple[FloatColumn, BoolColumn]:
    """(step seconds by closed forms, whether it fits), (N,)."""
    seconds, fits = np.zeros(len(batch)), np.zeros(len(batch), dtype=np.bool_)
    for rows in slices(len(batch)):
        prices = pricer.price(batch.take(rows))
        seconds[rows] = prices.step_seconds
        fits[rows] = fitting(pricer, prices.least_device_bytes, risk)
    return seconds, fits


def fits_at_all(pricer: Pricer, batch: LayoutBatch) -> BoolColumn:
    parts = [pricer.least_device_bytes(batch.take(rows)) for rows in slices(len(batch))]
    return fitting(pricer, np.concatenate([np.zeros(0), *parts]))


def most_device_bytes(pricer: Pricer) -> float:
    """The most device bytes that fit, worked out once for a job."""

    def fits(rows: IntColumn, middle: IntColumn) -> tuple[BoolColumn, BoolColumn]:
        return fitting(pricer, middle.astype(np.float64)), np.ones(len(rows), dtype=np.bool_)

    if pricer.known.most_device_bytes is None:
        beyond = np.array([2 * int(pricer.cluster.usable_memory_bytes)])
        _, most, _ = bisected(np.zeros_like(beyond), beyond, fits)
        pricer.known.most_device_bytes = float(most[0])
    return pricer.known.most_device_bytes
