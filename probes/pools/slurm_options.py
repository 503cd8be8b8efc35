"""An operator's options for jobs on a Slurm cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of every job that we submit; None leaves one to Slurm.

    account, qos, constraint, exclude: as sbatch takes them.
    container_image: for srun's `--container-image` (Pyxis).
    gpus_by: how GPUs are asked for, `gpus-per-node` or `gres`.
    exclusive: a probe on all GPUs of its nodes has them to itself, with all cores and memory.
    cpus_per_gpu, memory_gib_per_gpu: what a probe gets of nodes that it shares. Slurm's own default
        is often one core a node, on which no trainer runs as it would.
    queue_seconds: how long a job may wait for its nodes.
    gpus_at_once: that our jobs may take together; None is as many as Slurm gives.
    restarts: how often a probe runs again whose job was preempted, requeued or lost a node.
    """

    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    container_image: str | None = None
    gpus_by: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    exclusive: bool = True
    cpus_per_gpu: int | None = None
    memory_gib_per_gpu: int | None = None
    queue_seconds: float = 3600.0
    gpus_at_once: int | None = None
    restarts: int = 3

    def job(self, partition: str | None, avoid: Iterable[str] = ()) -> list[str]:
        """Arguments for where a job may run and who pays. avoid: hosts besides the operator's."""
        values = {
            "--partition": partition,
            "--account": self.account,
            "--qos": self.qos,
            "--constraint": self.constraint,
            "--exclude": ",".join(filter(None, [self.exclude, *sorted(avoid)])),
        }
        return [part for name, value in values.items() if value for part in (name, value)]

    def nodes(self, num_nodes: int, processes: int, device: str) -> list[str]:
        """Arguments that ask for nodes and, on each, for a GPU a process."""
        # all three, or a step would take one of them from its job
        asked = ["--nodes", str(num_nodes), "--ntasks", str(num_nodes), "--ntasks-per-node", "1"]
        if device != "cuda":
            return asked
        if self.cpus_per_gpu is not None:
            asked += ["--cpus-per-task", str(self.cpus_per_gpu * processes)]
        if self.gpus_by == "gres":
            return [*asked, "--gres", f"gpu:{processes}"]
        return [*asked, "--gpus-per-node", str(processes)]

    def share(self, processes: int, device: str, *, whole: bool) -> list[str]:
        """Arguments for what else a job gets of its nodes. whole: it takes all of their GPUs."""
        if device != "cuda":
            return []
        if whole and self.exclusive:
            return ["--exclusive", "--mem", "0"]  # exclusive means cores, not memory
        if self.memory_gib_per_gpu is None:
            return []
        return ["--mem", f"{self.memory_gib_per_gpu * processes}G"]

    def container(self, mounts: Sequence[Path]) -> list[str]:
        """Arguments of srun for the container that a probe runs in, with these folders in it."""
        if self.container_image is None:
            return []
        pairs = ",".join(f"{path}:{path}" for path in mounts)
        return ["--container-image", self.container_image, "--container-mounts", pairs]
