"""Started by torchrun: trains every named task of a JSON file on this world, one after the other,
and writes each one's losses and norms.

    torchrun --nproc-per-node N tests/e2e/probe_combinations.py TASKS.json OUT.json
"""

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from probes.protocol import ProbeTask
from probes.reference.recipe import ReferenceRecipe
from probes.reference.step import Trainer

STEPS = 3


def trained(task: dict[str, Any]) -> dict[str, Any]:
    """Losses over the global batch and gradient norms of a few steps."""
    trainer = Trainer(ReferenceRecipe.of(ProbeTask.model_validate(task)), torch.device("cpu"))
    trainer.materialise()
    losses, norms = [], []
    for index in range(STEPS):
        share, norm = trainer.step(index)
        losses.append(float(trainer.global_loss(share)))
        norms += [] if norm is None else [float(norm)]
    return {"losses": losses, "norms": norms}


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    tasks, out = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, task in tasks.items():
        try:
            out[name] = trained(task)
        except Exception:
            out[name] = {"error": traceback.format_exc()[-3000:]}
            if dist.get_world_size() > 1 and "SpecError" not in out[name]["error"]:
                break  # the ranks may have come apart
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
