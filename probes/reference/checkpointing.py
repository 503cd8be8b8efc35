"""Activation checkpointing: `planner.work.checkpointing`'s modes as torch wrappers and policies.

selective-op saves attention, reduce-scattered sums and every second matrix product (the first,
third, ...). The router's product is always recomputed and not counted. Source: torchtitan 0.2.2
distributed/activation_checkpoint.py and its `_op_sac_save_list`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.probes.reference import regions
from planner.probes.reference.model import Block, Transformer
from planner.specs.layout import parse_ac

_aten = torch.ops.aten
# whether a memory budget counts script objects as nothing; those in our graphs are process groups,
# which hold no tensors
SCRIPT_OBJECTS = "unsafe_treat_script_objects_as_zero_size"
KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        _aten.max.default,  # amax of float8 scaling
        torch._higher_order_ops.flex_attention,
        torch._higher_order_ops.inductor_compiled_code,
    }
)


def apply(model: Transformer, mode: str, model_experts: int) -> None:
    """Wraps the model's layers. model_experts: by their number a router's product is known."""
    kind, number = parse_ac(mode)
    torch._functorch.config.activation_memory_budget = number if kind == "memory-budget" else 1.0
    if hasattr(torch._functorch.config, SCRIPT_OBJECTS):  # torch 2.13 asks, 2.11 has no such key
        setattr(torch._functorch.config, SCRIPT_OBJECTS, True)
    if kind in ("none", "memory-budget"):
        return
    wrap = partial(checkpoint_wrapper, preserve_rng_state=False, early_stop=False)
    for place, (name, layer) in enumerate(list(model.layers.items())):
        assert isinstance(layer, Block)
        if kind == "selective-attention":
            layer.attention.core = wrap(layer.attention.get_submodule("core"))
        elif kind == "selective-op":
            context = op_contexts(model.spec.hidden_size, model_experts)
            model.layers[name] = wrap(layer, context_fn=context)
        elif (
            kind == "full"
            or (kind == "block" and place < number)
            or (kind == "selective-layer" and (int(name) + 1) % int(number) == 0)
        ):
            model.layers[name] = wrap(layer)


def op_contexts(hidden: int, num_experts: int) -> Callable[[], tuple[Any, Any]]:
    """Contexts of one layer's selective-op checkpoint: forward and recomputation.

    torch 2.11 asks the policy during recomputation too, 2.13 does not, so each has its own counter.
    """
    router = (hidden, num_experts)

    def contexts() -> tuple[Any, Any]:
        products = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op not in KEPT_OPERATORS:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if op == _aten.mm.default:
                if tuple(args[1].shape) == router:
                    return CheckpointPolicy.PREFER_RECOMPUTE
                products[ctx.is_recompute] += 1
                if products[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        forward, again = create_selective_checkpoint_contexts(policy)
        regions.adopt(forward, again)
        return forward, again

    return contexts
