"""One rank of a larger world in one process, over torch's fake process group.

Its collectives move nothing and return at once. On a GPU compute and memory are real, but the rank
never waits for others. With fake tensors nothing is computed: memory and counts come from shapes.
Under fake tensors, parallelism is applied to meta tensors outside the mode, and storage is given
inside it.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.probes.reference import optimizers
from planner.probes.reference.memory import Tracker
from planner.probes.reference.recipe import ReferenceRecipe
from planner.probes.reference.step import Trainer


def enter_world(recipe: ReferenceRecipe) -> None:
    """Initialises the fake process group as the layout's rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert recipe.task.emulate_rank is not None
    dist.init_process_group(
        "fake", rank=recipe.task.emulate_rank, world_size=recipe.layout.num_gpus, store=FakeStore()
    )


def shapes_alone(recipe: ReferenceRecipe) -> Tracker:
    """Memory and counts of one steady step from shapes, without computing.

    Optimizer states are created first.
    """
    trainer = Trainer(recipe, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        trainer.materialise()
        optimizers.prime(trainer.updates.optimizers)
        tracker.reset()
        trainer.step(0)
    return tracker
