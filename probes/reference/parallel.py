"""Applies a layout to one part of the model, in torch's order.

The order is TP, experts, CP, float8, recomputation, compile, then data parallelism.
Gradients are summed over data-parallel ranks, never averaged: each rank's loss is its share of the
mean over the global batch. FSDP2's division is switched off for that; DistributedDataParallel
divides, so its loss is multiplied (`loss_factor`).
Source: torchtitan 0.2.2 models/llama3/infra/parallelize.py, models/llama4/infra/parallelize.py.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from planner.probes.reference import (
    checkpointing,
    context_parallel,
    expert_parallel,
    precision,
    regions,
    tensor_parallel,
)
from planner.probes.reference.collectives import RepeatedShard
from planner.probes.reference.meshes import Meshes
from planner.probes.reference.model import Block, Transformer
from planner.probes.reference.moe import MixtureOfExperts
from planner.probes.reference.recipe import ReferenceRecipe

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BUCKET_MEGABYTES = 100  # torchtitan apply_ddp


def compute_dtype(recipe: ReferenceRecipe) -> torch.dtype:
    return torch.float16 if recipe.layout.precision == "fp16" else DTYPES[recipe.layout.param_dtype]


def parallelise(model: Transformer, recipe: ReferenceRecipe, meshes: Meshes) -> nn.Module:
    """Returns the part, ready for storage; under DDP, `replicate` wraps it after that."""
    layout, on_cpu = recipe.layout, meshes.dense.device_type == "cpu"
    precision.apply(model, layout, emulate=on_cpu)
    if layout.tp > 1:
        tensor_parallel.apply(model, recipe, meshes.tp)
    if recipe.model.is_moe:
        expert_parallel.apply(model, recipe, meshes)
    context_parallel.apply(model, recipe, meshes)
    checkpointing.apply(model, layout.ac, recipe.model.num_experts)
    if recipe.compiles:
        _compile(model, recipe, meshes)
    if not recipe.autocasts:
        _shard(model, recipe, meshes)
    return model


def replicate(model: nn.Module, recipe: ReferenceRecipe, meshes: Meshes) -> DistributedDataParallel:
    """DistributedDataParallel over the replicas."""
    wrapped = DistributedDataParallel(
        model, process_group=meshes.group("dp_replicate"), bucket_cap_mb=BUCKET_MEGABYTES
    )
    if recipe.layout.reduce_dtype == "bfloat16" and recipe.layout.master_dtype == "float32":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped.register_comm_hook(meshes.group("dp_replicate"), bf16_compress_hook)
    return wrapped


def _compile(model: Transformer, recipe: ReferenceRecipe, meshes: Meshes) -> None:
    """Compiles every block by itself, inside its sharding.

    Of blocks with experts it compiles the parts around the exchange, whose sizes change every time.
    """
    if recipe.layout.async_tp and not recipe.emulated:  # symmetric memory needs the other ranks
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(meshes.tp.get_group().group_name)
    traced = recipe.layout.cp == 1 or meshes.dense.device_type != "cpu"  # the ring on CPUs is not
    for name, layer in list(model.layers.items()):
        block = next(module for module in layer.modules() if isinstance(module, Block))
        if block.moe is None:
            model.layers[name] = torch.compile(layer, fullgraph=traced)  # type: ignore[assignment]
        else:
            _compile_around(block, block.moe, traced)


def _compile_around(block: Block, moe: MixtureOfExperts, traced: bool) -> None:
    left_out = (moe, moe.experts, moe.router, moe.shared_gate)
    for holder in (block, moe):
        for name, child in list(holder.named_children()):
            if child not in left_out:
                setattr(holder, name, torch.compile(child, fullgraph=traced))
    moe.experts.grouped = torch.compile(moe.experts.with_offsets, fullgraph=True, dynamic=True)


def _shard(model: Transformer, recipe: ReferenceRecipe, meshes: Meshes) -> None:
    """Applies FSDP2 to each layer, to experts over their sharing ranks, to the ends and the root.

    ZeRO 3 gathers parameters again for backward, except the head, which backward needs at
    once. With a pipeline it gathers the head again too.
    """
    layout = recipe.layout
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(recipe), reduce_dtype=DTYPES[layout.reduce_dtype]
    )
    options: dict[str, Any] = {"mp_policy": policy}
    if layout.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    again = layout.zero_stage == 3
    entry = (model.tok_embeddings, model.position_embeddings, model.embedding_norm)
    first = [m for m in entry if m is not None]
    ends = [m for m in (model.norm, model.output) if m is not None]
    for layer in model.layers.values():
        experts = _experts_of(layer)
        if experts is not None and meshes.expert is not None:
            _shard_experts(experts, recipe, meshes, options)
        fully_shard(layer, mesh=meshes.data, reshard_after_forward=again, **options)
    at_end = again and layout.pp > 1
    groups = [(first, again), (ends, at_end)]
    if model.tied:
        groups = [([*first, *ends], False)]
    for modules, reshard in groups:
        if modules:
            fully_shard(modules, mesh=meshes.data, reshard_after_forward=reshard, **options)
    fully_shard(model, mesh=meshes.data, reshard_after_forward=at_end, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if meshes.dense.device_type == "cpu":  # gloo has no scaled sum
                module.set_force_sum_reduction_for_comms(True)
            if recipe.emulated and not recipe.task.fake_tensors:  # whose operators are counted
                module.set_custom_all_gather(RepeatedShard())
    if layout.ep > 1:
        _prefetch(model)


def _shard_experts(
    experts: nn.Module, recipe: ReferenceRecipe, meshes: Meshes, options: dict[str, Any]
) -> None:
    """Shards along the experts; inside them if more ranks than experts divide them evenly."""
    ranks = meshes.expert_data.size(-1)
    crowded = ranks * recipe.layout.ep > recipe.model.num_experts
    inside = crowded and all(
        p.ndim == 3 and p.shape[1] % ranks == 0 for p in experts.parameters(recurse=False)
    )
    placement = (lambda _: Shard(1)) if inside else None
    again = recipe.layout.zero_stage == 3
    options = {**options, "reshard_after_forward": again, "shard_placement_fn": placement}
    fully_shard(experts, mesh=meshes.expert_data, **options)
    regions.hide_hooks(experts)


def _experts_of(layer: Any) -> nn.Module | None:
    found = (one.experts for one in layer.modules() if isinstance(one, MixtureOfExperts))
    return next(found, None)


def _prefetch(model: Transformer) -> None:
    """Names each layer's next gather, which the exchange's wait for its counts would delay."""
    for here, there in pairwise(model.layers.values()):
        assert isinstance(here, FSDPModule)
        assert isinstance(there, FSDPModule)
        here.set_modules_to_forward_prefetch(_gathered(there))
        there.set_modules_to_backward_prefetch(_gathered(here))


def _gathered(layer: FSDPModule) -> list[FSDPModule]:
    """The modules of a layer that FSDP gathers."""
    experts = _experts_of(layer)
    return [layer, experts] if isinstance(experts, FSDPModule) else [layer]
