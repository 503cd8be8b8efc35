"""A ModelSpec as Megatron-LM's model arguments.

Source: Megatron-LM core 0.14 to 0.18 megatron/training/arguments.py,
    megatron/core/transformer/transformer_config.py.
"""

from collections.abc import Mapping

from planner.columns import LayoutBatch
from planner.export.base import Draft, Settings
from planner.export.megatron_mixers import list_of, mixer_settings
from planner.export.megatron_network import (
    activation_settings,
    name_what_is_left_out,
    norm_settings,
    rope_settings,
    router_settings,
)
from planner.export.megatron_settings import CAPACITY, PADDED
from planner.rules.base import Context
from planner.rules.experts import overlaps_exchange
from planner.specs.model import ModelSpec
from planner.trainers.megatron import MEGATRON
from planner.trainers.megatron_models import adds_a_token, is_hybrid
from planner.trainers.release import Release

SOME_WINDOWS = "0.15"  # training/arguments.py --window-size, --window-attn-skip-freq
# argument of multi-latent attention -> our field, and Megatron's default
MLA: Mapping[str, tuple[str, int]] = {
    "kv_lora_rank": ("kv_lora_rank", 32), "qk_head_dim": ("qk_nope_head_dim", 128),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim", 64), "v_head_dim": ("v_head_dim", 128),
}  # fmt: skip
FLEXIBLE = ("deepep", "hybridep")  # backends of the dispatcher `flex`


def model_settings(draft: Draft, release: Release) -> Settings:
    """Settings for shapes, norms, positions, attention and experts.

    What Megatron has no argument for becomes a gap.
    """
    model = draft.model
    biased = model.mlp_bias or model.attention_output_bias
    grouped = draft.layout.param_dtype == "bfloat16" and draft.layout.precision != "fp16"
    settings: Settings = {
        "num_layers": not is_hybrid(model) and model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size or model.moe_intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": model.vocab_size - adds_a_token(release),
        "make_vocab_size_divisible_by": 1,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "attention_dropout": "0.0",
        "hidden_dropout": model.residual_dropout,
        "position_embedding_type": _positions(model),
        **rope_settings(draft, release),
        **norm_settings(model),
        "softmax_type": model.attention_sinks and "learnable",
        **activation_settings(model),
        "disable_bias_linear": not biased,
        "add_qkv_bias": model.attention_bias and not biased,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        # with MLA it norms the latent q and kv
        "qk_layernorm": model.qk_norm == "head" or model.uses_mla,
        **(_mla(model) if model.uses_mla else _attention(draft, release)),
        **mixer_settings(draft, release),
        **({**_experts(model), **router_settings(draft)} if model.is_moe else {}),
        "moe_grouped_gemm": model.is_moe and grouped,  # it refuses any other dtype
    }
    name_what_is_left_out(draft)
    return settings


def _positions(model: ModelSpec) -> str:
    if model.position_embedding != "rope":
        return "learned_absolute" if model.position_embedding == "learned" else "none"
    scaling = None if model.uses_mla else model.rope_scaling
    return "yarn" if scaling is not None and scaling.rope_type == "yarn" else "rope"


def _attention(draft: Draft, release: Release) -> Settings:
    model = draft.model
    grouped = model.num_key_value_heads != model.num_attention_heads
    return {
        "kv_channels": model.head_dim,
        "group_query_attention": grouped,
        "num_query_groups": grouped and model.num_key_value_heads,
        **_window(draft, release),
    }


def _window(draft: Draft, release: Release) -> Settings:
    """Sliding windows, of all layers or, from core 0.15 on, of some."""
    model, mask = draft.model, draft.model.sliding_mask
    if not any(mask):
        return {}
    size: Settings = {"window_size": f"{model.sliding_window},0"}
    if all(mask) and release.since(SOME_WINDOWS):
        return size
    if release.since(SOME_WINDOWS) and not model.attn_temperature_tuning:
        return {**size, "window_attn_skip_freq": list_of([int(one) for one in mask])}
    rule = (
        "is of chunks (Llama 4), which Megatron-LM has no argument for"
        if model.attn_temperature_tuning
        else f"has no argument in {release.number} ({SOME_WINDOWS}: --window-size)"
    )
    draft.gap("model.sliding_window", rule, "expect the time of full attention", blocking=False)
    return {}


def _mla(model: ModelSpec) -> Settings:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": model.q_lora_rank or False,
        **{argument: getattr(model, name) for argument, (name, _) in MLA.items()},
    }


def dispatcher_settings(draft: Draft, release: Release) -> Settings:
    """The token dispatcher, by release, and the overlap of its exchange.

    Source: Megatron-Core transformer/transformer_config.py: 0.12 (moe_enable_deepep), 0.14
    (overlap_moe_expert_parallel_comm), 0.16 (moe_flex_dispatcher_backend).
    """
    name, able = draft.layout.moe_dispatcher, MEGATRON.at(release).moe_dispatchers
    if not draft.model.is_moe:
        if name != "alltoall":
            draft.inert("moe_dispatcher", "means nothing without experts")
        return {}
    flexible = name in able and name in FLEXIBLE
    old, capacity = release.before("0.16"), draft.training.moe_capacity_factor
    return {
        CAPACITY: capacity is not None and f"{capacity:g}",
        PADDED: capacity is not None,
        "moe_token_dispatcher_type": "flex" if flexible else name if name in able else "alltoall",
        "moe_enable_deepep": flexible and old,
        "moe_flex_dispatcher_backend": flexible and not old and name,
        # DeepEP takes probabilities in fp32 (transformer/moe/token_dispatcher.py)
        "moe_router_dtype": flexible and name == "deepep" and "fp32",
        "overlap_moe_expert_parallel_comm": _overlaps(draft),
    }


def _overlaps(draft: Draft) -> bool:
    """Whether the exchange was priced under another microbatch's compute."""
    job = Context(model=draft.model, cluster=draft.cluster, training=draft.training)
    return bool(overlaps_exchange(LayoutBatch.from_layouts([draft.layout]), job)[0])


def _experts(model: ModelSpec) -> Settings:
    places = [int(kind.moe) for kind in model.layer_kinds()]
    shared = model.shared_expert_intermediate_size > 0
    return {
        "num_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": shared and model.shared_expert_intermediate_size,
        "moe_shared_expert_gate": shared and model.shared_expert_gate,
        "moe_latent_size": model.moe_latent_size or False,
        "moe_layer_freq": not all(places) and not is_hybrid(model) and list_of(places),
    }
