"""The norm of all gradients, wherever they are cut, and clipping by it."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.probes.reference.expert_parallel import WIDTH_DIM
from planner.probes.reference.meshes import Meshes
from planner.probes.reference.moe import GroupedExperts

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The part of a parameter's gradient on this rank."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


class Clipping:
    """The groups over which each parameter's gradient is cut.

    skipped: copies that another rank counts.
    """

    def __init__(self, parts: list[nn.Module], meshes: Meshes, skipped: list[torch.Tensor]) -> None:
        self._pp = meshes.group("pp") if meshes.dense["pp"].size() > 1 else None
        self._cut: dict[tuple[str, ...], list[nn.Parameter]] = defaultdict(list)
        self._groups: dict[str, dist.ProcessGroup] = {}
        without = {id(p) for p in skipped}
        for part in parts:
            expert_cuts = {
                id(p): name
                for m in part.modules()
                if isinstance(m, GroupedExperts)
                for name, p in m.named_parameters(recurse=False)
            }
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
            grads = [grad for p in self._cut[names] if (grad := local_gradient(p)) is not None]
            square = torch.zeros((), device=device)
            if grads:
                square += (
                    torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).square().sum()
                )
            for name in names:
                dist.all_reduce(square, group=self._groups[name])
            total += square
        if self._pp is not None:
            dist.all_reduce(total, group=self._pp)
        return total.sqrt()

    @torch.no_grad()
    def scale(self, factor: torch.Tensor | float) -> None:
        grads = [grad for p in self._all if (grad := local_gradient(p)) is not None]
        if grads:
            torch._foreach_mul_(
                grads, factor.to(grads[0].device) if isinstance(factor, torch.Tensor) else factor
            )

    def clip(self, max_norm: float, device: torch.device) -> torch.Tensor:
        """Scales gradients down if their norm exceeds `max_norm`; returns the norm before."""
        norm = self.norm(device)
        self.scale((max_norm / (norm + EPSILON)).clamp(max=1.0))
        return norm


def _shard_groups(parameter: nn.Parameter) -> list[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    cut = [
        axis
        for axis in range(mesh.ndim)
        if not parameter.placements[axis].is_replicate() and mesh.size(axis) > 1
    ]
    return [mesh.get_group(axis) for axis in cut]


def _expert_groups(name: str | None, meshes: Meshes) -> list[dist.ProcessGroup]:
    if name is None or meshes.expert is None:
        return []
    axes = ("ep", "etp") if name in WIDTH_DIM else ("ep",)
    return [meshes.group(axis) for axis in axes if meshes.expert[axis].size() > 1]
