"""Started by torchrun: trains every named task of a JSON file on as many ranks as its job has, one
after the other, and writes each one's losses and norms. The ranks of a world are forks of those
that torchrun started, which have imported torch.

    torchrun --nproc-per-node N tests/e2e/probe_combinations.py TASKS.json OUT.json [BACKEND]

BACKEND: of torch.compile, where it is not the default.
A task may have `despite`: fields of the layout that are set after the rules were asked, to show
what they keep from happening. Its optimizer in backward then steps as often as TorchTitan's hook.
"""

import gc
import json
import os
import sys
import traceback
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.probes.protocol import ProbeTask
from planner.probes.reference import meshes, pipeline  # noqa: F401 imported for the forks
from planner.probes.reference.recipe import ReferenceRecipe
from planner.probes.reference.step import Trainer

STEPS = 3


def trained(task: dict[str, Any]) -> dict[str, Any]:
    """Losses over the global batch and gradient norms of a few steps; whether replicas differ."""
    despite = task.pop("despite", {})
    recipe = ReferenceRecipe.of(ProbeTask.model_validate(task))
    recipe = replace(recipe, layout=recipe.layout.model_copy(update=despite))
    trainer = Trainer(recipe, torch.device("cpu"))
    trainer.materialise()
    if despite:
        trainer.updates.arm(True)
        trainer.updates.arm = lambda last: None  # type: ignore[method-assign]
    losses, norms = [], []
    for index in range(STEPS):
        share, norm = trainer.step(index)
        losses.append(float(trainer.global_loss(share)))
        norms += [] if norm is None else [float(norm)]
    return {"losses": losses, "norms": norms, "apart": despite and replicas_differ(trainer)}


def replicas_differ(trainer: Trainer) -> bool:
    """Whether a parameter that DDP replicates has come apart."""
    if not trainer.recipe.uses_ddp:
        return False
    own = torch.cat([p.detach().flatten() for m in trainer.modules for p in m.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    differs = torch.tensor(float(not torch.equal(own, first)))
    dist.all_reduce(differs)
    return bool(differs)


@cache
def mesh_of(device: str, ranks: tuple[Any, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh for all tasks that place ranks so: threads and sockets of groups add up."""
    return DeviceMesh(device, torch.tensor(ranks), mesh_dim_names=names)


def nested(values: Any) -> Any:
    return tuple(map(nested, values)) if isinstance(values, list) else values


def train_all(tasks: dict[str, Any], world: int, out: Path) -> None:
    """Adds results of the tasks for this many ranks to the file."""
    rank, store = int(os.environ["RANK"]), dist.FileStore(f"{out}.{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = json.loads(out.read_text()) if out.exists() else {}
    for name, task in tasks.items():
        if task["job"]["cluster"]["num_gpus"] != world:
            continue
        try:
            found[name] = trained(task)
        except Exception:
            found[name] = {"error": traceback.format_exc()[-3000:]}
            if world > 1 and "SpecError" not in found[name]["error"]:
                break  # the ranks may have come apart
        torch._dynamo.reset()
        gc.collect()
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    if len(sys.argv) > 3:
        torch.compile = partial(torch.compile, backend=sys.argv[3])  # type: ignore[assignment]
    meshes.DeviceMesh = lambda device, ranks, mesh_dim_names: mesh_of(  # type: ignore[misc,assignment]
        device, nested(ranks.tolist()), mesh_dim_names
    )
    tasks, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    gc.disable()  # what imports made is looked through again and again, for a fifth of the time
    gc.freeze()
    for world in sorted({task["job"]["cluster"]["num_gpus"] for task in tasks.values()}):
        if int(os.environ["RANK"]) >= world:
            continue
        if os.fork() == 0:
            train_all(tasks, world, out.with_suffix(".part"))
            os._exit(0)  # to tear torch down takes a second
        ended = os.waitstatus_to_exitcode(os.wait()[1])
        if ended < 0:
            os.kill(os.getpid(), -ended)
        assert ended == 0
    if os.environ["RANK"] == "0":
        out.with_suffix(".part").rename(out)
    os._exit(0)


if __name__ == "__main__":
    main()
