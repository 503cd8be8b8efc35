"""Probes through Slurm, each an `srun` inside a job of ours (`probes/pools/slurm_allocation.py`).

The job is submitted by sbatch and does not need us: a probe whose planner ends is found again by
its name. The guardian on a node starts torchrun, enforces the exact time limit (Slurm's are whole
minutes), and ends every process when Slurm ends the step or a file asks it to. All nodes must share
the folder of probes. Exit codes pass through several programs and mean little, so the files decide;
Slurm is asked why a probe ended that its own files do not explain.
"""

import contextlib
import json
import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from planner.errors import ProbeError
from planner.probes import guardian
from planner.probes.folder import END, NODE_STARTS
from planner.probes.launch import LaunchSettings, Watch, disk_errors, prepare, with_free_port
from planner.probes.outcome import Begin, conclude, write_result
from planner.probes.packages import mounts
from planner.probes.pools.capacity import UNLIMITED, Capacity
from planner.probes.pools.nvidia import Gpu, is_same_gpu
from planner.probes.pools.protocol import Pool, PoolSettings
from planner.probes.pools.slurm_allocation import FOLDER, Allocation
from planner.probes.pools.slurm_commands import REFUSED, Slurm, refusal
from planner.probes.pools.slurm_node import NODE_NAME
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.pools.slurm_wait import OrderWait, SlurmPace
from planner.probes.preflight import (
    CHECK_SECONDS,
    Need,
    ask,
    check_folder,
    check_trainer,
    command,
    problem_in,
)
from planner.probes.programs import Program
from planner.probes.protocol import TAKEN_AWAY, Failed, ProbeResult, ProbeTask
from planner.probes.variables import DeviceLease, environment, inherited
from planner.specs.cluster import ClusterSpec

