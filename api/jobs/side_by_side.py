"""Probes of one run side by side: started while the pool has room, and collected as they end."""

import platform
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from planner.api.jobs.leases import Claimed
from planner.api.jobs.probes import RequestedProbe, enqueue, run_probe
from planner.api.jobs.threads import future_of
from planner.api.storage.job_records import ProbeRecord, TaskRecord
from planner.api.storage.room import NoRoomError, Room
from planner.api.wiring import Wiring
from planner.errors import ProbeError
from planner.probes.launch import Watch
from planner.probes.pools.protocol import Pool
from planner.specs.cluster import ClusterSpec

POLL_SECONDS = 0.25  # between two looks for room
MOST_AT_ONCE = 256  # probes of one run: each has a thread here, and a lease in the database
NO_ROOM_WANTED = {"pool": None, "wants_gpus": None}  # columns of a task that does not wait
HELD_PROBES = 8  # that fit one after the other into what is held
Say = Callable[[str], None]


def room_of(pool: Pool, name: str, cluster: ClusterSpec) -> Room:
    """Devices that a pool has for jobs on this cluster's GPU, for all who share it."""
    capacity = pool.capacity(cluster)
    devices = capacity.num_devices if capacity.at_once is None else capacity.at_once
    host = None if capacity.shared else platform.node().replace(":", "-")
    return Room(pool=name, devices=devices, host=host)


def enqueue_in_room(
    wiring: Wiring, requested: RequestedProbe, claimed: Claimed[TaskRecord]
) -> ProbeRecord:
    """Claims a probe of a task as soon as its pool has room.

    A stop ends the waiting: it is stored, and ends as soon as it starts.
    """
    name = requested.request.pool
    room: Room | None = room_of(wiring.pool(name), name, requested.job.cluster)
    waits = False
    try:
        while True:
            try:
                return _enqueue(wiring, requested, claimed, room)
            except NoRoomError as error:
                if not waits:
                    waits = True
                    claimed.store(pool=name, wants_gpus=requested.devices)
                claimed.report(f"waits for room: {error}")
                if claimed.stop.wait(POLL_SECONDS):
                    room = None
    finally:
        if waits:
            claimed.store(**NO_ROOM_WANTED)


def _enqueue(
    wiring: Wiring, requested: RequestedProbe, claimed: Claimed[TaskRecord], room: Room | None
) -> ProbeRecord:
    task = claimed.record
    return enqueue(wiring, [requested], max_attempts=1, ours=True, parent=task, room=room)[0]


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
            held = self.pool.hold(
                name, requested.job.cluster, requested.devices, HELD_PROBES * seconds
            )
            with suppress(ProbeError):
                return self._stack.enter_context(held)
        return None


@dataclass(kw_only=True)
class SideBySide:
    """The probes of a claimed task that run now. pool: opened once for all of them."""

    wiring: Wiring
    pool: Pool
    pool_name: str
    claimed: Claimed[TaskRecord]
    waits: bool = False
    # how each ends, with what was asked and what stops it
    _ends: dict[Future[ProbeRecord], tuple[RequestedProbe, threading.Event]] = field(
        default_factory=dict
    )
    _rooms: dict[str, Room] = field(default_factory=dict)
    _avoids: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._held = HeldDevices(self.pool, self.claimed.record.id)

    def start(
        self,
        requested: RequestedProbe,
        *,
        avoid: frozenset[str] = frozenset(),
        rather_not: frozenset[str] = frozenset(),
        say: Say,
    ) -> ProbeRecord | None:
        """Starts a probe; None while there is no room for it.

        avoid, rather_not: hosts, as in `Watch`.
        """
        room, taken = self._room(requested.job.cluster), self.devices
        full = len(self._ends) >= MOST_AT_ONCE
        if full or (taken and taken + requested.devices > room.devices):
            return None
        try:
            record = _enqueue(self.wiring, requested, self.claimed, room)
        except NoRoomError:
            self._want(requested.devices)
            return None
        stop = threading.Event()
        watch = Watch(stop=stop, progress=say, avoid=avoid, rather_not=rather_not)
        end = future_of(f"probe {record.id}", self._run, record, requested, watch)
        self._ends[end] = requested, stop
        return record

    @property
    def running(self) -> list[RequestedProbe]:
        return [requested for requested, _ in self._ends.values()]

    @property
    def devices(self) -> int:
        return sum(one.devices for one in self.running)

    def ended(self, wait_seconds: float) -> Iterator[ProbeRecord]:
        """Probes that have ended, after waiting so long for the first of them.

        Raises what running one of them raised.
        """
        while wait(self._ends, wait_seconds, FIRST_COMPLETED).done:
            for end in [one for one in self._ends if one.done()]:
                del self._ends[end]
                yield end.result()
            wait_seconds = 0.0

    @property
    def avoids_hosts(self) -> bool:
        """Whether the pool can keep probes off hosts, by all jobs that it was asked for so far."""
        return bool(self._avoids) and all(self._avoids)

    def stop(self) -> None:
        for _, stop in self._ends.values():
            stop.set()

    def end(self) -> None:
        """Ends all that run and waits for them; what they raise is dropped."""
        self.stop()
        wait(self._ends)
        self._ends.clear()
        self._held.close()

    def _want(self, devices: int) -> None:
        """Tells jobs of a lower priority, once, that we wait for room in this pool."""
        if not self.waits:
            self.waits = True
            self.claimed.store(pool=self.pool_name, wants_gpus=devices)

    def _room(self, cluster: ClusterSpec) -> Room:
        name = cluster.gpu.name
        if name not in self._rooms:
            self._avoids.append(self.pool.capacity(cluster).avoids_hosts)
            self._rooms[name] = room_of(self.pool, self.pool_name, cluster)
        return self._rooms[name]

    def _run(self, record: ProbeRecord, requested: RequestedProbe, watch: Watch) -> ProbeRecord:
        with self._held.lent(requested) as pool:
            return run_probe(self.wiring, record, watch, pool=pool, requested=requested)
