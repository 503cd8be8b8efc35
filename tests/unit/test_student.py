"""Student's t with four degrees of freedom against scipy's, which finds it numerically."""

import numpy as np
import pytest
from scipy import stats

from planner.calibration import student


@pytest.mark.parametrize("probability", [0.01, 0.05, 0.3, 0.5, 0.6, 0.9, 0.95, 0.999])
def test_quantile(probability: float) -> None:
    assert student.quantile(probability) == pytest.approx(
        float(stats.t.ppf(probability, student.DEGREES)), abs=1e-9
    )


def test_upper_tail() -> None:
    t = np.array([-30.0, -2.0, 0.0, 0.4, 2.131846786, 9.0])
    assert student.upper_tail(t) == pytest.approx(stats.t.sf(t, student.DEGREES), abs=1e-12)


def test_the_weight_is_what_the_loss_pulls_with() -> None:
    """The derivative of the loss by half the squared deviation, as in least squares."""
    squared = np.array([0.0, 1.0, 25.0])
    pull = [
        (student.loss(np.array([s + 1e-6])) - student.loss(np.array([s]))) / 0.5e-6 for s in squared
    ]
    assert student.weights(squared) == pytest.approx(pull, rel=1e-5)
    away = np.array([0.3, -2.0])
    by_scipy = -stats.t.logpdf(away, student.DEGREES).sum() + 2 * stats.t.logpdf(0, student.DEGREES)
    assert student.loss(away**2) == pytest.approx(by_scipy)