SLACK_SECONDS = 120.0  # for Slurm to start the step, and for the nodes' guardians to end it
CHECK_MINUTES = 10  # of the job that checks whether a node has torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGrid:
    """How many nodes a probe gets, and processes on each. whole: one for each GPU of a node."""

    nodes: int
    per_node: int
    whole: bool = False

    @classmethod
    def of(cls, processes: int, widest: int) -> "NodeGrid":
        """The grid for so many processes on nodes of so many GPUs.

        Raises ProbeError if the processes do not fill whole nodes.
        """
        per_node = min(processes, widest)
        if processes % per_node:
            raise ProbeError(
                f"{processes} processes do not fill nodes of {per_node}; give the job's "
                "cluster gpus_per_node that divides them"
            )
        return cls(nodes=processes // per_node, per_node=per_node, whole=per_node == widest)

    def holds(self, other: "NodeGrid") -> bool:
        fits = other.nodes <= self.nodes and other.per_node <= self.per_node
        return fits and (self.whole or not other.whole)


@dataclass(kw_only=True)
class Held:
    """An allocation that stays between probes; one of them runs in it at a time."""

    allocation: Allocation
    grid: NodeGrid
    device: str
    free: threading.Lock

    def has_room(self, grid: NodeGrid, device: str, seconds: float) -> bool:
        """Whether a task fits into it when it has just begun."""
        lasts = seconds <= self.allocation.seconds
        return lasts and device == self.device and self.grid.holds(grid)


class SlurmPool:
    """Runs probes on a Slurm cluster.

    partition: where jobs go; None is Slurm's default.
    pace: how often files and Slurm are asked, and what is waited for how long.
    """

    name: ClassVar[str] = "slurm"
    reads_files: ClassVar[bool] = False

    def __init__(
        self,
        settings: LaunchSettings,
        *,
        partition: str | None = None,
        options: SlurmOptions | None = None,
        pace: SlurmPace | None = None,
    ) -> None:
        self.settings, self.partition = settings, partition
        self.options, self.pace = options or SlurmOptions(), pace or SlurmPace()
        self.slurm = Slurm()
        self._held: Held | None = None

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """The cluster that this machine submits to; the option is the partition."""
        return cls(settings.launch, partition=option, options=settings.slurm)

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """No limit but the operator's: Slurm reports what it has when a job is submitted."""
        device = "cpu" if cluster.gpu.name == "cpu" else "cuda"
        return Capacity(
            num_devices=UNLIMITED,
            device=device,
            spans_nodes=True,
            at_once=self.options.gpus_at_once,
            shared=True,
            avoids_hosts=True,
        )

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError if no probe can run: Slurm's commands or its nodes' torch are missing.

        wait: also check a node.
        """
        self.slurm.check()
        check_folder(self.settings.folder.absolute())
        self.check_container()
        if not wait:
            return
        check_trainer(need, self.settings.python)
        name = f"planner-check-{uuid.uuid4().hex[:12]}"
        srun = [
            *("srun", "--job-name", name, "--time", str(CHECK_MINUTES)),
            *self.options.job(self.partition),
            *self.options.nodes(1, 1, need.device),
            *self.options.container(mounts(self.settings.folder)),
            *("--export=ALL", "--input=none"),
        ]
        asking = command(self.settings.python, need, self.settings.worker)
        seconds = self.options.queue_seconds + CHECK_SECONDS
        try:
            done = ask([*srun, *asking], folder=self.settings.folder, seconds=seconds)
        finally:
            # cancels nothing if the job has ended
            subprocess.run(["scancel", "--name", name], capture_output=True, check=False)
        refused = REFUSED.search(done.stderr)
        if refused is not None and not done.stdout:
            raise refusal(refused["message"])
        problem = problem_in(done, self.settings.python)
        if problem is not None:
            raise ProbeError(f"on a node of the cluster {problem}")

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """Runs one probe to its end, again if it lost its job; or awaits the one left of this id.

        Raises ProbeError with Slurm's message if it rejects the job, or has no nodes for it.
        """
        self.slurm.check()
        self.check_container()
        observer = watch or Watch()
        grid = NodeGrid.of(task.num_processes(), task.parsed().cluster.gpus_per_node)
        with disk_errors(self.settings.folder):
            left = self._await_left(task, grid, observer)
            if left is not None and not _is_lost(left):
                return _checked(left)
            with self._allocation(task, grid, self._kept_off(observer, grid)) as allocation:
                return _checked(
                    with_free_port(
                        self.settings.port_tries,
                        lambda _: self._until_not_lost(task, grid, allocation, observer, left),
                        observer,
                    )
                )

    @contextlib.contextmanager
    def hold(
        self, name: str, cluster: ClusterSpec, num_devices: int, seconds: float
    ) -> Iterator[Pool]:
        """A copy of the pool whose probes share a job, which lasts as long as the partition allows.

        See `Pool.hold`.
        """
        grid = NodeGrid.of(num_devices, cluster.gpus_per_node)
        device = "cpu" if cluster.gpu.name == "cpu" else "cuda"
        longest = self.slurm.longest_seconds(self.partition)
        held = Held(
            allocation=self._job(name, grid, device, min(seconds + SLACK_SECONDS, longest)),
            grid=grid,
            device=device,
            free=threading.Lock(),
        )
        pool = SlurmPool(
            self.settings, partition=self.partition, options=self.options, pace=self.pace
        )
        pool._held = held
        try:
            yield pool
        finally:
            with held.free:
                held.allocation.close()

    def is_left(self, task_id: str) -> bool:
        return self._job_of(task_id) is not None

    def end_left(self, task_id: str) -> None:
        allocation = self._job_of(task_id)
        order = None if allocation is None else allocation.left(task_id, parts=True)
        if allocation is not None and order is not None:
            OrderWait(order, allocation, self.options, self.pace).end_it()
            order.conclude()
            if allocation.name == order.task_id:
                allocation.close()

    # ---- one probe -------------------------------------------------------------------------------

    def _until_not_lost(
        self,
        task: ProbeTask,
        grid: NodeGrid,
        allocation: Allocation,
        watch: Watch,
        lost: ProbeResult | None,
    ) -> ProbeResult:
        """The result of the first run that was not lost with its job, or of the last allowed.

        lost: a run before, in the allocation of a crashed process.
        """
        result = self._once(task, grid, allocation, watch, lost)
        for _ in range(self.options.restarts):
            if not _is_lost(result) or watch.stop.is_set():
                break
            watch.progress("its job was lost; it runs again")
            result = self._once(task, grid, allocation, watch, result)
        return result

    def _await_left(self, task: ProbeTask, grid: NodeGrid, watch: Watch) -> ProbeResult | None:
        """The result of the run that a crashed process left in an allocation that it held."""
        left = self._job_of(task.id)
        if left is None or left.name == task.id or left.left(task.id) is None:
            return None
        return self._once(task, grid, left, watch, None)

    def _once(
        self,
        task: ProbeTask,
        grid: NodeGrid,
        allocation: Allocation,
        watch: Watch,
        lost: ProbeResult | None,
    ) -> ProbeResult:
        """One run in the allocation, or the end of the one that a process before us left in it."""
        order = allocation.left(task.id)
        if order is None:
            begin = Begin.now(num_gpus=task.num_processes(), token=uuid.uuid4().hex)
            if lost is not None:
                begin = replace(begin, lost_seconds=lost.wall_seconds, lost=_note(lost))
            folder, program = prepare(self.settings, task, begin, watch)
            if isinstance(program, Failed):
                return write_result(folder, task, begin, program)
            srun = self._srun(task, grid, folder, program)
            order = allocation.put(task.id, folder, srun, task.time_limit_seconds + SLACK_SECONDS)
        else:
            watch.folder(order.probe)
        try:
            end = OrderWait(order, allocation, self.options, self.pace).end(
                task.time_limit_seconds, grid.nodes, watch
            )
            guardian.write_json(order.probe / END, asdict(end))
            result = conclude(order.probe)
            if _is_lost(result):
                return result  # its hosts are no reason; Slurm itself avoids those that are down
            return result.model_copy(update={"hosts": _hosts(order.probe)})
        finally:
            order.conclude()

    def _srun(self, task: ProbeTask, grid: NodeGrid, folder: Path, program: Program) -> list[str]:
        ours = environment(self.settings.folder, task, DeviceLease(), program.env)
        ours.pop("GLOO_SOCKET_IFNAME")  # the node chooses its interface and, below, its GPUs
        if task.device == "cuda":
            ours.pop("CUDA_VISIBLE_DEVICES")
        return [
            *("env", *(f"{name}={value}" for name, value in ours.items())),
            *("srun", "--job-name", task.id, "--overlap", "--kill-on-bad-exit=1"),
            *("--export=ALL", "--input=none"),
            *self.options.nodes(grid.nodes, grid.per_node, task.device),
            *self.options.container([*mounts(self.settings.folder), folder]),
            *(self.settings.python, "-m", "planner.probes.pools.slurm_node"),
            *(self.settings.worker, str(grid.per_node), str(self.settings.tolerated_bytes)),
        ]

    # ---- its allocation --------------------------------------------------------------------------

    def _kept_off(self, watch: Watch, grid: NodeGrid) -> frozenset[str]:
        """Hosts that a probe is kept off. Slurm refuses a job that too few nodes are left for."""
        if not watch.rather_not:
            return watch.avoid
        hosts = self.slurm.hosts(self.partition, self.options.constraint)
        return watch.kept_off(hosts - watch.avoid, grid.nodes)

    @contextlib.contextmanager
    def _allocation(
        self, task: ProbeTask, grid: NodeGrid, avoid: frozenset[str]
    ) -> Iterator[Allocation]:
        """A new allocation, or the held one if the task fits into it and may run on any host."""
        seconds = task.time_limit_seconds + SLACK_SECONDS
        held = self._held
        if held is not None and not avoid and held.has_room(grid, task.device, seconds):
            with held.free:
                yield held.allocation
            return
        allocation = self._job(task.id, grid, task.device, seconds, avoid)
        try:
            yield allocation
        finally:
            allocation.close()

    def _job(
        self,
        name: str,
        grid: NodeGrid,
        device: str,
        seconds: float,
        avoid: frozenset[str] = frozenset(),
    ) -> Allocation:
        """A job of this name and size; it exists once it has an order."""
        mine = inherited(self.settings.inherit)
        hidden = {"GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"}
        given = {
            key: os.environ[key]
            for key in mine
            # of a job that we run in ourselves; they would contradict what we ask for
            if key not in hidden and (not key.startswith("SLURM_") or key == "SLURM_CONF")
        }
        return Allocation(
            slurm=self.slurm,
            parent=self.settings.folder.absolute(),
            name=name,
            arguments=[
                *self.options.job(self.partition, avoid),
                *self.options.nodes(grid.nodes, grid.per_node, device),
                *self.options.share(grid.per_node, device, whole=grid.whole),
            ],
            environment=given,
            seconds=seconds,
        )

    def _job_of(self, task_id: str) -> Allocation | None:
        """The allocation that holds an unread order of this task, or of a part of this probe."""
        grid = NodeGrid(nodes=1, per_node=1)
        parent = self.settings.folder.absolute() / FOLDER
        for path in parent.iterdir() if parent.is_dir() else ():
            found = self._job(path.name, grid, "cpu", 0.0)
            if found.left(task_id, parts=True) is not None:
                return found
        return None

    def check_container(self) -> None:
        """Raises ProbeError if probes shall run in an image and this Slurm has no containers."""
        image = self.options.container_image
        if image is not None and not self.slurm.has_option("--container-image"):
            raise ProbeError(
                f"this Slurm's srun has no --container-image, which {image} needs; install its "
                "plugin Pyxis, or unset PLANNER_SLURM_CONTAINER_IMAGE"
            )


def _hosts(folder: Path) -> list[str]:
    told = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(NODE_STARTS)]
    return sorted(one["env"][NODE_NAME] for one in told)


def _is_lost(result: ProbeResult) -> bool:
    """Whether the pool took the probe's devices from it."""
    return isinstance(result.outcome, Failed) and result.outcome.kind in TAKEN_AWAY


def _note(lost: ProbeResult) -> tuple[str, ...]:
    """A line on the runs before, for the notes of the next."""
    outcome = lost.outcome
    assert isinstance(outcome, Failed), "only failures run again"
    before = [note for note in lost.notes if note.startswith("ran again")]
    return (*before, f"ran again after {lost.wall_seconds:.0f} s: {outcome.message}")


def _checked(result: ProbeResult) -> ProbeResult:
    """Returns the result if Slurm gave the GPU that the job names. Raises ProbeError.

    A wrong GPU name would spoil every fit.
    """
    given_name, gpu = result.environment.gpu_name, result.task.parsed().cluster.gpu
    if given_name is None or gpu.name == "cpu":
        return result
    given = Gpu(
        index=0,
        uuid="",
        name=given_name,
        memory_bytes=None,
        used_bytes=None,
        driver="",
        sliced=False,
    )
    if not is_same_gpu(gpu, given):
        raise ProbeError(
            f"Slurm gave {given_name} and the job says {gpu.name}; name that GPU in the job, or "
            "another partition"
        )
    return result
