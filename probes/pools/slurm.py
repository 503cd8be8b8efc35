"""Probes through Slurm: one `srun` per probe, with a guardian here and one on each node.

The guardian here ends `srun` and cancels the job by its name when the time is up or the runner has
ended. The guardian on a node starts torchrun, enforces the exact time limit (Slurm's are whole
minutes), and ends every process when Slurm ends the step. All nodes must share the folder of
probes. Exit codes pass through several programs and mean little, so the files decide.
"""

import math
import re
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from planner.errors import ProbeError
from planner.specs.cluster import ClusterSpec
from probes.folder import END, LOG
from probes.launch import (
    ROOT,
    DeviceLease,
    GuardianSpec,
    LaunchSettings,
    Watch,
    disk_errors,
    environment,
    inherited,
    prepare,
    supervise,
    with_free_port,
)
from probes.outcome import Begin, conclude, read_end, read_logs, write_result
from probes.pools.capacity import UNLIMITED, Capacity
from probes.pools.nvidia import Gpu, is_same_gpu
from probes.pools.protocol import PoolSettings
from probes.preflight import (
    CHECK_SECONDS,
    Need,
    ask,
    check_folder,
    check_trainer,
    command,
    problem_in,
)
from probes.protocol import Failed, ProbeResult, ProbeTask

