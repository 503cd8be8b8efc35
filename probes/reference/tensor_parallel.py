"""Tensor and sequence parallelism: torch's parallel styles on every module of the model.

The plan is TorchTitan's. With sequence parallelism the residual stream is cut along the sequence
(Shard(1)); without it, it is whole on every rank (Replicate()).
Source: torchtitan 0.2.2 models/{llama3,qwen3,deepseek_v3}/infra/parallelize.py.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from planner.probes.reference.collectives import Copy, own_part
from planner.probes.reference.model import AttentionLayer, Block, LatentAttention, Transformer
from planner.probes.reference.recipe import ReferenceRecipe

Plan = dict[str, ParallelStyle]


class Whole(ParallelStyle):
    """Every rank holds and computes the whole module, with DTensors as inputs and outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicated(x: Any, mesh: DeviceMesh) -> DTensor:
            if isinstance(x, DTensor):
                return x
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return tuple(replicated(x, mesh) for x in inputs)

        return distribute_module(module, device_mesh, input_fn=enter)  # type: ignore[arg-type]


class NormOverShards(ParallelStyle):
    """A norm over a width cut over the ranks: local tensors gathered, normed whole, cut again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            parts = (
                DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False) for x in inputs
            )
            return tuple(part.redistribute(mesh, [Replicate()]) for part in parts)

        def leave(_: nn.Module, out: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return out.redistribute(mesh, [Shard(out.ndim - 1)]).to_local()

        hooks: dict[str, Any] = {"input_fn": enter, "output_fn": leave}
        return distribute_module(module, device_mesh, **hooks)


def apply(model: Transformer, recipe: ReferenceRecipe, mesh: DeviceMesh) -> None:
    """Distributes the model's parameters over the TP ranks and hooks its modules."""
    stream: Placement = Shard(1) if recipe.layout.sequence_parallel else Replicate()
    styles = _styles(recipe)
    for layer in model.layers.values():
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, _layer_plan(layer, stream, styles))
        if isinstance(layer.attention, AttentionLayer) and layer.attention.sinks is not None:
            sinks = distribute_tensor(layer.attention.sinks, mesh, [Shard(0)])
            layer.attention.sinks = nn.Parameter(sinks)
    parallelize_module(model, mesh, _ends_plan(model, recipe, stream))
    model.tie()
    if model.position_embeddings is not None and recipe.layout.sequence_parallel:
        group = mesh.get_group()
        model.position_embeddings.share = lambda positions: own_part(positions, group, 0)
        model.position_embeddings.weight_hook = lambda weight: Copy.apply(weight, group)


class Styles(NamedTuple):
    """The styles of linear layers."""

    column: Any
    row: Any
    prepare: Any


def _styles(recipe: ReferenceRecipe) -> Styles:
    """Styles of torch; float8 tensorwise has its own, which gather in float8."""
    if recipe.layout.precision != "float8-tensorwise":
        return Styles(ColwiseParallel, RowwiseParallel, PrepareModuleInput)
    from torchao.float8 import float8_tensor_parallel as float8

    prepare = float8.PrepareFloat8ModuleInput
    return Styles(float8.Float8ColwiseParallel, float8.Float8RowwiseParallel, prepare)


def _ends_plan(model: Transformer, recipe: ReferenceRecipe, stream: Placement) -> Plan:
    plan: Plan = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if model.embedding_norm is not None and isinstance(stream, Shard):
        plan["embedding_norm"] = SequenceParallel(use_local_output=True)
    if model.norm is not None and isinstance(stream, Shard):
        plan["norm"] = SequenceParallel()
    if model.output is not None:
        logits = Shard(-1) if recipe.vocab_parallel else Replicate()
        plan["output"] = ColwiseParallel(
            input_layouts=stream, output_layouts=logits, use_local_output=not recipe.vocab_parallel
        )
    return plan


def _layer_plan(layer: Block, stream: Placement, styles: Styles) -> Plan:
    inside = _attention_plan(layer.attention, stream, styles)
    wanted = (Replicate(), None)
    plan: Plan = {
        "attention": styles.prepare(input_layouts=(stream, None), desired_input_layouts=wanted),
        **{f"attention.{name}": style for name, style in inside.items()},
    }
    mlp, holder = "feed_forward", cast(Any, layer.feed_forward)
    if layer.moe is not None:
        mlp, holder = "moe.shared", cast(Any, layer.moe.shared)
    if holder is not None:
        plan[mlp] = styles.prepare(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        plan[f"{mlp}.w1"] = styles.column()
        plan[f"{mlp}.w2"] = styles.row(output_layouts=stream)
        if holder.w3 is not None:
            plan[f"{mlp}.w3"] = styles.column()
    if isinstance(stream, Shard):
        norms = ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm")
        plan |= {name: SequenceParallel(use_local_output=True) for name in _held(layer, *norms)}
    return plan


def _attention_plan(attention: nn.Module, stream: Placement, styles: Styles) -> Plan:
    plan: Plan = {"wo": styles.row(output_layouts=stream)}
    if isinstance(attention, LatentAttention):
        whole = _held(attention, "wq_a", "q_norm", "wkv_a", "kv_norm")
        columns = _held(attention, "wq", "wq_b", "wkv_b")
        plan |= {name: Whole() for name in whole}
        return plan | {name: styles.column() for name in columns}
    assert isinstance(attention, AttentionLayer)
    plan |= {name: styles.column() for name in ("wq", "wk", "wv")}
    if attention.norm_kind == "full":
        plan |= {"q_norm": NormOverShards(), "k_norm": NormOverShards()}
    if attention.norm_kind == "head":
        norm = partial(SequenceParallel, sequence_dim=2, use_local_output=True)
        plan |= {"q_norm": norm(), "k_norm": norm()}
    return plan


def _held(module: nn.Module, *names: str) -> list[str]:
    """Parts of these names that a module has."""
    return [name for name in names if getattr(module, name) is not None]
