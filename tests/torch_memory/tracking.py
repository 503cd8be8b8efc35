"""What torch's trackers say about modules, and what the planner says about the same sizes."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from planner.cost.cost_inputs import units_at
from planner.cost.price import Pricer
from tests import pricing
from tests.pricing import batch_of
from tests.torch_memory.modules import Sizes, rotary_table

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# seed and offset of the attention operations, whatever the sizes
RANDOM_STATE_BYTES = {"flash": 24, "cudnn": 16}
SAVE_LIST = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def selective_op() -> Any:
    """torchtitan 0.2.2 activation_checkpoint.py: all in the list, of products every second."""
    seen: dict[str, int] = defaultdict(int)

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mode = "again" if context.is_recompute else "first"
        if function == torch.ops.aten.mm.default:
            seen[mode] += 1
        skipped = function == torch.ops.aten.mm.default and seen[mode] % 2 == 0
        return (
            CheckpointPolicy.MUST_SAVE
            if function in SAVE_LIST and not skipped
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def run_layer(layer: Callable[..., Tensor], ac: str, index: int) -> Callable[..., Tensor]:
    """The layer under an AC mode; index counts from 1, as TorchTitan's every-Nth rule does."""
    options = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": False}
    whole = partial(checkpoint, layer, **options)
    every = int(ac.rsplit("-", 1)[1]) if ac.startswith("selective-layer-") else 0
    if ac == "full" or (every and index % every == 0):
        return whole
    return partial(whole, context_fn=selective_op) if ac == "selective-op" else layer


@dataclass(frozen=True, slots=True)
class Seen:
    """(what each layer left after its forward, the most alive in backward beyond all of it)."""

    kept: tuple[int, ...]
    extra: int


def forget_gradients(module: nn.Module, _: Tensor) -> None:
    """As FSDP does when a layer's backward is over: its gradients have gone to the reduction."""
    module.zero_grad(set_to_none=True)


def track_layers(modules: Sequence[nn.Module], x: Tensor, table: Tensor, ac: str) -> Seen:
    tracker = MemTracker()
    tracker.track_external(*modules, x, table)

    def total(kind: str = "current") -> int:
        return int(tracker.get_tracker_snapshot(kind)[x.device]["Total"])

    with tracker:
        totals = [total()]
        for index, module in enumerate(modules, start=1):
            x.register_hook(partial(forget_gradients, module))
            x = run_layer(module, ac, index)(x, table)
            totals.append(total())
        (x * 1.0).sum().backward()
    return Seen(tuple(np.diff(totals)), total("peak") - totals[-1])


def on_meta(sizes: Sizes, block: Callable[[Sizes], nn.Module], dtype: str, ac: str) -> Seen:
    with torch.device("meta"):
        modules = [block(sizes).to(DTYPES[dtype]) for _ in range(sizes.layers)]
        size = (sizes.batch, sizes.seq, sizes.hidden)
        x = torch.empty(*size, dtype=DTYPES[dtype], requires_grad=True)
        table = rotary_table(sizes)
    return track_layers(modules, x, table, ac)


def spec(s: Sizes) -> dict[str, Any]:
    model: dict[str, Any] = {
        "name": "generated", "hidden_size": s.hidden, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim,
        "intermediate_size": s.ffn, "vocab_size": s.vocab, "tie_word_embeddings": False,
        "mlp": s.mlp, "norm": "layernorm" if s.norm == "layer" else "rmsnorm",
        "position_embedding": "none" if s.rotary == "none" else "rope",
    }  # fmt: skip
    if s.kv_rank:
        model |= {"kv_lora_rank": s.kv_rank, "q_lora_rank": s.q_rank, "v_head_dim": s.head_dim}
        model |= {"qk_nope_head_dim": s.head_dim, "qk_rope_head_dim": s.qk_rope}
        model["head_dim"] = s.head_dim + s.qk_rope
    if s.experts:
        model |= {"n_routed_experts": s.experts, "num_experts_per_tok": s.top_k}
        model |= {"moe_intermediate_size": s.expert_ffn, "first_k_dense_replace": 0}
        shared = {"n_shared_experts": 1 if s.shared_ffn else 0}
        model |= {**shared, "shared_expert_intermediate_size": s.shared_ffn}
    return model


def pricer(s: Sizes, num_gpus: int = 1, trainer: str = "torchtitan", **training: Any) -> Pricer:
    values = {"seq_len": s.seq, "global_batch_size": s.batch * num_gpus, "trainer": trainer}
    values |= {"moe_imbalance": 1.0, **training}
    if s.norm == "composite":
        values.setdefault("torch_version", "2.7.1")
    if s.repeat_kv:
        values.setdefault("trainer_version", "0.2.1")
    return pricing.pricer(spec(s), num_gpus, **values)


Both = tuple[float, float]


def planned_layer(s: Sizes, **layout: Any) -> Both:
    """(bytes that the planner keeps of one layer, and what it needs beyond all kept ones while the
    last layer runs backward).
    """
    p = pricer(s)
    costs = units_at(p, batch_of(p, micro_batch_size=s.batch, **layout))
    return float(costs.saved_bytes[0, 0]), float(costs.transient_bytes[0, 0])
