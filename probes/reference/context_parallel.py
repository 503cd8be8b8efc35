"""Context parallelism: which tokens each rank holds, and how attention reaches the rest.

Causal work is balanced by head and tail: of 2 n chunks, rank r holds chunks r and 2 n - 1 - r.
Ulysses gathers whole sequences for some heads instead, so its tokens are contiguous. On GPUs
torch's context parallelism rotates keys and values. On CPUs, for which torch registers no kernel,
`attention_kernels.CpuFlash` runs torch's ring around the CPU's flash operator.
Source: torch/distributed/tensor/experimental/_context_parallel,
torchtitan 0.2.2 distributed/context_parallel.py.
"""

import torch
from torch import nn

from planner.probes.reference.attention_kernels import AttentionCore, Sequence
from planner.probes.reference.meshes import Meshes
from planner.probes.reference.recipe import ReferenceRecipe


def positions_of(rank: int, degree: int, seq_len: int, method: str) -> torch.Tensor:
    """Positions of one sequence that a context-parallel rank holds, in its order."""
    everything = torch.arange(seq_len)
    if degree == 1 or method == "ulysses":
        return everything.chunk(degree)[rank]
    chunks = everything.chunk(2 * degree)
    return torch.cat([chunks[rank], chunks[2 * degree - 1 - rank]])


def local_sequence(recipe: ReferenceRecipe, meshes: Meshes, device: torch.device) -> Sequence:
    """Positions of this rank's tokens, and of the keys its attention sees."""
    layout, seq_len = recipe.layout, recipe.training.seq_len
    parts = [positions_of(rank, layout.cp, seq_len, layout.cp_method) for rank in range(layout.cp)]
    local, keys = parts[meshes.place["cp"]].to(device), torch.cat(parts).to(device)
    return Sequence(local, keys if layout.cp_method == "ulysses" else local, keys)


def apply(model: nn.Module, recipe: ReferenceRecipe, meshes: Meshes) -> None:
    """Connects every layer's attention to the context axis."""
    if recipe.layout.cp == 1:
        return
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    for core in cores:
        core.group, core.method = meshes.group("cp"), recipe.layout.cp_method
    if recipe.layout.cp_method == "ulysses":
        return
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(recipe.layout.cp_method)  # keys and values all at once, or hop by hop
    rings = [core for core in cores if core.window == 0 and not core.has_sinks]
    if rings and meshes.ranks.device_type != "cpu":
        _hook_torch(rings, meshes)


def _hook_torch(cores: list[AttentionCore], meshes: Meshes) -> None:
    from torch.distributed.tensor.experimental._attention import (
        _ContextParallel,
        _enable_context_parallel_dispatcher,
    )
    from torch.distributed.tensor.parallel import parallelize_module

    _enable_context_parallel_dispatcher()
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
    for core in cores:
        parallelize_module(core, meshes.ranks["cp"], style)
