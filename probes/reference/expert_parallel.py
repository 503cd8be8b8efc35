"""Divides experts over expert-parallel ranks, and their width over TP ranks.

It also sets where each layer's tokens go.
"""

import torch
from torch import nn

from planner.probes.reference.meshes import Meshes
from planner.probes.reference.model import Transformer
from planner.probes.reference.moe import ExpertAxes, GroupedExperts, MixtureOfExperts
from planner.probes.reference.recipe import ReferenceRecipe

# The dimension of each parameter that is cut when an expert's width is cut. Biases of the second
# product are whole on every rank.
WIDTH_DIM = {"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1}


def apply(model: Transformer, recipe: ReferenceRecipe, meshes: Meshes) -> None:
    """Cuts every layer's experts to this rank's share."""
    layout = recipe.layout
    tp = meshes.group("tp") if layout.tp > 1 else None
    axes = ExpertAxes(
        tp=tp,
        sequence_parallel=layout.sequence_parallel and tp is not None,
        ep=meshes.group("ep") if layout.ep > 1 else None,
        etp=tp if recipe.etp > 1 else None,
        received_share=recipe.received_share() if recipe.emulated else None,
        assigned_imbalance=recipe.assigned_imbalance(),
    )
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.axes = axes
            _cut(module.experts, recipe, meshes)
            module.experts.etp = axes.etp


def _cut(experts: GroupedExperts, recipe: ReferenceRecipe, meshes: Meshes) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        cuts = []
        if recipe.layout.ep > 1:
            ep = meshes.group("ep")
            cuts.append((0, ep.size(), ep.rank()))
        if recipe.etp > 1 and name in WIDTH_DIM:
            etp = meshes.group("etp")
            cuts.append((WIDTH_DIM[name], etp.size(), etp.rank()))
        experts.cuts[name] = tuple(cuts)
        shape = list(parameter.shape)
        for dim, parts, _ in cuts:
            shape[dim] //= parts
        experts.register_parameter(
            name, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
        )
