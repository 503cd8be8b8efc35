"""The pool of this machine: leases on its GPUs, or on its CPU where a job asks for the CPU pool.

A lease is a lock on a file, one a GPU, which the kernel drops with the last process that has it
open: the runner, and the guardian of the probe that uses it. So a GPU is free again when, and only
when, nothing of the probe is left, whoever died in what order. A GPU that some other program uses
is not taken.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.catalog.clusters import gpu_names
from planner.errors import Fault, ProbeError, SpecError
from planner.specs.cluster import ClusterSpec
from planner.units import counted
from probes import guardian
from probes.launch import Held, Launcher, Watch
from probes.pools.nvidia import Gpu, Survey, is_same_gpu, survey
from probes.preflight import Need
from probes.protocol import ProbeResult, ProbeTask

# judgement: beyond it even a tiny model tells nothing but how the machine swaps
MAX_CPU_PROCESSES = 16
LOOK_SECONDS = 0.3
NO_GPU = (
    "use --emulate for memory and counts without one, or a job with cluster gpu: cpu to try the "
    "whole path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a pool can give one probe. why_none: in words, where it has no device of this kind."""

    num_devices: int
    device: str
    why_none: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """leases: folder of lock files, shared by all users of this machine.  environment: for the GPUs
    that we were given.
    """

    leases: Path = Path(tempfile.gettempdir()) / "planner-leases"
    look: Callable[[], Survey] = survey
    environment: Mapping[str, str] | None = None
    cpu_slots: int = max(1, os.cpu_count() or 1)
    # a driver takes a moment to give back what a process held that has just been killed
    stranger_seconds: float = 5.0


