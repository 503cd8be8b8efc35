"""Seeded weights and data. The same seed gives the same model and batches in every layout.

Small models: each parameter is drawn whole from a seed of its own name and then cut to the rank's
part. Larger models draw each part on its own rank, so that no rank ever holds a whole tensor; their
losses differ between layouts.
"""

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.probes.reference.model import Transformer
from planner.probes.reference.moe import expert_parameters
from planner.probes.reference.recipe import ReferenceRecipe

STD = 0.02  # of weights, as in GPT-2
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def materialise(model: Transformer, recipe: ReferenceRecipe, device: torch.device) -> None:
    """Gives a meta model storage and values; offloaded parameters are in host memory."""
    model.to_empty(device=torch.device("cpu") if recipe.layout.cpu_offload else device)
    model.tie()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device))
    cuts = {id(p): module.cuts[name] for module, name, p in expert_parameters(model)}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.zero_() if "correction" in name else buffer.fill_(1.0)
        for name, parameter in model.named_parameters():
            _fill(parameter, plain_name(name), recipe, cuts.get(id(parameter), ()))


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around its modules."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _fill(
    parameter: nn.Parameter,
    name: str,
    recipe: ReferenceRecipe,
    cuts: tuple[tuple[int, int, int], ...],
) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
    kind = name.rpartition(".")[2]
    if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        local.fill_(1.0 if kind == "weight" else 0.0)
        return
    if not recipe.whole_init:
        local.normal_(0.0, STD)
        return
    shape = list(parameter.shape)
    for dim, parts, _ in cuts:
        shape[dim] *= parts
    if recipe.model.tie_word_embeddings and name == "output.weight":
        name = "tok_embeddings.weight"  # a copy on another pipeline stage
    generator = torch.Generator().manual_seed(_seed(recipe.task.seed, name))
    whole = torch.randn(shape, generator=generator, dtype=torch.float32) * STD
    for dim, parts, own in cuts:
        whole = whole.chunk(parts, dim)[own]
    local.copy_(local_part(whole, parameter))


def local_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part that a DTensor holds here. Inner mesh axes are cut first, as TP is before FSDP."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    own = mesh.get_coordinate()
    assert own is not None
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            parts = whole.chunk(mesh.size(axis), dim)
            whole = parts[own[axis]] if own[axis] < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def batch(
    recipe: ReferenceRecipe, step: int, replica: int, positions: torch.Tensor,
    device: torch.device, microbatches: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tokens and targets (local sequences, local tokens) of one step on one data-parallel rank.

    Sequence i of the global batch is drawn from a seed of (step, i), on whichever rank holds it.
    """
    layout, seq_len = recipe.layout, recipe.training.seq_len
    local = microbatches * layout.micro_batch_size
    rows = []
    for index in range(replica * local, (replica + 1) * local):
        generator = torch.Generator().manual_seed(_seed(recipe.task.seed, f"batch {step} {index}"))
        rows.append(torch.randint(0, recipe.model.vocab_size, (seq_len + 1,), generator=generator))
    everything = torch.stack(rows)
    at = positions.cpu()
    return everything[:, at].to(device), everything[:, at + 1].to(device)


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())