MINUTE = 60.0
QUEUE_SECONDS = 3600.0
SLACK_SECONDS = 120.0  # for Slurm to start the step, and for the nodes' guardians to end it
CHECK_MINUTES = 10  # of the job that checks whether a node has torch
COMMANDS = ("srun", "scancel")
REFUSED = re.compile(r"^srun: (?:error|fatal): (?P<message>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGrid:
    """How many nodes a probe gets, and processes on each."""

    nodes: int
    per_node: int

    @classmethod
    def of(cls, task: ProbeTask) -> "NodeGrid":
        """The grid for a task, by the GPUs of a node of its cluster.

        Raises ProbeError if the processes do not fill whole nodes.
        """
        processes, widest = task.num_processes(), task.parsed().cluster.gpus_per_node
        per_node = min(processes, widest)
        if processes % per_node:
            raise ProbeError(
                f"{processes} processes do not fill nodes of {per_node}; give the job's "
                "cluster gpus_per_node that divides them"
            )
        return cls(nodes=processes // per_node, per_node=per_node)


class SlurmPool:
    """Runs probes on a Slurm cluster.

    partition: where jobs go; None is Slurm's default.
    queue_seconds: how long a job may wait for its nodes.
    """

    name: ClassVar[str] = "slurm"
    reads_files: ClassVar[bool] = False

    def __init__(
        self,
        settings: LaunchSettings,
        *,
        partition: str | None = None,
        queue_seconds: float = QUEUE_SECONDS,
    ) -> None:
        self.settings, self.partition, self.queue_seconds = settings, partition, queue_seconds

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """The cluster that this machine submits to; the option is the partition."""
        return cls(settings.launch, partition=option)

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """No limit of ours: Slurm reports what it has when a job is submitted."""
        device = "cpu" if cluster.gpu.name == "cpu" else "cuda"
        return Capacity(num_devices=UNLIMITED, device=device, spans_nodes=True, shared=True)

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError if no probe can run: Slurm's commands or its nodes' torch are missing.

        wait: also check a node.
        """
        _check_commands()
        check_folder(self.settings.folder.absolute())
        if not wait:
            return
        check_trainer(need, self.settings.python)
        name = f"planner-check-{uuid.uuid4().hex[:12]}"
        srun = self._srun(name, nodes=1, per_node=1, device=need.device, minutes=CHECK_MINUTES)
        asking = command(self.settings.python, need.device, self.settings.worker)
        try:
            done = ask([*srun, *asking], root=ROOT, seconds=self.queue_seconds + CHECK_SECONDS)
        finally:
            # cancels nothing if the job has ended
            subprocess.run(["scancel", "--name", name], capture_output=True, check=False)
        refused = REFUSED.search(done.stderr)
        if refused is not None and not done.stdout:
            raise _refused(refused["message"])
        problem = problem_in(done, self.settings.python)
        if problem is not None:
            raise ProbeError(f"on a node of the cluster {problem}")

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """Runs one probe to its end.

        Raises ProbeError with Slurm's message if it rejects the job.
        """
        _check_commands()
        observer, grid = watch or Watch(), NodeGrid.of(task)

        def once(attempt: int) -> ProbeResult:
            return self._once(task, grid, attempt, observer)

        return _checked(with_free_port(self.settings.port_tries, once, observer))

    def _once(self, task: ProbeTask, grid: NodeGrid, attempt: int, watch: Watch) -> ProbeResult:
        with disk_errors(self.settings.folder):
            return self._in_folder(task, grid, attempt, watch)

    def _in_folder(
        self, task: ProbeTask, grid: NodeGrid, attempt: int, watch: Watch
    ) -> ProbeResult:
        begin = Begin.now(num_gpus=task.num_processes(), token=uuid.uuid4().hex)
        folder, program = prepare(self.settings, task, begin, watch)
        if isinstance(program, Failed):
            return write_result(folder, task, begin, program)
        name = f"planner-{begin.token[:12]}"
        env = environment(task, DeviceLease(), program.env)
        chosen = {"GLOO_SOCKET_IFNAME"}  # the node chooses its interface and, below, its GPUs
        if task.device == "cuda":
            chosen.add("CUDA_VISIBLE_DEVICES")
        inside = [
            self.settings.python,
            "-m",
            "probes.pools.slurm_node",
            self.settings.worker,
            str(attempt),
        ]
        spec = GuardianSpec(
            argv=[*self._srun_of(task, grid, name), *inside],
            env={name: value for name, value in env.items() if name not in chosen},
            inherit=[name for name in inherited(self.settings.inherit) if name not in chosen],
            cwd=str(folder),
            output=str(folder / LOG),
            end=str(folder / END),
            token=begin.token,
            time_limit_seconds=self.queue_seconds + task.time_limit_seconds + SLACK_SECONDS,
            on_end=[["scancel", "--name", name]],
        )
        supervise(folder, spec, (), watch)
        self._raise_if_it_never_ran(folder, begin, watch)
        return conclude(folder)

    def _raise_if_it_never_ran(self, folder: Path, begin: Begin, watch: Watch) -> None:
        """Raises ProbeError with Slurm's own message, or because it had no nodes in time."""
        if any(folder.glob("guardian.node*.json")) or watch.stop.is_set():
            return
        refused = REFUSED.search(read_logs(folder))
        if refused is not None:
            raise _refused(refused["message"])
        if read_end(folder, begin).reason == "time-limit":
            raise ProbeError(
                f"Slurm had no nodes for it within {self.queue_seconds:g} s; ask it for what "
                "waits (`squeue`)"
            )

    def _srun_of(self, task: ProbeTask, grid: NodeGrid, name: str) -> list[str]:
        minutes = math.ceil((task.time_limit_seconds + SLACK_SECONDS) / MINUTE)
        return self._srun(
            name, nodes=grid.nodes, per_node=grid.per_node, device=task.device, minutes=minutes
        )

    def _srun(
        self, name: str, *, nodes: int, per_node: int, device: str, minutes: int
    ) -> list[str]:
        gpus = ["--gpus-per-node", str(per_node)] if device == "cuda" else []
        partition = ["--partition", self.partition] if self.partition else []
        return [
            "srun",
            "--job-name",
            name,
            "--nodes",
            str(nodes),
            "--ntasks-per-node",
            "1",
            "--time",
            str(minutes),
            *partition,
            *gpus,
            "--kill-on-bad-exit=1",
            "--export=ALL",
            "--input=none",
        ]


def _check_commands() -> None:
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise ProbeError(
            f"Slurm's {missing[0]} is not installed here; use --pool local, or a machine that "
            "submits to the cluster"
        )


def _refused(message: str) -> ProbeError:
    return ProbeError(f"Slurm: {message}; ask it for what it has (`sinfo`)")


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
