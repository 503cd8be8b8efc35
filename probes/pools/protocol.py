"""The interface of every pool.

`tests/contract/test_pool_contract.py` runs one suite against each.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, Self

from planner.specs.cluster import ClusterSpec
from probes.launch import LaunchSettings, Watch
from probes.pools.capacity import Capacity
from probes.preflight import Need
from probes.protocol import ProbeResult, ProbeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The operator's settings of this machine, for every kind of pool.

    launch: how a probe is started.
    leases: folder of lock files, shared by all users of this machine.
    """

    launch: LaunchSettings
    leases: Path


class Pool(Protocol):
    """A place where probes run.

    `run` raises ProbeError if the pool itself cannot work. A probe that fails, or runs out of
    memory, is a result.
    """

    name: ClassVar[str]
    reads_files: ClassVar[bool]  # its option names a local file: not for the service

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """Opens the pool, with the text after the colon. Raises SpecError or ProbeError."""
        ...

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """What it has for a job on this cluster's GPU.

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

        Several threads may call it at once, each with a task of its own.
        """
        ...
