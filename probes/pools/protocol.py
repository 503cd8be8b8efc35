"""The interface of every pool.

`tests/contract/test_pool_contract.py` runs one suite against each.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, Self, TypeVar

from planner.probes.launch import LaunchSettings, Watch
from planner.probes.pools.capacity import Capacity
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.preflight import Need
from planner.probes.protocol import ProbeResult, ProbeTask
from planner.specs.cluster import ClusterSpec

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The operator's settings of this machine, for every kind of pool.

    launch: how a probe is started.
    leases: folder of lock files, shared by all users of this machine.
    slurm: of jobs on a Slurm cluster.
    """

    launch: LaunchSettings
    leases: Path
    slurm: SlurmOptions = field(default_factory=SlurmOptions)


class Pool(Protocol):
    """A place where probes run.

    `run` raises ProbeError if the pool itself cannot work. A probe that fails, or runs out of
    memory, is a result.
    """

    reads_files: ClassVar[bool]  # its option names a local file: not for the service

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """Opens the pool, with the text after the colon. Raises SpecError or ProbeError."""
        ...

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """The capacity for a job on this cluster's GPU.

        Raises SpecError if its GPU is another one.
        """
        ...

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError or SpecError with what would stop every probe of this kind.

        wait: also check what can only be seen once a device is free.
        """
        ...

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """The result of one task. It takes a lease on its devices first, and waits for them.

        Several threads may call it at once, each with a task of its own. Where a crashed process
        left a run of a task of this id (`is_left`), the result is that run's.
        """
        ...

    def hold(
        self, name: str, cluster: ClusterSpec, num_devices: int, seconds: float
    ) -> "AbstractContextManager[Pool]":
        """The pool, with tasks running one after the other that wait for devices only once.

        name: the same for a process that takes the work over after a crash.
        num_devices: of the largest task. seconds: for all tasks together. A larger task, or one
        that comes when the time is used up, waits for devices of its own.
        """
        ...

    def is_left(self, task_id: str) -> bool:
        """Whether a task that a crashed process started goes on, or ended unread, in this pool."""
        ...

    def end_left(self, task_id: str) -> None:
        """Ends what `is_left` found, with every process; it is not left any more."""
        ...


class WithoutQueue:
    """The part of a pool whose tasks wait in no queue and end with the process that runs them."""

    def hold(
        self: P, name: str, cluster: ClusterSpec, num_devices: int, seconds: float
    ) -> AbstractContextManager[P]:
        return nullcontext(self)

    def is_left(self, task_id: str) -> bool:
        """False: the guardian ends what its runner leaves."""
        return False

    def end_left(self, task_id: str) -> None:
        """Does nothing."""
