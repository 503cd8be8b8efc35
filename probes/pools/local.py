"""The pool of this machine: its GPUs, or its CPU if a job's cluster has `gpu: cpu`.

A probe takes a lease on its devices (`planner.probes.pools.leases`). It does not take a GPU that
another program uses.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from planner.catalog.clusters import gpu_names
from planner.errors import ProbeError, fault
from planner.probes.folder import lease_folder
from planner.probes.launch import Launcher, Watch
from planner.probes.pools.leases import MACHINE, LeaseLocks
from planner.probes.pools.nvidia import Gpu, Survey, is_same_gpu, others_on, survey, visible
from planner.probes.pools.protocol import Capacity, Pool, PoolSettings, too_few
from planner.probes.preflight import Need
from planner.probes.protocol import ProbeResult, ProbeTask
from planner.probes.variables import DeviceLease
from planner.specs.cluster import ClusterSpec
from planner.units import counted

# judgement: with more processes even a tiny model only measures how the machine swaps
MAX_CPU_PROCESSES = 16
RETRY_SECONDS = 0.3  # between two attempts to get free devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """How this machine's devices are found and shared.

    leases: folder of this user's lock files.
    machine: see `LeaseLocks`.
    survey: asks the driver which GPUs are there and who uses them.
    environment: where `CUDA_VISIBLE_DEVICES` is read; None is this process' own.
    cpu_slots: processes that run side by side on the CPU.
    foreign_seconds: how long a foreign process must be there before it is an error. The driver
        takes a short time to release what a killed process held.
    """

    leases: Path = field(default_factory=lease_folder)
    machine: str = MACHINE
    survey: Callable[[], Survey] = survey
    environment: Mapping[str, str] | None = None
    cpu_slots: int = max(1, os.cpu_count() or 1)
    foreign_seconds: float = 5.0


class LocalPool(Pool):
    """Runs probes on this machine."""

    def __init__(self, launcher: Launcher, settings: LocalSettings | None = None) -> None:
        self.launcher, self.settings = launcher, settings or LocalSettings()

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """The pool of this machine; it takes no option."""
        return cls(Launcher(settings.launch), LocalSettings(leases=settings.leases))

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """Devices for a job on this GPU, free or not. Raises SpecError for another GPU."""
        if cluster.gpu.name == "cpu":
            slots = self.settings.cpu_slots
            return Capacity(num_devices=MAX_CPU_PROCESSES, device="cpu", at_once=slots)
        seen = self.settings.survey()
        gpus = visible(seen, self.settings.environment)
        if not gpus:
            hidden = "none is visible to us (CUDA_VISIBLE_DEVICES)" if seen.gpus else "it has none"
            return Capacity(num_devices=0, device="cuda", why_none=seen.problem or hidden)
        # a GPU that the user describes is not compared with this machine's
        known = cluster.gpu.name in gpu_names()
        others = [gpu for gpu in gpus if known and not is_same_gpu(cluster.gpu, gpu)]
        if others:
            rule = f"is not what this machine has: {others[0].name}"
            fix = "name this machine's GPU, as in `planner-cli catalog gpus`"
            raise fault("cluster.gpu", cluster.gpu.name, rule, fix)
        return Capacity(num_devices=len(gpus), device="cuda")

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError without a GPU, torch or a folder, SpecError for another GPU."""
        if need.device == "cuda":
            capacity = self.capacity(need.job.cluster)
            if not capacity.num_devices:
                raise too_few(1, capacity)
        self.launcher.check(need)

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """Runs one probe, once its devices are free. Raises ProbeError, SpecError."""
        watch = watch or Watch()
        wanted = task.num_processes()
        if task.device == "cuda":
            capacity = self.capacity(task.parsed().cluster)
            if capacity.num_devices < wanted:
                raise too_few(wanted, capacity)
            with self._gpus(wanted, watch) as lease:
                return self.launcher.run(task, lease, watch)
        if wanted > MAX_CPU_PROCESSES:
            raise ProbeError(
                f"the CPU pool runs {counted(MAX_CPU_PROCESSES, 'process')} at most, and this "
                f"layout has {wanted}; make num_gpus smaller"
            )
        with self._cpu(wanted, watch) as lease:
            return self.launcher.run(task, lease, watch)

    def _visible(self) -> tuple[Gpu, ...]:
        return visible(self.settings.survey(), self.settings.environment)

    @contextlib.contextmanager
    def _gpus(self, wanted: int, watch: Watch) -> Iterator[DeviceLease]:
        """Waits for a lease on idle GPUs. Raises ProbeError if others do not leave them."""
        foreign_since: float | None = None
        while True:
            locks = LeaseLocks(self.settings.leases, machine=self.settings.machine)
            try:
                free, foreign = self._take(locks, wanted)
                if len(free) == wanted:
                    yield DeviceLease(
                        devices=tuple(gpu.uuid for gpu in free),
                        bus_ids=tuple(gpu.bus_id for gpu in free if gpu.bus_id),
                        others=others_on(free),
                        locks=locks.descriptors,
                        gpu_name=free[0].name,
                        token=locks.token,
                    )
                    return
                short = len(self._visible()) - len(foreign) < wanted
                foreign_since = (foreign_since or time.monotonic()) if short else None
                patience = self.settings.foreign_seconds
                if foreign_since is not None and time.monotonic() - foreign_since >= patience:
                    raise ProbeError(
                        f"{others_on(foreign)}; a measurement beside it would be wrong: end it, "
                        "hide the GPU by CUDA_VISIBLE_DEVICES, or allow small ones such as a "
                        "desktop by PLANNER_PROBE_TOLERATED_GIB"
                    )
            finally:
                locks.release()
            watch.progress("waiting for GPUs that other probes use")
            _pause(watch)

    def _take(self, locks: LeaseLocks, wanted: int) -> tuple[list[Gpu], list[Gpu]]:
        """Returns (idle GPUs that we locked, unlocked GPUs that a foreign process uses)."""
        gpus = self._visible()
        locked = {gpu.uuid for gpu in gpus if locks.lock(f"gpu-{gpu.uuid}")}
        # check for users after locking: before it, an earlier probe may have been there
        ours = [gpu for gpu in self._visible() if gpu.uuid in locked]
        tolerated = self.launcher.settings.tolerated_bytes
        foreign = [gpu for gpu in ours if gpu.foreign(tolerated) is not None]
        free = [gpu for gpu in ours if gpu.foreign(tolerated) is None]
        for gpu in [*foreign, *free[wanted:]]:
            locks.unlock(f"gpu-{gpu.uuid}")
        return free[:wanted], foreign

    @contextlib.contextmanager
    def _cpu(self, wanted: int, watch: Watch) -> Iterator[DeviceLease]:
        """A lease on as many CPU slots as processes; on all slots for a probe that has more."""
        slots = min(wanted, self.settings.cpu_slots)
        while True:
            locks = LeaseLocks(self.settings.leases, machine=self.settings.machine)
            try:
                for number in range(self.settings.cpu_slots):
                    if len(locks) < slots:
                        locks.lock(f"cpu-{number}")
                if len(locks) == slots:
                    yield DeviceLease(locks=locks.descriptors, token=locks.token)
                    return
            finally:
                locks.release()
            watch.progress("waiting for other probes on this CPU")
            _pause(watch)


def _pause(watch: Watch) -> None:
    if watch.stop.wait(RETRY_SECONDS):
        raise ProbeError("stopped while waiting for a device; start it again")
