"""Probes through Slurm: one `srun` a probe, a guardian on either side of it.

On this side the guardian ends `srun` and cancels the job by its name when the time is up or the
runner is gone. On each node a guardian starts torchrun, keeps the exact time limit (Slurm's are
whole minutes), and leaves nobody behind when Slurm ends the step. The folder of probes has to be
one that all nodes share. Exit codes pass through too many hands to mean anything: the files say
what happened.
"""

import math
import re
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from planner.errors import ProbeError
from planner.specs.cluster import ClusterSpec
from probes.folder import END, LOG
from probes.launch import (
    ROOT,
    GuardianSpec,
    Held,
    LaunchSettings,
    Watch,
    environment,
    prepare,
    supervise,
    with_free_port,
)
from probes.outcome import Begin, conclude, read_end, read_logs, write_result
from probes.pools.local import Capacity
from probes.pools.nvidia import Gpu, is_same_gpu
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

UNLIMITED = 2**20
MINUTE = 60.0
QUEUE_SECONDS = 3600.0
SLACK_SECONDS = 120.0  # for Slurm to start the step, and for the nodes' guardians to end it
CHECK_MINUTES = 10  # of the job that asks a node whether it has torch
COMMANDS = ("srun", "scancel")
REFUSED = re.compile(r"^srun: (?:error|fatal): (?P<words>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How processes lie on nodes."""

    nodes: int
    per_node: int

    @classmethod
    def of(cls, task: ProbeTask) -> "Shape":
        """As the job's cluster has its GPUs; raises ProbeError where processes do not fill whole
        nodes.
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
    """A ProbeRunner on a Slurm cluster. queue_seconds: how long a job may wait for its nodes."""

    name = "slurm"

    def __init__(
        self,
        settings: LaunchSettings,
        *,
        partition: str | None = None,
        queue_seconds: float = QUEUE_SECONDS,
    ) -> None:
        self.settings, self.partition, self.queue_seconds = settings, partition, queue_seconds

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """What the cluster has is for Slurm to say, when it is asked."""
        return Capacity(
            num_devices=UNLIMITED, device="cpu" if cluster.gpu.name == "cpu" else "cuda"
        )

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Raises ProbeError where no probe can run: Slurm's commands are missing, or its nodes have
        no torch. wait: ask a node.
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
            # nothing is left where all went well
            subprocess.run(["scancel", "--name", name], capture_output=True, check=False)
        refused = REFUSED.search(done.stderr)
        if refused is not None and not done.stdout:
            raise _refused(refused["words"])
        problem = problem_in(done, self.settings.python)
        if problem is not None:
            raise ProbeError(f"on a node of the cluster {problem}")

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """One probe, to its end. Raises ProbeError with Slurm's own words where it refuses the
        job.
        """
        watch = watch or Watch()
        _check_commands()
        shape = Shape.of(task)
        onlooker = watch
        return _checked(
            with_free_port(
                self.settings.port_tries,
                lambda attempt: self._once(task, shape, attempt, onlooker),
                onlooker,
            )
        )

    def _once(self, task: ProbeTask, shape: Shape, attempt: int, watch: Watch) -> ProbeResult:
        begin = Begin.now(num_gpus=task.num_processes(), token=uuid.uuid4().hex)
        folder, program = prepare(self.settings, task, begin, watch)
        if isinstance(program, Failed):
            return write_result(folder, task, begin, program)
        name = f"planner-{begin.token[:12]}"
        env = environment(task, Held(), program.env)
        for key in (
            "GLOO_SOCKET_IFNAME",
            *(("CUDA_VISIBLE_DEVICES",) if task.device == "cuda" else ()),
        ):
            env.pop(key)  # which interface and which GPUs is for the node to say
        inside = [
            self.settings.python,
            "-m",
            "probes.pools.slurm_node",
            self.settings.worker,
            str(attempt),
        ]
        spec = GuardianSpec(
            argv=[*self._srun_of(task, shape, name), *inside],
            env=env,
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
        """Slurm's own error, or that it had no nodes for so long."""
        if any(folder.glob("guardian.node*.json")) or watch.stop.is_set():
            return
        refused = REFUSED.search(read_logs(folder))
        if refused is not None:
            raise _refused(refused["words"])
        if read_end(folder, begin).reason == "time-limit":
            raise ProbeError(
                f"Slurm had no nodes for it within {self.queue_seconds:g} s; ask it for what "
                "waits (`squeue`)"
            )

    def _srun_of(self, task: ProbeTask, shape: Shape, name: str) -> list[str]:
        minutes = math.ceil((task.time_limit_seconds + SLACK_SECONDS) / MINUTE)
        return self._srun(
            name, nodes=shape.nodes, per_node=shape.per_node, device=task.device, minutes=minutes
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


def _refused(words: str) -> ProbeError:
    return ProbeError(f"Slurm: {words}; ask it for what it has (`sinfo`)")


def _checked(result: ProbeResult) -> ProbeResult:
    """Slurm may have given other GPUs than the job names; numbers under a wrong name would poison
    every fit.
    """
    said, gpu = result.environment.gpu_name, result.task.parsed().cluster.gpu
    if said is None or gpu.name == "cpu":
        return result
    given = Gpu(
        index=0, uuid="", name=said, memory_bytes=None, used_bytes=None, driver="", sliced=False
    )
    if not is_same_gpu(gpu, given):
        raise ProbeError(
            f"Slurm gave {said} and the job says {gpu.name}; name that GPU in the job, or another "
            "partition"
        )
    return result
