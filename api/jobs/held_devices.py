"""Devices that a run keeps from one of its probes to the next, where its pool runs few at once."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from planner.api.jobs.probes import RequestedProbe
from planner.errors import ProbeError
from planner.probes.pools.protocol import Pool

PROBES = 8  # that fit one after the other into what is held


class HeldDevices:
    """Parts of a pool, each lent to one probe at a time and kept until the end.

    Where the pool runs as many at once as there are, nothing is held: all wait side by side.

    name: of the run; the parts are called after it.
    """

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool, self.name = pool, name
        self._stack, self._lock, self._number = ExitStack(), threading.Lock(), 0
        self._free: dict[tuple[str, int], list[Pool]] = defaultdict(list)

    @contextmanager
    def lent(self, requested: RequestedProbe) -> Iterator[Pool]:
        """A part for this probe: a free one of its size, or a new one."""
        cluster = requested.job.cluster
        if self.pool.capacity(cluster).at_once is None:
            yield self.pool
            return
        key = (cluster.gpu.name, requested.devices)
        part = self._taken(key, requested)
        if part is None:
            yield self.pool
            return
        try:
            yield part
        finally:
            with self._lock:
                self._free[key].append(part)

    def close(self) -> None:
        """Lets go of all parts. No probe may run in them any more."""
        self._free.clear()
        self._stack.close()

    def _taken(self, key: tuple[str, int], requested: RequestedProbe) -> Pool | None:
        """A free part or a new one; None where the pool cannot hold any, which a probe will say."""
        with self._lock:
            if self._free[key]:
                return self._free[key].pop()
            self._number += 1
            name, seconds = f"{self.name}-{self._number}", requested.request.time_limit_seconds
            held = self.pool.hold(name, requested.job.cluster, requested.devices, PROBES * seconds)
            with suppress(ProbeError):
                return self._stack.enter_context(held)
        return None
