"""One bisection, of N ranges at once."""

from collections.abc import Callable

import numpy as np

from planner.columns import BoolColumn, IntColumn

# (whether it holds at these numbers of these rows, which of the rows to go on with)
Holds = Callable[[IntColumn, IntColumn], tuple[BoolColumn, BoolColumn]]


def bisected(
    low: IntColumn, high: IntColumn, holds: Holds, coarse: int = 1
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """(rows left, the largest number of each that holds, the next that does not), to within coarse.

    low, high (N,): it holds at the one and not at the other, or is taken to. A row that `holds`
    gives up is not among those left.
    """
    low, high, rows = low.copy(), high.copy(), np.arange(len(low))
    while len(rows) and (high[rows] - low[rows] > coarse).any():
        middle = (low[rows] + high[rows]) // 2
        above, left = holds(rows, middle)
        low[rows] = np.where(above, middle, low[rows])
        high[rows] = np.where(above, high[rows], middle)
        rows = rows[left]
    return rows, low[rows], high[rows]
