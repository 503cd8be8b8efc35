"""The modules of a layer that Megatron-LM can recompute, as sets of its operations.

Sources: Megatron-LM core 0.16 transformer/transformer_config.py (recompute_modules),
    transformer_layer.py, multi_latent_attention.py (get_query_key_value_tensors),
    moe/moe_layer.py, moe/experts.py; models/gpt/gpt_layer_specs.py for which norms are modules:
    under Transformer Engine that of a dense MLP is fused into its first linear layer, and that of
    attention too, but for multi-head latent attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.specs.layout import RECOMPUTE_MODULES, modules_of
from planner.work.liveness import results, saved_tensors
from planner.work.ops import Collective, Elementwise, Op, Tensor

CORE_ATTENTION = frozenset({"attention", "softmax_dropout", "indexer", "wv_absorb"})
# of DeepSeek-V4 too, whose one key head is no latent (dev branch, deepseek_v4_hybrid_attention.py)
UP_PROJECTION = frozenset({"wq", "wq_b", "wkv_b", "wk_absorb", "wkv", "wkv_norm", "rotary"})
LAYER_INPUT = Tensor("x", ("tokens_sp", "hidden"))
# "moe_act", "layernorm" and "mla_up_proj" use output-discarding checkpointing
_DISCARDING = frozenset({"moe_act", "layernorm", "mla_up_proj"})


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Changes in one layer by a set of modules.

    repeats: whether the backward runs each operation again.
    saves: tensors that stay from forward to backward.
    holds_routed: the repeated forward puts routed rows back, for which it holds several copies.
    """

    repeats: tuple[bool, ...]
    saves: tuple[Tensor, ...]
    holds_routed: bool


def layer_input(ops: Sequence[Op]) -> Tensor:
    """The input of a layer of these operations; of an embedding or a head, one residual stream."""
    reads = (tensor for op in ops for tensor in op.reads)
    return next((tensor for tensor in reads if tensor.name == LAYER_INPUT.name), LAYER_INPUT)


@lru_cache(maxsize=512)
def recomputed(ops: tuple[Op, ...], bits: int) -> Recomputed:
    """The effect of a set of modules on a layer of these operations.

    A module's checkpoint saves its inputs. What it computes stays where an operation outside reads
    it in backward, unless the module discards its outputs and computes them again.
    bits: the number that `layout.parse_ac` gives a set.
    """
    chosen = {name: _operations(ops, name) for name in modules_of(bits)}
    inside = frozenset[int]().union(*chosen.values())
    discards = frozenset[int]().union(*(chosen[name] for name in chosen.keys() & _DISCARDING))
    same, everything = _aliases(ops), saved_tensors(ops)
    made, discarded = _made(ops, inside), _made(ops, discards)
    elsewhere = {LAYER_INPUT.name} | (_made(ops, frozenset(range(len(ops)))) - made)
    kept = {
        tensor.name: everything[tensor.name]
        for index, op in enumerate(ops)
        if index not in inside
        for tensor in _saved(op)
        if same.get(tensor.name, tensor.name) not in discarded
    }
    stays = {same.get(name, name) for name in kept}
    for index in sorted(inside):
        for tensor in (*_saved(ops[index]), *ops[index].reads):
            name = same.get(tensor.name, tensor.name)
            if name in elsewhere - stays:
                kept[tensor.name] = everything.get(tensor.name, tensor)
                stays.add(name)
    return Recomputed(
        repeats=tuple(index in inside for index in range(len(ops))),
        saves=tuple(kept.values()),
        holds_routed=any(
            isinstance(op, Elementwise) and bool(op.forward_workspace)
            for op in map(ops.__getitem__, sorted(inside))
        ),
    )


def _saved(op: Op) -> tuple[Tensor, ...]:
    return () if isinstance(op, Collective) else op.saves


def _made(ops: Sequence[Op], indices: frozenset[int]) -> set[str]:
    """Names of the tensors that these operations return."""
    return {tensor.name for index in indices for tensor in results(ops[index])}


def _aliases(ops: Sequence[Op]) -> dict[str, str]:
    """Gathered tensor -> the rank's own part, which is what Megatron's linear layers save."""
    return {
        op.makes[0].name: op.reads[0].name
        for op in ops
        if isinstance(op, Collective) and op.site == "tp_enter" and op.makes and op.reads
    }


def _operations(ops: Sequence[Op], module: str) -> frozenset[int]:
    """Indices of the operations of one module; empty where the layer has no such module."""
    names = [op.name for op in ops]
    if not {"attention_residual", "mlp_residual"} & {*names}:  # embedding or head
        return frozenset()
    latent, routed = bool({"wkv_b", "wk_absorb", "wkv"} & {*names}), "router" in names
    feed_forward = range(0)
    if "mlp_residual" in names:
        feed_forward = range(names.index("mlp_norm") + routed, names.index("mlp_residual"))
    chosen = {
        "core_attn": (name in CORE_ATTENTION for name in names),
        "mlp": (not routed and index in feed_forward for index in range(len(ops))),
        "layernorm": (
            (name == "attention_norm" and latent) or (name == "mlp_norm" and routed)
            for name in names
        ),
        "moe_act": (name in ("expert_swiglu", "expert_activation") for name in names),
        "moe": (routed and index in feed_forward for index in range(len(ops))),
        "mla_up_proj": (latent and name in UP_PROJECTION for name in names),
        "shared_experts": (name.startswith("shared_") for name in names),
    }
    assert chosen.keys() == set(RECOMPUTE_MODULES)
    return frozenset(index for index, inside in enumerate(chosen[module]) if inside)