class LocalPool:
    """A ProbeRunner on this machine."""

    name = "local"

    def __init__(self, launcher: Launcher, settings: PoolSettings | None = None) -> None:
        self.launcher, self.settings = launcher, settings or PoolSettings()

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """Devices for a job on this cluster's GPU, free or not. Raises SpecError where this machine
        has another GPU.
        """
        if cluster.gpu.name == "cpu":
            return Capacity(num_devices=MAX_CPU_PROCESSES, device="cpu")
        seen = self.settings.look()
        gpus, why = self._visible(seen), seen.problem
        if not gpus:
            why = why or (
                "none is visible to us (CUDA_VISIBLE_DEVICES)" if seen.gpus else "it has none"
            )
            return Capacity(num_devices=0, device="cuda", why_none=why)
        known = cluster.gpu.name in gpu_names()
        # what a user describes is the user's to know
        others = [gpu for gpu in gpus if known and not is_same_gpu(cluster.gpu, gpu)]
        if others:
            rule = f"is not what this machine has: {others[0].name}"
            raise SpecError(
                Fault(
                    "cluster.gpu",
                    cluster.gpu.name,
                    rule,
                    "name this machine's GPU, as in `planner-cli catalog gpus`",
                )
            )
        return Capacity(num_devices=len(gpus), device="cuda")

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError where this machine can run no probe at all: no GPU, no torch, no place
        for files.

        SpecError where it has another GPU than the job says.
        """
        if need.device == "cuda":
            capacity = self.capacity(need.job.cluster)
            if not capacity.num_devices:
                raise too_few(1, capacity)
        self.launcher.check(need)

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """One probe, when its devices are free. Raises ProbeError where they never can be,
        SpecError for another GPU.
        """
        watch = watch or Watch()
        wanted = task.num_processes()
        if task.device == "cuda":
            capacity = self.capacity(task.parsed().cluster)
            if capacity.num_devices < wanted:
                raise too_few(wanted, capacity)
            with self._gpus(wanted, watch) as held:
                return self.launcher.run(task, held, watch)
        if wanted > MAX_CPU_PROCESSES:
            raise ProbeError(
                f"the CPU pool runs {counted(MAX_CPU_PROCESSES, 'process')} at most, and this "
                f"layout has {wanted}; make num_gpus smaller"
            )
        with self._cpu(wanted, watch) as held:
            return self.launcher.run(task, held, watch)

    def _visible(self, seen: Survey) -> tuple[Gpu, ...]:
        """GPUs that we may use: whole ones, of those that CUDA_VISIBLE_DEVICES leaves us."""
        whole = tuple(gpu for gpu in seen.gpus if not gpu.sliced)
        environment = os.environ if self.settings.environment is None else self.settings.environment
        allowed = environment.get("CUDA_VISIBLE_DEVICES")
        if allowed is None:
            return whole
        names = [name.strip() for name in allowed.split(",")]
        return tuple(
            gpu
            for gpu in whole
            if str(gpu.index) in names or any(name and gpu.uuid.startswith(name) for name in names)
        )

    @contextlib.contextmanager
    def _gpus(self, wanted: int, watch: Watch) -> Iterator[Held]:
        told = False
        strange_since: float | None = None
        while True:
            held = _Locks(self.settings.leases)
            try:
                free, strangers = self._take(held, wanted)
                if len(free) == wanted:
                    devices = tuple(gpu.uuid for gpu in free)
                    yield Held(
                        devices=devices,
                        locks=held.descriptors,
                        gpu_name=free[0].name,
                        token=held.token,
                    )
                    return
                short = len(self._visible(self.settings.look())) - len(strangers) < wanted
                strange_since = (strange_since or time.monotonic()) if short else None
                if (
                    strange_since is not None
                    and time.monotonic() - strange_since >= self.settings.stranger_seconds
                ):
                    taken = "; ".join(
                        f"GPU {gpu.index} is used by {gpu.stranger()}" for gpu in strangers
                    )
                    raise ProbeError(
                        f"{taken}; a measurement beside it would be wrong: end it, or hide the "
                        "GPU by CUDA_VISIBLE_DEVICES"
                    )
            finally:
                held.release()
            if not told:
                watch.progress("waiting for GPUs that other probes use")
                told = True
            _pause(watch)

    def _take(self, held: "_Locks", wanted: int) -> tuple[list[Gpu], list[Gpu]]:
        """(GPUs that are locked now and idle, GPUs that nobody locked and somebody uses)."""
        gpus = self._visible(self.settings.look())
        locked = [gpu for gpu in gpus if held.lock(f"gpu-{gpu.uuid}")]
        mine = {gpu.uuid for gpu in locked}
        # what it was before the lock does not count
        again = [gpu for gpu in self._visible(self.settings.look()) if gpu.uuid in mine]
        strangers = [gpu for gpu in again if gpu.stranger() is not None]
        free = [gpu for gpu in again if gpu.stranger() is None]
        for gpu in [*strangers, *free[wanted:]]:
            held.unlock(f"gpu-{gpu.uuid}")
        return free[:wanted], strangers

    @contextlib.contextmanager
    def _cpu(self, wanted: int, watch: Watch) -> Iterator[Held]:
        """As many slots as processes, all of them for a probe that has more."""
        slots = min(wanted, self.settings.cpu_slots)
        while True:
            held = _Locks(self.settings.leases)
            try:
                for number in range(self.settings.cpu_slots):
                    if len(held.descriptors) < slots:
                        held.lock(f"cpu-{number}")
                if len(held.descriptors) == slots:
                    yield Held(devices=None, locks=held.descriptors, token=held.token)
                    return
            finally:
                held.release()
            watch.progress("waiting for other probes on this CPU")
            _pause(watch)


def too_few(wanted: int, capacity: Capacity) -> ProbeError:
    """The one clear line."""
    if capacity.num_devices == 0:
        return ProbeError(f"no NVIDIA GPU to probe on: {capacity.why_none}; {NO_GPU}")
    return ProbeError(
        f"the layout needs {counted(wanted, 'GPU')}, this machine has {capacity.num_devices}; "
        "use --emulate for one rank of it"
    )


def _pause(watch: Watch) -> None:
    if watch.stop.wait(LOOK_SECONDS):
        raise ProbeError("stopped while waiting for a device; start it again")


class _Locks:
    """Locks of one lease. token: written into the files, so that what an owner left behind without
    a guardian can be found and ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        self._held: dict[str, int] = {}

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that carry the locks."""
        return tuple(self._held.values())

    def lock(self, name: str) -> bool:
        """Whether the file is ours now. Raises ProbeError where no lock can be."""
        descriptor = self._open(f"{name}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._held[name] = descriptor
        before = os.read(descriptor, 4096)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            guardian.kill_all(str(json.loads(before)["token"]))
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            json.dumps({"token": self.token, "pid": os.getpid(), "since": time.time()}).encode(),
            0,
        )
        return True

    def _open(self, name: str) -> int:
        """For everybody to read and write: another user's probe has to wait for ours."""
        path = self.folder / name
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.chmod(0o1777)
            if path.exists():
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o666)
            return descriptor
        except OSError as error:
            raise ProbeError(
                f"{path}: no lease can be taken ({error.strerror}); set PLANNER_LEASE_FOLDER to a "
                "place of yours"
            ) from None

    def unlock(self, name: str) -> None:
        """Gives one back."""
        os.close(self._held.pop(name))

    def release(self) -> None:
        """Gives all back."""
        for name in list(self._held):
            self.unlock(name)
