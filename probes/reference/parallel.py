"""Applies a layout to one part of the model, in torch's order.

The order is TP, experts, CP, float8, recomputation, compile, then data parallelism.
Gradients are summed over data-parallel ranks, never averaged: each rank's loss is its share of the
mean over the global batch. FSDP2's division is switched off for that; DistributedDataParallel
divides, so its loss is multiplied (`loss_factor`).
Source: torchtitan 0.2.2 models/llama3/infra/parallelize.py, models/llama4/infra/parallelize.py.
"""

from collections.abc import Sequence as Items
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
from planner.probes.reference.moe import GroupedExperts, MixtureOfExperts
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
        tensor_parallel.apply(model, recipe, meshes.tp, _styles(recipe))
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


def _styles(recipe: ReferenceRecipe) -> tensor_parallel.Styles:
    styles = tensor_parallel.Styles()
    if recipe.layout.precision == "float8-tensorwise":
        from torchao.float8 import float8_tensor_parallel as float8

        styles.column, styles.row = float8.Float8ColwiseParallel, float8.Float8RowwiseParallel
        styles.prepare = float8.PrepareFloat8ModuleInput
    return styles


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
    for holder in (block, moe):
        for name, child in list(holder.named_children()):
            if not isinstance(child, MixtureOfExperts | GroupedExperts) and child not in (
                moe.router,
                moe.shared_gate,
            ):
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
    ends = [m for m in (model.norm, model.output) if m is not None]
    first = [
        m
        for m in (model.tok_embeddings, model.position_embeddings, model.embedding_norm)
        if m is not None
    ]
    for layer in model.layers.values():
        experts = _experts_of(layer)
        if experts is not None and meshes.expert is not None:
            _shard_experts(experts, recipe, meshes, options, again)
        fully_shard(layer, mesh=meshes.data, reshard_after_forward=again, **options)
    if model.tied:
        fully_shard([*first, *ends], mesh=meshes.data, reshard_after_forward=False, **options)
    else:
        if first:
            fully_shard(first, mesh=meshes.data, reshard_after_forward=again, **options)
        if ends:
            fully_shard(
                ends, mesh=meshes.data, reshard_after_forward=again and layout.pp > 1, **options
            )
    fully_shard(model, mesh=meshes.data, reshard_after_forward=again and layout.pp > 1, **options)
    _sum_gradients(model, on_cpu=meshes.dense.device_type == "cpu")
    if recipe.emulated and not recipe.task.fake_tensors:  # whose operators are counted
        _repeat_shards(model)
    if layout.ep > 1:
        _prefetch(model)


def _shard_experts(
    experts: nn.Module,
    recipe: ReferenceRecipe,
    meshes: Meshes,
    options: dict[str, Any],
    again: bool,
) -> None:
    """Shards along the experts, or inside them if there are more ranks than experts.

    Sharding inside requires that they divide evenly.
    """
    ranks = meshes.expert_data.size(-1)
    crowded = ranks * recipe.layout.ep > recipe.model.num_experts
    inside = crowded and all(
        p.ndim == 3 and p.shape[1] % ranks == 0 for p in experts.parameters(recurse=False)
    )
    placement = (lambda _: Shard(1)) if inside else None
    fully_shard(
        experts,
        mesh=meshes.expert_data,
        reshard_after_forward=again,
        shard_placement_fn=placement,
        **options,
    )
    regions.hide_hooks(experts)


def _sum_gradients(model: nn.Module, *, on_cpu: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if on_cpu:  # gloo has no scaled sum
                module.set_force_sum_reduction_for_comms(True)


def _repeat_shards(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(RepeatedShard())


def _experts_of(layer: nn.Module) -> nn.Module | None:
    return next(
        (module.experts for module in layer.modules() if isinstance(module, MixtureOfExperts)), None
    )


def _prefetch(model: Transformer) -> None:
    """Names the layer to gather next for each layer.

    The exchange waits for its counts, which would delay the implicit gathers.
    """
    layers = list(model.layers.values())
    for here, there in pairwise(layers):
        _ask(here, there, forward=True)
        _ask(there, here, forward=False)


def _ask(here: nn.Module, there: nn.Module, *, forward: bool) -> None:
    assert isinstance(here, FSDPModule)
    experts = _experts_of(there)
    modules: Items[Any] = [there, experts] if isinstance(experts, FSDPModule) else [there]
    here.set_modules_to_forward_prefetch(
        list(modules)
    ) if forward else here.set_modules_to_backward_prefetch(list(modules))
