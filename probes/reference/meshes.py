"""Process groups of a layout: one mesh of all ranks for dense parameters, one for experts.

Axes, outer to inner:
- pp, dp_replicate, dp_shard, cp, tp for groups of ranks;
- pp, dp_replicate, fsdp, tp for parameters, fsdp = dp_shard x cp;
- pp, dp_replicate, efsdp, ep, etp for experts, the same ranks regrouped from inside out.

Source: torchtitan 0.2.2 distributed/parallel_dims.py.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.probes.reference.recipe import ReferenceRecipe
from planner.specs.cluster import RANK_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Meshes of one rank.

    ranks: of (pp, dp_replicate, dp_shard, cp, tp).
    dense, expert: of parameters.
    place: the rank's coordinate in `ranks`.
    """

    ranks: DeviceMesh
    dense: DeviceMesh
    expert: DeviceMesh | None
    place: dict[str, int]

    @property
    def tp(self) -> DeviceMesh:
        return self.dense["tp"]

    @property
    def data(self) -> DeviceMesh:
        """Mesh over which dense parameters are sharded: (fsdp,), or (dp_replicate, fsdp)."""
        return _with_replicas(self.dense, "fsdp")

    @property
    def expert_data(self) -> DeviceMesh:
        """Mesh over which experts are sharded in addition to expert parallelism."""
        assert self.expert is not None
        return _with_replicas(self.expert, "efsdp")

    @property
    def replica(self) -> int:
        """The number of this data-parallel rank, whose sequences all ranks of the number see."""
        shards = int(self.ranks["dp_shard"].size())
        return self.place["dp_replicate"] * shards + self.place["dp_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of one axis of any mesh."""
        for mesh in (self.dense, self.ranks, self.expert):
            if mesh is not None and axis in (mesh.mesh_dim_names or ()):
                return mesh[axis].get_group()
        raise KeyError(axis)


def build(recipe: ReferenceRecipe, device_type: str) -> Meshes:
    """Meshes for the initialised world, with ranks placed in the cluster's order."""
    layout = recipe.layout
    ranks = _place_ranks(recipe)
    dense = ranks.reshape(layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    expert = None
    if recipe.model.is_moe and layout.ep * recipe.etp > 1:
        experts = ranks.reshape(layout.pp, layout.dp_replicate, -1, layout.ep, recipe.etp)
        axes = ("pp", "dp_replicate", "efsdp", "ep", "etp")
        expert = DeviceMesh(device_type, experts, mesh_dim_names=axes)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    own = (ranks == dist.get_rank()).nonzero()[0].tolist()
    return Meshes(
        ranks=DeviceMesh(device_type, ranks, mesh_dim_names=names),
        dense=DeviceMesh(device_type, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
        expert=expert,
        place=dict(zip(names, own, strict=True)),
    )


def _place_ranks(recipe: ReferenceRecipe) -> torch.Tensor:
    """Global ranks (pp, dp_replicate, dp_shard, cp, tp); `rank_order`'s first axis is innermost."""
    outer_to_inner = tuple(reversed(recipe.cluster.rank_order))
    sizes = [getattr(recipe.layout, axis) for axis in outer_to_inner]
    order = [outer_to_inner.index(axis) for axis in reversed(RANK_ORDER)]
    return torch.arange(recipe.layout.num_gpus).reshape(sizes).permute(order).contiguous()


def _with_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]
