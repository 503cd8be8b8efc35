"""Gradients between the backward and the update: sums over tied ends, the norm, clipping."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.probes.reference.expert_parallel import WIDTH_DIM
from planner.probes.reference.meshes import Meshes
from planner.probes.reference.model import Transformer
from planner.probes.reference.moe import expert_parameters
from planner.probes.reference.recipe import ReferenceRecipe

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of gradients on this rank, of the parameters that have one."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


class TiedEnds:
    """A token table and its tied head in different stages: two copies with one gradient."""

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
            names = ("ends", "dp_replicate", "fsdp", "tp")
            mesh = DeviceMesh(meshes.dense.device_type, ends, mesh_dim_names=names)
            if self._table is not None or self._head is not None:
                self._group = mesh["ends"].get_group()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Parameters here that copy another one, so that a norm must not count them."""
        return [self._head] if self._head is not None else []

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Sums the gradients, so that both copies have the sum."""
        held = local_gradients(p for p in (self._table, self._head) if p is not None)
        if self._group is not None:
            for grad in held:
                dist.all_reduce(grad, group=self._group)
        elif len(held) == 2:
            held[0].add_(held[1])
            held[1].copy_(held[0])


class Clipping:
    """The groups over which each parameter's gradient is cut. skipped: copies that others count."""

    def __init__(self, parts: list[nn.Module], meshes: Meshes, skipped: list[torch.Tensor]) -> None:
        self._pp = meshes.group("pp") if meshes.dense["pp"].size() > 1 else None
        self._cut: dict[tuple[str, ...], list[nn.Parameter]] = defaultdict(list)
        self._groups: dict[str, dist.ProcessGroup] = {}
        without = {id(p) for p in skipped}
        for part in parts:
            expert_cuts = {id(p): name for _, name, p in expert_parameters(part)}
            for parameter in part.parameters():
                if id(parameter) not in without:
                    groups = [
                        *_shard_groups(parameter),
                        *_expert_groups(expert_cuts.get(id(parameter)), meshes),
                    ]
                    self._groups |= {group.group_name: group for group in groups}
                    self._cut[tuple(group.group_name for group in groups)].append(parameter)
        self._all = [p for part in parts for p in part.parameters()]

    @torch.no_grad()
    def norm(self, device: torch.device) -> torch.Tensor:
        """2-norm of all gradients of the model, a scalar on every rank."""
        total = torch.zeros((), device=device)
        for names in sorted(self._cut):
            grads = local_gradients(self._cut[names])
            square = torch.zeros((), device=device)
            if grads:
                norms = torch.stack(torch._foreach_norm(grads, dtype=torch.float32))
                square += norms.square().sum()
            for name in names:
                dist.all_reduce(square, group=self._groups[name])
            total += square
        if self._pp is not None:
            dist.all_reduce(total, group=self._pp)
        return total.sqrt()

    @torch.no_grad()
    def scale(self, factor: torch.Tensor | float) -> None:
        if grads := local_gradients(self._all):
            if isinstance(factor, torch.Tensor):
                factor = factor.to(grads[0].device)
            torch._foreach_mul_(grads, factor)

    def clip(self, max_norm: float, device: torch.device) -> torch.Tensor:
        """Scales gradients down if their norm exceeds `max_norm`; returns the norm before."""
        norm = self.norm(device)
        self.scale((max_norm / (norm + EPSILON)).clamp(max=1.0))
        return norm


def _shard_groups(parameter: nn.Parameter) -> list[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]


def _expert_groups(name: str | None, meshes: Meshes) -> list[dist.ProcessGroup]:
    if name is None or meshes.expert is None:
        return []
    axes = ("ep", "etp") if name in WIDTH_DIM else ("ep",)
    return [meshes.group(axis) for axis in axes if meshes.expert[axis].size() > 1]
