"""How many GPUs a launcher starts, and of which kind where it says: torchrun, run_train.sh, srun,
#SBATCH lines.
"""

import re
from collections.abc import Mapping

from planner.catalog.clusters import gpu_aliases
from planner.intake.trainer_files.flags import Command
from planner.intake.trainer_files.shell import Script
from planner.intake.trainer_files.statement import Machine

_KIND = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)$")


def machine_of(script: Script, command: Command) -> Machine:
    """The machine of a command's launcher; what it leaves to variables that nobody sets stays
    open.
    """
    words = command.words()
    kind, per_node = _slurm_gpus(script)
    started = _first(words, "nproc_per_node", "gpus_per_node", "ntasks_per_node")
    if started is None and script.value("NGPU"):
        started = [script.value("NGPU") or ""]
    per_node = _count(started) if started is not None else per_node
    asked = _first(words, "nnodes", "nodes")
    nodes = (
        _count(asked)
        if asked is not None
        else _count([script.batch["nodes"]])
        if "nodes" in script.batch
        else None
    )
    if asked is None and nodes is None and started is not None:
        nodes = _count([script.value("NNODES") or "1"])
    world = script.value("WORLD_SIZE")
    if per_node is None or nodes is None:
        total = int(world) if world is not None and world.isdigit() else None
        return Machine(num_gpus=total, gpus_per_node=None if total is None else per_node, gpu=kind)
    return Machine(num_gpus=nodes * per_node, gpus_per_node=per_node, gpu=kind)


def _first(words: Mapping[str, list[str]], *names: str) -> list[str] | None:
    """Of the first flag that is there: [] for one whose variable nobody sets, which is not the same
    as none.
    """
    return next((words[name] for name in names if name in words), None)


def _count(words: list[str] | None) -> int | None:
    """8 of ["8"], and of torchrun's ["8:8"]; None for anything else."""
    parts = set((words or [""])[0].split(":"))
    text = parts.pop() if len(parts) == 1 else ""
    return int(text) if text.isdigit() and int(text) > 0 else None


def _slurm_gpus(script: Script) -> tuple[str | None, int | None]:
    """(catalogue name of the GPU, GPUs a node) from --gpus-per-node or --gres."""
    for option in ("gpus-per-node", "gres"):
        found = _KIND.search(script.batch.get(option, ""))
        if found is not None:
            return gpu_aliases().get((found[1] or "").lower()), int(found[2])
    tasks = script.batch.get("ntasks-per-node", "")
    return None, int(tasks) if tasks.isdigit() and int(tasks) > 1 else None
