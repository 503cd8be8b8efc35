"""One bisection, of N ranges at once."""

from collections.abc import Callable

import numpy as np

from planner.columns import BoolColumn, IntColumn

# (whether it holds at these numbers of these rows, which of the rows to go on with)
Holds = Callable[[IntColumn, IntColumn], tuple[BoolColumn, BoolColumn]]


def bisected(
    low: IntColumn, high: IntColumn, holds: Holds, coarse: int = 1
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """(rows left, the largest number of each at which `holds` is true, the next), within coarse.

    low, high (N,): `holds` is taken to be true at low and false at high; neither is asked again.
    Rows that it drops are missing from the answer.
    """
    low, high, rows = low.copy(), high.copy(), np.arange(len(low))
    while len(rows) and (high[rows] - low[rows] > coarse).any():
        middle = (low[rows] + high[rows]) // 2
        above, left = holds(rows, middle)
        low[rows] = np.where(above, middle, low[rows])
        high[rows] = np.where(above, high[rows], middle)
        rows = rows[left]
    return rows, low[rows], high[rows]
