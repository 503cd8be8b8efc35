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
import uuid
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from planner.errors import ProbeError
from planner.probes import guardian
from planner.probes.folder import END, NODE_STARTS
from planner.probes.launch import LaunchSettings, Watch, disk_errors, prepare, with_free_port
from planner.probes.outcome import Begin, conclude, write_result
from planner.probes.packages import mounts
from planner.probes.pools.nvidia import Gpu, is_same_gpu
from planner.probes.pools.protocol import UNLIMITED, Capacity, Pool, PoolSettings
from planner.probes.pools.slurm_allocation import FOLDER, Allocation, Held, NodeGrid
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
from planner.probes.protocol import TAKEN_AWAY, Failed, ProbeResult, ProbeTask, device_of
from planner.probes.trainers import Program
from planner.probes.variables import DeviceLease, environment, inherited
from planner.specs.cluster import ClusterSpec

SLACK_SECONDS = 120.0  # for Slurm to start the step, and for the nodes' guardians to end it
CHECK_MINUTES = 10  # of the job that checks whether a node has torch


class SlurmPool(Pool):
    """Runs probes on a Slurm cluster.

    partition: where jobs go; None is Slurm's default.
    pace: how often files and Slurm are asked, and what is waited for how long.
    """

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
        return Capacity(
            num_devices=UNLIMITED,
            device=device_of(cluster),
            spans_nodes=True,
            at_once=self.options.gpus_at_once,
            shared=True,
            avoids_hosts=True,
        )

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError if Slurm's commands or, with `wait`, its nodes' torch are missing."""
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
            run = _Run(pool=self, task=task, grid=grid, watch=observer)
            before = self._job_of(task.id)  # that a process which crashed had
            left = None
            if before is not None and before.name != task.id and before.left(task.id) is not None:
                left = run.once(before, None)
            if left is not None and not _is_lost(left):
                return _checked(left)
            with self._allocation(task, grid, self._kept_off(observer, grid)) as allocation:
                tries = self.settings.port_tries
                return _checked(
                    with_free_port(tries, lambda: run.until_not_lost(allocation, left), observer)
                )

    @contextlib.contextmanager
    def hold(
        self, name: str, cluster: ClusterSpec, num_devices: int, seconds: float
    ) -> Iterator[Pool]:
        """A copy of the pool whose probes share a job as long as the partition allows."""
        grid = NodeGrid.of(num_devices, cluster.gpus_per_node)
        device = device_of(cluster)
        longest = self.slurm.longest_seconds(self.partition)
        job = self._job(name, grid, device, min(seconds + SLACK_SECONDS, longest))
        pool = copy(self)
        pool._held = Held(allocation=job, grid=grid, device=device)
        try:
            yield pool
        finally:
            with pool._held.free:
                job.close()

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
        self, name: str, grid: NodeGrid, device: str, seconds: float, avoid: Iterable[str] = ()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One probe on the nodes of a pool."""

    pool: SlurmPool
    task: ProbeTask
    grid: NodeGrid
    watch: Watch

    def until_not_lost(self, allocation: Allocation, lost: ProbeResult | None) -> ProbeResult:
        """The result of the first run that was not lost with its job, or of the last allowed.

        lost: a run before, in the allocation of a crashed process.
        """
        result = self.once(allocation, lost)
        for _ in range(self.pool.options.restarts):
            if not _is_lost(result) or self.watch.stop.is_set():
                break
            self.watch.progress("its job was lost; it runs again")
            result = self.once(allocation, result)
        return result

    def once(self, allocation: Allocation, lost: ProbeResult | None) -> ProbeResult:
        """One run in the allocation, or the end of the one that a process before us left in it."""
        task, pool = self.task, self.pool
        order = allocation.left(task.id)
        if order is None:
            begin = Begin(
                num_gpus=task.num_processes(),
                token=uuid.uuid4().hex,
                lost_seconds=0.0 if lost is None else lost.wall_seconds,
                lost=() if lost is None else _note(lost),
            )
            folder, program = prepare(pool.settings, task, begin, self.watch)
            if isinstance(program, Failed):
                return write_result(folder, task, begin, program)
            seconds = task.time_limit_seconds + SLACK_SECONDS
            order = allocation.put(task.id, folder, self._srun(folder, program), seconds)
        else:
            self.watch.folder(order.probe)
        try:
            wait = OrderWait(order, allocation, pool.options, pool.pace)
            end = wait.end(task.time_limit_seconds, self.grid.nodes, self.watch)
            guardian.write_json(order.probe / END, end.model_dump())
            result = conclude(order.probe)
            if _is_lost(result):
                return result  # its hosts are no reason; Slurm itself avoids those that are down
            return result.model_copy(update={"hosts": _hosts(order.probe)})
        finally:
            order.conclude()

    def _srun(self, folder: Path, program: Program) -> list[str]:
        task, grid, options, settings = self.task, self.grid, self.pool.options, self.pool.settings
        ours = environment(settings.folder, task, DeviceLease(), program.env)
        ours.pop("GLOO_SOCKET_IFNAME")  # the node chooses its interface and, below, its GPUs
        if task.device == "cuda":
            ours.pop("CUDA_VISIBLE_DEVICES")
        return [
            *("env", *(f"{name}={value}" for name, value in ours.items())),
            *("srun", "--job-name", task.id, "--overlap", "--kill-on-bad-exit=1"),
            *("--export=ALL", "--input=none"),
            *options.nodes(grid.nodes, grid.per_node, task.device),
            *options.container([*mounts(settings.folder), folder]),
            *(settings.python, "-m", "planner.probes.pools.slurm_node"),
            *(settings.worker, str(grid.per_node), str(settings.tolerated_bytes)),
        ]


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
    """The result, if Slurm gave the GPU that the job names. Raises ProbeError: it spoils fits."""
    given_name, gpu = result.environment.gpu_name, result.task.parsed().cluster.gpu
    if given_name is None or gpu.name == "cpu":
        return result
    if not is_same_gpu(gpu, Gpu(name=given_name)):
        raise ProbeError(
            f"Slurm gave {given_name} and the job says {gpu.name}; name that GPU in the job, or "
            "another partition"
        )
    return result
