"""Student's t distribution with four degrees of freedom, in closed form.

Misses are heavy-tailed: a new kind of stack is far off more often than a normal distribution says.
Four degrees of freedom is the fewest for which the variance of the variance is still estimated
well from some forty units, and its quantile has a closed form.
Source: Shaw 2006, Sampling Student's T distribution, section 2.3; weights: Lange, Little and Taylor
1989, Robust Statistical Modeling Using the t Distribution.
"""

import numpy as np

from planner.columns import FloatColumn

DEGREES = 4.0


def quantile(probability: float) -> float:
    """The value that a t variable exceeds with 1 - probability; 0 < probability < 1."""
    alpha = 4.0 * probability * (1.0 - probability)
    root = np.sqrt(max(np.cos(np.arccos(np.sqrt(alpha)) / 3.0) / np.sqrt(alpha) - 1.0, 0.0))
    return float(np.copysign(2.0 * root, probability - 0.5))


def upper_tail(t: FloatColumn) -> FloatColumn:
    s = t / np.sqrt(1.0 + t * t / 4.0)
    return np.asarray(0.5 - 0.375 * s * (1.0 - s * s / 12.0))


def weights(squared: FloatColumn) -> FloatColumn:
    """Weight of an observation by its squared deviation in scales: (d + 1) / (d + squared)."""
    return np.asarray((DEGREES + 1.0) / (DEGREES + squared))


def loss(squared: FloatColumn, counts: FloatColumn | float = 1.0) -> float:
    """Negative log likelihood of these squared deviations in scales, less its constant.

    counts: for how many observations each one stands.
    """
    return float(0.5 * (DEGREES + 1.0) * (counts * np.log1p(squared / DEGREES)).sum())


TWO_SIDED_90 = quantile(0.95)
