"""Network fields that TorchTitan's model classes can express, and how a model's differ.

Sources: torchtitan 0.2.2 models/{llama3,llama4,qwen3,deepseek_v3,gpt_oss}/model/{args,model}.py and
    their `__init__.py`, models/moe/moe.py; 0.3.0 models/*/__init__.py,
    models/common/{rope,moe,nn_modules}.py.
"""

from collections.abc import Iterator, Mapping

from planner.specs.model import ModelSpec
from planner.specs.network import RopeScaling, yarn_mscale
from planner.trainers.uncommon import other_rope_base, uncommon

# Scalings of rotary frequencies that a class can have. TorchTitan's qwen3 has none, and llama3 has
# no linear one: an export for 0.2 computes these itself.
SCALINGS: Mapping[str, frozenset[str]] = {
    "llama3": frozenset({"llama3", "linear"}),
    "qwen3": frozenset({"llama3", "linear"}),
    "deepseek_v3": frozenset({"yarn"}),
    "llama4": frozenset({"llama3"}),
    "gpt_oss": frozenset({"yarn"}),
}
SCALINGS_03: Mapping[str, frozenset[str]] = {
    **SCALINGS,
    "llama3": frozenset({"llama3"}),
    "qwen3": frozenset(),
}
# Models that TorchTitan ships under their publisher's name differ from the published config in
# these fields. The export names them; they are no reason to refuse the model.
OWN_WAY: Mapping[str, frozenset[str]] = {
    "llama4": frozenset({"qk_l2_norm", "attn_temperature_tuning", "rope_mask"}),
    "gpt_oss": frozenset({"swiglu_limit"}),
}


# Argument of 0.2's ModelArgs or of 0.3's builders -> field of a model, which is Hugging Face's key.
ARGUMENTS: Mapping[str, str] = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "head_dim": "head_dim",
    "hidden_dim": "intermediate_size", "inter_dim": "intermediate_size",
    "dense_hidden_dim": "intermediate_size", "moe_inter_dim": "moe_intermediate_size",
    "moe_hidden_dim": "moe_intermediate_size", "n_dense_layers": "first_k_dense_replace",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim", "enable_weight_tying": "tie_word_embeddings",
    "num_experts": "num_experts", "top_k": "num_experts_per_tok",
    "router_top_k": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "rope_theta": "rope_theta", "norm_eps": "norm_eps", "route_norm": "norm_topk_prob",
    "router_route_norm": "norm_topk_prob", "score_func": "scoring_func",
    "router_score_func": "scoring_func", "route_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group", "num_limited_groups": "topk_group",
}  # fmt: skip


def lacks(model: ModelSpec, kind: str, line: str) -> Iterator[tuple[str, str]]:
    """(field, its words) for all about the network that TorchTitan's class cannot express.

    kind: the class; line: "0.2" or "0.3".
    A model with any of these would train, but as another network than its config describes.
    """
    scaling = model.rope_scaling
    types = (SCALINGS if line == "0.2" else SCALINGS_03).get(kind, frozenset())
    if scaling is not None and scaling.rope_type not in types:
        yield "rope_scaling", f"{scaling.rope_type} scaling of RoPE"
    elif scaling is not None and kind == "deepseek_v3" and not _one_mscale(scaling):
        yield "rope_scaling", "YaRN with an mscale that differs from mscale_all_dim"
    if model.partial_rotary_factor != 1:
        yield "partial_rotary_factor", f"RoPE on {model.partial_rotary_factor:.0%} of each head"
    yield from uncommon(model, "rope_mask")
    if other_rope_base(model):
        yield "rope_local_base_freq", "another RoPE base in windowed layers"
    yield from uncommon(model, "alibi", "post_norm", "qk_l2_norm", "qk_norm_after_rope")
    if model.hidden_act not in (None, "silu"):
        yield "hidden_act", f"{model.hidden_act} activation"
    yield from uncommon(
        model, "swiglu_limit", "swiglu_limits", "attention_multiplier", "attn_logit_softcapping",
        "final_logit_softcapping", "clip_qkv", "attn_temperature_tuning", "embedding_multiplier",
        "residual_multiplier", "logits_multiplier",
    )  # fmt: skip
    if model.scoring_func not in (None, "softmax", "sigmoid"):
        yield "scoring_func", f"{model.scoring_func} router"
    if line == "0.3" and kind != "llama4" and model.moe_apply_router_weight_on_input:
        yield "moe_apply_router_weight_on_input", "router scores on the experts' input"
    if line == "0.3" and kind == "qwen3" and model.is_moe and model.n_group > 1:
        yield "n_group", "groups of experts without MLA"


def _one_mscale(scaling: RopeScaling) -> bool:
    """Whether YaRN's factor on rotated widths is 1, so that it scales the softmax only.

    DeepSeek's class scales the softmax only.
    """
    return (scaling.mscale or 1.0) == (scaling.mscale_all_dim or 0.0)


def softmax_mscale(scaling: RopeScaling) -> float:
    """DeepSeekV3ModelArgs.mscale of this YaRN scaling."""
    return float(scaling.mscale_all_dim or 0.0)


_MAY_BE_UNKNOWN = frozenset({"rope_theta", "norm_eps", "scoring_func", "norm_topk_prob"})


def differences(model: ModelSpec, facts: Mapping[str, object]) -> dict[str, object]:
    """Field -> the model's value, where it is known and differs from a shipped model's."""
    return {
        field: getattr(model, field)
        for field, theirs in facts.items()
        if not _same(model, field, theirs)
    }


def _same(model: ModelSpec, field: str, theirs: object) -> bool:
    ours = getattr(model, field)
    if field == "rope_scaling":
        return model.rope_theta is None or rope_numbers(ours) == rope_numbers(
            theirs if isinstance(theirs, RopeScaling) else None
        )
    return ours == theirs or (ours is None and field in _MAY_BE_UNKNOWN)


def rope_numbers(scaling: RopeScaling | None) -> tuple[object, ...]:
    """The numbers that determine a scaling; equal for two scalings with the same effect."""
    if scaling is None:
        return ()
    common = (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings)
    if scaling.rope_type == "llama3":
        return (*common, scaling.low_freq_factor, scaling.high_freq_factor)
    if scaling.rope_type == "yarn":
        factor = scaling.factor or 1.0
        grown = (
            yarn_mscale(factor, scaling.mscale or 1.0),
            yarn_mscale(factor, scaling.mscale_all_dim or 0.0),
        )
        return (
            *common,
            scaling.beta_fast,
            scaling.beta_slow,
            *grown,
            scaling.truncate,
            scaling.attention_factor,
        )
    return (*common, scaling.short_factor, scaling.long_factor, scaling.attention_factor)
