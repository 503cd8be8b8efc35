"""The interface of every pool.

`tests/contract/test_pool_contract.py` runs one suite against each.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from planner.errors import ProbeError
from planner.probes.launch import LaunchSettings, Watch
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.preflight import Need
from planner.probes.protocol import ProbeResult, ProbeTask
from planner.specs.cluster import ClusterSpec
from planner.units import counted

UNLIMITED = 2**20  # devices of a pool that does not count them
NO_GPU = (
    "use --emulate for memory and counts without one, or a job with cluster gpu: cpu to try the "
    "whole path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Devices that a pool can give one probe of a job.

    num_devices: devices of the job's kind, free or not.
    device: `cuda` or `cpu`.
    why_none: a sentence, if the pool has no device of this kind.
    spans_nodes: one probe may use several nodes.
    measures: False if results are looked up, so that nothing new can be measured.
    at_once: devices that probes can use at the same time; None is all of them.
    shared: every process that opens the pool uses the same devices, from whatever machine.
    avoids_hosts: it keeps a probe off the hosts that its `Watch` names.
    """

    num_devices: int
    device: str
    why_none: str = ""
    spans_nodes: bool = False
    measures: bool = True
    at_once: int | None = None
    shared: bool = False
    avoids_hosts: bool = False


def too_few(wanted: int, capacity: Capacity) -> ProbeError:
    """The error for a probe that wants more devices than the pool has, in one line."""
    if capacity.num_devices == 0:
        return ProbeError(f"no NVIDIA GPU to probe on: {capacity.why_none}; {NO_GPU}")
    place = "pool" if capacity.spans_nodes else "machine"
    return ProbeError(
        f"the layout needs {counted(wanted, 'GPU')}, this {place} has {capacity.num_devices}; use "
        "--emulate for one rank of it"
    )


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


class Pool(ABC):
    """A place where probes run.

    `run` raises ProbeError if the pool itself cannot work. A probe that fails, or runs out of
    memory, is a result. What has a body here is of a pool whose tasks wait in no queue and end with
    the process that runs them.
    """

    reads_files: ClassVar[bool] = False  # its option names a local file: not for the service

    @classmethod
    @abstractmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """Opens the pool, with the text after the colon. Raises SpecError or ProbeError."""

    @abstractmethod
    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """The capacity for a job on this cluster's GPU. Raises SpecError for another GPU."""

    def check(self, need: Need, *, wait: bool = True) -> None:  # noqa: B027 nothing to check
        """Raises ProbeError or SpecError with what would stop every probe of this kind.

        wait: also check what can only be seen once a device is free.
        """

    @abstractmethod
    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """The result of one task. It takes a lease on its devices first, and waits for them.

        Several threads may call it at once, each with a task of its own. Where a crashed process
        left a run of a task of this id (`is_left`), the result is that run's.
        """

    def hold(
        self, name: str, cluster: ClusterSpec, num_devices: int, seconds: float
    ) -> "AbstractContextManager[Pool]":
        """The pool, with tasks running one after the other that wait for devices only once.

        name: the same for a process that takes the work over after a crash.
        num_devices: of the largest task. seconds: for all tasks together. A larger task, or one
        that comes when the time is used up, waits for devices of its own.
        """
        return nullcontext(self)

    def is_left(self, task_id: str) -> bool:
        """Whether a task that a crashed process started goes on, or ended unread, in this pool."""
        return False  # the guardian ends what its runner leaves

    def end_left(self, task_id: str) -> None:  # noqa: B027 nothing is left
        """Ends what `is_left` found, with every process; it is not left any more."""
