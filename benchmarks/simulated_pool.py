"""A pool of simulated nodes: steps are looked up in recordings, faults are drawn from a seed.

It measures nothing. It shows at the size of a cluster what stands above a pool: room, retries,
hosts that are kept out, and recovery after a kill. So no user can name it; the test or benchmark
that wants it registers it. Its nodes are shared by all processes that open it with one file: a
node is a locked file, and the kernel unlocks it with the process.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.errors import ProbeError
from planner.probes.launch import Watch
from planner.probes.pools.protocol import Capacity, Pool, PoolSettings
from planner.probes.pools.replay import ReplayPool
from planner.probes.protocol import (
    Failed,
    FailureKind,
    MeasuredRun,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
    device_of,
)
from planner.specs.cluster import ClusterSpec

RETRY_SECONDS = 0.01  # between two attempts to get free nodes
FULL, LEDGER = "full", "ledger"
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Faults(BaseModel):
    """How often a probe meets which fault.

    oom: of a layout, each time it runs; the others come and go.
    bad_nodes: names of nodes on which `bad_share` of the probes hang.
    slow_nodes: names of nodes whose steps take `slow_by` times as long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    oom: Share = 0.0
    hang: Share = 0.0
    crash: Share = 0.0
    lost_node: Share = 0.0
    preempted: Share = 0.0
    bad_nodes: tuple[str, ...] = ()
    bad_share: Share = 0.5
    slow_nodes: tuple[str, ...] = ()
    slow_by: Annotated[float, Field(ge=1.0)] = 1.3


class SimulatedCluster(BaseModel):
    """The cluster, as its file says it.

    folder: where its locks and its ledger are. recordings: rows that the replay pool reads.
    probe_seconds: that a probe takes here. gpu_seconds: that it says it took on each GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    recordings: Path
    nodes: Annotated[int, Field(ge=1, le=10_000)]
    gpus_per_node: Annotated[int, Field(ge=1, le=72)] = 8
    probe_seconds: float = 0.0
    gpu_seconds: float = 60.0
    seed: int = 0
    faults: Faults = Faults()

    def node(self, number: int) -> str:
        return f"node{number:0{len(str(self.nodes - 1))}d}"


class SimulatedPool(Pool):
    """Runs a probe on whole nodes, as the file of the cluster says."""

    reads_files: ClassVar[bool] = True

    def __init__(self, cluster: SimulatedCluster, recordings: ReplayPool) -> None:
        self.cluster, self.recordings = cluster, recordings
        self._tried: dict[str, int] = defaultdict(int)
        self._turn = threading.Lock()

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """The cluster of a file, whose path is the option. Raises ProbeError."""
        assert option is not None, "the registry asks for a file"
        try:
            cluster = SimulatedCluster.model_validate_json(Path(option).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise ProbeError(f"{option}: is no simulated cluster ({error})") from None
        cluster.folder.mkdir(parents=True, exist_ok=True)
        return cls(cluster, _recordings(cluster.recordings))

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """All GPUs of its nodes."""
        return Capacity(
            num_devices=self.cluster.nodes * self.cluster.gpus_per_node,
            device=device_of(cluster),
            spans_nodes=True,
            measures=False,
            shared=True,
            avoids_hosts=True,
        )

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """The recorded result or a fault, after the nodes were taken for a while."""
        watch, processes = watch or Watch(), task.num_processes()
        digest = hashlib.sha256(json.dumps(task.job, sort_keys=True).encode()).hexdigest()
        with self._turn:
            tried = self._tried[digest]
            self._tried[digest] += 1
        with self._nodes(math.ceil(processes / self.cluster.gpus_per_node), watch) as nodes:
            self._note(task.id, "begins", nodes)
            stopped = watch.stop.wait(self.cluster.probe_seconds)
            with self._turn:
                result = self.recordings.run(task)
            seconds = min(self.cluster.gpu_seconds, task.time_limit_seconds)
            result = result.model_copy(
                update={
                    "hosts": nodes,
                    "wall_seconds": seconds,
                    "gpu_seconds": seconds * processes,
                    "outcome": self._outcome(result, nodes, digest, tried, stopped=stopped),
                }
            )
            self._note(task.id, result.outcome.status, nodes)
            return result

    def _outcome(
        self, result: ProbeResult, nodes: list[str], digest: str, tried: int, *, stopped: bool
    ) -> MeasuredRun | OutOfMemory | Failed:
        faults = self.cluster.faults
        if stopped:
            return _failed(FailureKind.INTERRUPTED, "it was asked to stop")
        if result.task.time_limit_seconds < self.cluster.gpu_seconds:
            return _failed(FailureKind.TIMEOUT, "it took longer than its time limit")
        always = random.Random(f"{self.cluster.seed} {digest}")
        if always.random() < faults.oom:
            return OutOfMemory(
                rank=0, attempted_bytes=2**30, allocated_bytes=2**36, message="no memory left"
            )
        drawn = random.Random(f"{self.cluster.seed} {digest} {tried}")
        bad = set(nodes) & set(faults.bad_nodes)
        for kind, share in (
            (FailureKind.HANG, faults.bad_share if bad else faults.hang),
            (FailureKind.CRASH, faults.crash),
            (FailureKind.LOST_NODE, faults.lost_node),
            (FailureKind.PREEMPTED, faults.preempted),
        ):
            if drawn.random() < share:
                return _failed(kind, f"drawn for attempt {tried + 1}")
        out = result.outcome
        slow = set(nodes) & set(faults.slow_nodes)
        if not slow or not isinstance(out, MeasuredRun) or out.step_seconds is None:
            return out
        each = [seconds * faults.slow_by for seconds in out.step_seconds_each]
        slower = {"step_seconds": out.step_seconds * faults.slow_by, "step_seconds_each": each}
        return out.model_copy(update=slower)

    @contextlib.contextmanager
    def _nodes(self, wanted: int, watch: Watch) -> Iterator[list[str]]:
        """Waits for so many free nodes. Raises ProbeError where there can never be as many."""
        names = [self.cluster.node(number) for number in range(self.cluster.nodes)]
        kept_off = watch.kept_off(names, wanted)
        allowed = [name for name in names if name not in kept_off]
        if wanted > len(allowed):
            raise ProbeError(f"{wanted} nodes are wanted, {len(allowed)} may be used")
        while True:
            with contextlib.ExitStack() as held:
                random.shuffle(allowed)
                ours: list[str] = []
                for name in allowed:
                    if len(ours) < wanted and self._lock(name, held):
                        ours.append(name)
                if len(ours) == wanted:
                    yield sorted(ours)
                    return
            if len(allowed) == len(names):
                self._note("", FULL, [])
            if watch.stop.wait(RETRY_SECONDS):
                raise ProbeError("stopped while waiting for a node; start it again")

    def _lock(self, name: str, held: contextlib.ExitStack) -> bool:
        descriptor = os.open(self.cluster.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        held.callback(os.close, descriptor)
        return True

    def _note(self, task_id: str, what: str, nodes: list[str]) -> None:
        """Appends a line to the ledger; one write, so that no other process' line is inside it."""
        line = f"{os.getpid()} {what} {task_id} {' '.join(nodes)}\n".encode()
        descriptor = os.open(
            self.cluster.folder / LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


@lru_cache(maxsize=2)
def _recordings(path: Path) -> ReplayPool:
    return ReplayPool.from_file(path)


def _failed(kind: FailureKind, message: str) -> Failed:
    return Failed(kind=kind, message=message)
