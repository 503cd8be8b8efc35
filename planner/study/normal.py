"""The standard normal distribution on columns."""

import math
from statistics import NormalDist

import numpy as np

from planner.columns import FloatColumn

_FAR = 37.0  # beyond this many standard deviations a tail is below the smallest double
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


def upper_tail(z: FloatColumn) -> FloatColumn:
    """P(Z > z), with the same relative precision in the tail as in the middle."""
    return np.asarray(0.5 * _erfc(np.clip(z, -_FAR, _FAR) / np.sqrt(2.0)))


def density(z: FloatColumn) -> FloatColumn:
    return np.asarray(np.exp(-0.5 * np.minimum(np.abs(z), _FAR) ** 2) / np.sqrt(2.0 * np.pi))


def upper_quantile(probability: FloatColumn) -> FloatColumn:
    """The z with P(Z > z) = probability, between -8 and 8; inverse of `upper_tail`."""
    rare = np.minimum(probability, 1.0 - probability)
    size = -_quantile(np.clip(rare, 1e-300, 0.5))
    return np.asarray(np.clip(np.where(probability <= 0.5, size, -size), -8.0, 8.0))


def expected_excess(gap: FloatColumn, sd: FloatColumn) -> FloatColumn:
    """E[max(0, sd Z - gap)] with Z standard normal; max(0, -gap) if sd is 0.

    It is sd phi(gap / sd) - gap Q(gap / sd): the expected improvement of something whose mean is
    `gap` worse than the best.
    """
    safe = np.maximum(sd, 1e-300)
    z = np.clip(gap / safe, -_FAR, _FAR)
    uncertain = np.maximum(safe * (density(z) - z * upper_tail(z)), 0.0)
    return np.asarray(
        np.where((sd > 0) & (np.abs(gap) < _FAR * safe), uncertain, np.maximum(-gap, 0.0))
    )
