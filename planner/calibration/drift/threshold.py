"""How large a difference must be, so that chance alone rarely makes it."""

import numpy as np

from planner.calibration.drift.scores import FEWEST_AFTER, WINDOW
from planner.calibration.intervals import upper_tail


def threshold_of(runs_per_false_alarm: float, series: int, window: int = WINDOW) -> float:
    """Standard deviations that a split must reach, so that one of so many series does so rarely.

    runs = sqrt(2 pi) exp(h^2 / 2) / (h * integral of x v(x)^2 dx), x from h / sqrt(window) to
    h / sqrt(fewest nights after the change)

    It is solved for h, with the runs of one series: as many times more as there are series.
    v(x): share of the overshoot, (2 / x)(F(x/2) - 1/2) / ((x/2) F(x/2) + f(x/2)), F and f of the
    standard normal.
    Source: Siegmund and Venkatraman 1995, Using the generalized likelihood ratio statistic for
    sequential detection of a change-point.
    """
    wanted = np.log(runs_per_false_alarm * max(1, series))
    low, high = 1.0, 12.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        if _log_runs(middle, window) < wanted:
            low = middle
        else:
            high = middle
    return high


def _log_runs(h: float, window: int) -> float:
    x = np.linspace(h / np.sqrt(window), h / np.sqrt(FEWEST_AFTER), 200)
    upper = 1.0 - upper_tail(x / 2.0)
    density = np.exp(-(x**2) / 8.0) / np.sqrt(2.0 * np.pi)
    overshoot = (2.0 / x) * (upper - 0.5) / (x / 2.0 * upper + density)
    area = np.trapezoid(x * overshoot**2, x)
    return float(0.5 * np.log(2.0 * np.pi) + h * h / 2.0 - np.log(h * area))
