"""Started by torchrun: trains every named task of a JSON file on this world, one after the other,
and writes each one's losses and norms.

    torchrun --nproc-per-node N tests/e2e/probe_combinations.py TASKS.json OUT.json [BACKEND]

BACKEND: of torch.compile, where it is not the default.
A task may have `despite`: fields of the layout that are set after the rules were asked, to show
what they keep from happening. Its optimizer in backward then steps as often as TorchTitan's hook.
"""

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
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.probes.protocol import ProbeTask
from planner.probes.reference import meshes
from planner.probes.reference.optimizers import InBackward
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
    if despite and isinstance(trainer.updates, InBackward):
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


def main() -> None:
    warnings.filterwarnings("ignore")
    if len(sys.argv) > 3:
        torch.compile = partial(torch.compile, backend=sys.argv[3])  # type: ignore[assignment]
    dist.init_process_group("gloo")
    meshes.DeviceMesh = lambda device, ranks, mesh_dim_names: mesh_of(  # type: ignore[misc,assignment]
        device, nested(ranks.tolist()), mesh_dim_names
    )
    tasks, out = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, task in tasks.items():
        try:
            out[name] = trained(task)
        except Exception:
            out[name] = {"error": traceback.format_exc()[-3000:]}
            if dist.get_world_size() > 1 and "SpecError" not in out[name]["error"]:
                break  # the ranks may have come apart
        torch._dynamo.reset()
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(out))
    dist.destroy_process_group()
    os._exit(0)  # to tear torch down takes a second


if __name__ == "__main__":
    main()
