"""Statements of one text about a run, before anything else completes it: run, machine and model.

A launcher says how many GPUs it starts, and of which kind: torchrun, run_train.sh, srun, #SBATCH.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from planner.catalog.clusters import gpu_aliases
from planner.errors import Fault
from planner.intake.trainer_files.flags import Command
from planner.intake.trainer_files.shell import Script

LABELS = {
    "torchtitan-toml": "TorchTitan TOML", "torchtitan-command": "TorchTitan command",
    "torchtitan-python": "TorchTitan configuration in Python",
    "megatron-arguments": "Megatron arguments", "megatron-log": "Megatron log",
    "megatron-bridge": "overrides of Megatron-Bridge", "primus": "Primus configuration",
    "torchtitan-log": "TorchTitan log", "configuration": "configuration", "layout": "layout",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run in the planner's terms.

    training, layout: keys as in a job, as far as the text and its trainer's defaults set them.
    notes: what was read but is not priced.
    refusals: what makes the trainer stop, besides the rules on layouts.
    """

    training: Mapping[str, object]
    layout: Mapping[str, object]
    notes: tuple[str, ...] = ()
    refusals: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as a launcher states it; None where it does not."""

    gpu: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None

    def keys(self) -> dict[str, object]:
        """Keys of a job's `cluster`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedModel:
    """The model that a text names.

    value: as in a job's `model`; None where it cannot be found.
    lacking: why it cannot be found.
    """

    value: object | None
    lacking: str = ""


_KIND = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)$")


def machine_of(command: Command) -> Machine:
    """The machine that a command's launcher asks for.

    What it takes from variables that nobody sets is None.
    """
    words, script = command.words(), command.script
    kind, per_node = _slurm_gpus(script)
    started = _first(words, "nproc_per_node", "gpus_per_node", "num_gpus", "ntasks_per_node")
    if started is None and script.value("NGPU"):
        started = [script.value("NGPU") or ""]
    per_node = _count(started) if started is not None else per_node
    asked = _first(words, "nnodes", "nodes", "num_nodes")
    nodes = _count([script.batch.get("nodes", "")] if asked is None else asked)
    if asked is None and nodes is None and started is not None:
        nodes = _count([script.value("NNODES") or "1"])
    world = script.value("WORLD_SIZE")
    if per_node is None or nodes is None:
        total = int(world) if world is not None and world.isdigit() else None
        return Machine(num_gpus=total, gpus_per_node=None if total is None else per_node, gpu=kind)
    return Machine(num_gpus=nodes * per_node, gpus_per_node=per_node, gpu=kind)


def _first(words: Mapping[str, list[str]], *names: str) -> list[str] | None:
    """The values of the first of these flags that is given; None where none is.

    An empty list means that the flag's variable is not set anywhere.
    """
    return next((words[name] for name in names if name in words), None)


def _count(words: list[str] | None) -> int | None:
    """8 for ["8"] and for torchrun's ["8:8"]; None for anything else."""
    parts = set((words or [""])[0].split(":"))
    text = parts.pop() if len(parts) == 1 else ""
    return int(text) if text.isdigit() and int(text) > 0 else None


def _slurm_gpus(script: Script) -> tuple[str | None, int | None]:
    """(catalogue name of the GPU, GPUs per node) from --gpus-per-node or --gres."""
    for option in ("gpus-per-node", "gres"):
        found = _KIND.search(script.batch.get(option, ""))
        if found is not None:
            return gpu_aliases().get((found[1] or "").lower()), int(found[2])
    tasks = script.batch.get("ntasks-per-node", "")
    return None, int(tasks) if tasks.isdigit() and int(tasks) > 1 else None
