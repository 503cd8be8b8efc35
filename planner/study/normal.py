"""The standard normal distribution on columns.

It is exact enough in the far tail to compare improvements there.
"""

import numpy as np

from planner.columns import FloatColumn

# Chebyshev coefficients of erfc, fractional error below 1.2e-7 everywhere. Source: Press et al.,
# Numerical Recipes, section 6.2.
_ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)
_FAR = 37.0  # beyond this many standard deviations a tail is below the smallest double


def upper_tail(z: FloatColumn) -> FloatColumn:
    """P(Z > z), with the same relative precision in the tail as in the middle."""
    x = np.minimum(np.abs(z), _FAR) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.5 * x)
    polynomial = np.zeros_like(t)
    for coefficient in reversed(_ERFC):
        polynomial = polynomial * t + coefficient
    tail = 0.5 * t * np.exp(-x * x + polynomial)
    return np.asarray(np.where(z >= 0, tail, 1.0 - tail))


def density(z: FloatColumn) -> FloatColumn:
    return np.asarray(np.exp(-0.5 * np.minimum(np.abs(z), _FAR) ** 2) / np.sqrt(2.0 * np.pi))


_GRID = np.linspace(-8.0, 8.0, 6401)
_LOG_TAIL = np.log(upper_tail(_GRID))


def upper_quantile(probability: FloatColumn) -> FloatColumn:
    """The z with P(Z > z) = probability, between -8 and 8; inverse of `upper_tail` to 1e-5."""
    rare = np.log(np.clip(np.minimum(probability, 1.0 - probability), 1e-300, 0.5))
    size = np.interp(rare, _LOG_TAIL[::-1], _GRID[::-1])
    return np.asarray(np.where(probability <= 0.5, size, -size))


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
