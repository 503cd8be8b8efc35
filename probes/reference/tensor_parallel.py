"""Tensor and sequence parallelism: torch's parallel styles on every module of the model.

The plan is TorchTitan's. With sequence parallelism the residual stream is cut along the sequence
(Shard(1)); without it, it is whole on every rank (Replicate()).
Source: torchtitan 0.2.2 models/{llama3,qwen3,deepseek_v3}/infra/parallelize.py.
"""

from typing import Any

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
        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return tuple(
                x
                if isinstance(x, DTensor)
                else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
                for x in inputs
            )

        return distribute_module(module, device_mesh, input_fn=enter)  # type: ignore[arg-type]


class NormOverShards(ParallelStyle):
    """A norm over a width that is cut over the ranks: gathered, normed whole, cut again.

    Input and output are local tensors.
    """

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


def apply(
    model: Transformer, recipe: ReferenceRecipe, mesh: DeviceMesh, styles: "Styles | None" = None
) -> None:
    """Distributes the model's parameters over the TP ranks and hooks its modules."""
    stream: Placement = Shard(1) if recipe.layout.sequence_parallel else Replicate()
    styles = styles or Styles()
    for layer in model.layers.values():
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, _layer_plan(layer, stream, styles))
        if isinstance(layer.attention, AttentionLayer) and layer.attention.sinks is not None:
            layer.attention.sinks = nn.Parameter(
                distribute_tensor(layer.attention.sinks, mesh, [Shard(0)])
            )
    parallelize_module(model, mesh, _ends_plan(model, recipe, stream))
    model.tie()
    if model.position_embeddings is not None and recipe.layout.sequence_parallel:
        group = mesh.get_group()
        model.position_embeddings.share = lambda positions: own_part(positions, group, 0)
        model.position_embeddings.weight_hook = lambda weight: Copy.apply(weight, group)


class Styles:
    """The styles of linear layers; float8 tensorwise has its own, which gather in float8."""

    column: Any = ColwiseParallel
    row: Any = RowwiseParallel
    prepare: Any = PrepareModuleInput


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
    attention = {
        f"attention.{name}": style
        for name, style in _attention_plan(layer.attention, stream, styles).items()
    }
    plan: Plan = {
        "attention": styles.prepare(
            input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)
        ),
        **attention,
    }
    mlp = "feed_forward" if layer.feed_forward is not None else "moe.shared"
    holder: Any = layer.feed_forward
    if holder is None:
        holder = layer.moe.shared  # type: ignore[union-attr]
    if holder is not None:
        plan[mlp] = styles.prepare(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        plan[f"{mlp}.w1"] = styles.column()
        plan[f"{mlp}.w2"] = styles.row(output_layouts=stream)
        if holder.w3 is not None:
            plan[f"{mlp}.w3"] = styles.column()
    if isinstance(stream, Shard):
        norms = ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm")
        plan |= {
            name: SequenceParallel(use_local_output=True)
            for name in norms
            if getattr(layer, name) is not None
        }
    return plan


def _attention_plan(attention: nn.Module, stream: Placement, styles: Styles) -> Plan:
    plan: Plan = {"wo": styles.row(output_layouts=stream)}
    if isinstance(attention, LatentAttention):
        whole = [
            name
            for name in ("wq_a", "q_norm", "wkv_a", "kv_norm")
            if getattr(attention, name) is not None
        ]
        plan |= {name: Whole() for name in whole}
        return plan | {
            name: styles.column()
            for name in ("wq", "wq_b", "wkv_b")
            if getattr(attention, name) is not None
        }
    assert isinstance(attention, AttentionLayer)
    plan |= {name: styles.column() for name in ("wq", "wk", "wv")}
    if attention.norm_kind == "full":
        plan |= {"q_norm": NormOverShards(), "k_norm": NormOverShards()}
    if attention.norm_kind == "head":
        plan |= {
            name: SequenceParallel(sequence_dim=2, use_local_output=True)
            for name in ("q_norm", "k_norm")
        }
    return plan
