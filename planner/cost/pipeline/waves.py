"""Nodes that wait for each other, in waves: each waits only for nodes of waves before its own.

Letters: N nodes, D most nodes that one waits for.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def waves(needs_DN: Rows) -> Iterator[Rows]:
    """The nodes of each wave, in no order. Before a node of wave k, the longest chain has k.

    needs_DN: what each node waits for, -1 for none.
    Raises ValueError where nodes wait for each other in a circle.
    """
    num_nodes = needs_DN.shape[1]
    after = np.flatnonzero(needs_DN.ravel() >= 0)
    need, node = needs_DN.ravel()[after], after % num_nodes
    order = np.argsort(need, kind="stable")
    count_N = np.bincount(need, minlength=num_nodes)
    start_N = np.cumsum(count_N) - count_N
    # who waits for each node, side by side; the node behind the last one stands for nobody
    waiting_NW = np.full((num_nodes, max(int(count_N.max(initial=0)), 1)), num_nodes)
    need = need[order]
    waiting_NW[need, np.arange(len(need)) - start_N[need]] = node[order]
    missing_N = np.bincount(node, minlength=num_nodes + 1)
    missing_N[num_nodes] = -1
    mark_N, index = np.empty(num_nodes, dtype=np.int64), np.arange(waiting_NW.size)
    ready = np.flatnonzero(missing_N == 0)
    seen = 0
    while len(ready):
        yield ready
        seen += len(ready)
        beyond = waiting_NW.take(ready, axis=0).ravel()
        np.subtract.at(missing_N, beyond, 1)
        beyond = beyond[missing_N.take(beyond) == 0]
        place = index[: len(beyond)]
        mark_N[beyond] = place
        ready = beyond[mark_N.take(beyond) == place]
    if seen < num_nodes:
        raise ValueError("the order deadlocks: ranks wait for each other in a circle")
