"""A token table tied to the head, when a pipeline holds the two in different stages.

They are then two copies with one gradient.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.probes.reference.clipping import local_gradient
from planner.probes.reference.meshes import Meshes
from planner.probes.reference.model import Transformer
from planner.probes.reference.recipe import ReferenceRecipe


class TiedEnds:
    """Adds the gradients of table and head after each step's backward.

    copy: the head on its rank, which norms must not count twice.
    """

    def __init__(self, models: list[Transformer], recipe: ReferenceRecipe, meshes: Meshes) -> None:
        self._table: torch.Tensor | None = None
        self._head: torch.Tensor | None = None
        self._group: dist.ProcessGroup | None = None
        if recipe.layout.pp == 1 or not recipe.model.tie_word_embeddings:
            return
        for model in models:
            if model.part.first and model.tok_embeddings is not None:
                self._table = model.tok_embeddings.weight
            if model.part.last and model.output is not None:
                self._head = model.output.weight
        last = len(recipe.stage_sizes()) - 1
        holder = next(rank for rank in range(recipe.layout.pp) if last in recipe.stages_of(rank))
        if holder != 0:
            ends = meshes.dense.mesh[[0, holder]]
            mesh = DeviceMesh(
                meshes.dense.device_type,
                ends,
                mesh_dim_names=("ends", "dp_replicate", "fsdp", "tp"),
            )
            if self._table is not None or self._head is not None:
                self._group = mesh["ends"].get_group()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Parameters here that copy another parameter, on this or another rank."""
        return [self._head] if self._head is not None else []

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Sums the gradients, so that both copies have the sum."""
        held = [
            grad
            for p in (self._table, self._head)
            if p is not None and (grad := local_gradient(p)) is not None
        ]
        if self._group is not None:
            for grad in held:
                dist.all_reduce(grad, group=self._group)
        elif len(held) == 2:
            held[0].add_(held[1])
            held[1].copy_(held[0])
