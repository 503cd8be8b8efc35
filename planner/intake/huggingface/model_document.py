"""Writes a model as an inline mapping.

A stored job has the mapping in place of a path, since the file may change or vanish.
"""

from planner.specs.mixers import Mixers
from planner.specs.model import ModelSpec

_WINDOW = frozenset({"sliding_window", "sliding_mask"})
_WINDOWED, _FULL = "sliding_attention", "full_attention"
MLA_ONLY = frozenset({"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"})
MOE_ONLY = frozenset({
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "shared_expert_intermediate_size", "shared_expert_gate", "first_k_dense_replace",
    "moe_layer_freq", "moe_layer_offset", "dense_layers", "router_bias", "router_correction_bias",
    "expert_bias",
})  # fmt: skip


def inline_keys(model: ModelSpec) -> dict[str, object]:
    """Keys from which `read_model` makes the same model.

    A mask over layers becomes Hugging Face's `layer_types`.
    """
    left_out = (
        _WINDOW
        | (frozenset() if model.is_moe else MOE_ONLY)
        | (frozenset() if model.uses_mla else MLA_ONLY)
    ) - ({"q_lora_rank"} if model.q_lora_rank else set())
    unset = frozenset(
        name
        for name in ("max_position_embeddings", "intermediate_size", "v_head_dim")
        if getattr(model, name) == 0
    )
    unset |= frozenset(
        name
        for name, field in Mixers.model_fields.items()
        if getattr(model, name) == field.default
        and (name != "residual_dropout" or not model.dropout)  # which else means this one too
    )
    keys: dict[str, object] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in model.model_dump(exclude_none=True).items()
        if name not in left_out | unset
    }
    if model.sliding_mask:
        layers = [_WINDOWED if windowed else _FULL for windowed in model.sliding_mask]
        keys |= {"sliding_window": model.sliding_window, "layer_types": layers}
    return keys
