"""Keys by which a person or a config.json describes a model: other names, kinds and bounds.

`read_keys` turns raw keys into canonical ones and collects every fault on the way. Canonical keys
are Hugging Face's most common names plus the fields of `ModelSpec`.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.errors import Fault
from planner.units import to_float

MAX_NAME_LENGTH = 200
_TOKENS, _WIDTH, _SMALL = 2**31, 2**24, 2**16

# Canonical key -> (least, most). A size beyond `most` counts as a typing error.
POSITIVE = {
    "hidden_size": _WIDTH, "num_hidden_layers": _SMALL, "num_attention_heads": _SMALL,
    "num_key_value_heads": _SMALL,
    "head_dim": _SMALL, "intermediate_size": _WIDTH, "vocab_size": 2**28,
    "num_experts_per_tok": _SMALL,
    "moe_intermediate_size": _WIDTH, "moe_layer_freq": _SMALL, "decoder_sparse_step": _SMALL,
    "interleave_moe_layer_step": _SMALL,
    "intermediate_size_mlp": _WIDTH, "sliding_window_pattern": _SMALL,
    "attention_chunk_size": _TOKENS, "expansion_ratio": _SMALL,
    "max_position_embeddings": _TOKENS,
}  # fmt: skip
NOT_NEGATIVE = {
    "num_experts": _SMALL, "n_shared_experts": _SMALL, "shared_expert_intermediate_size": _WIDTH,
    "first_k_dense_replace": _SMALL,
    "kv_lora_rank": _WIDTH, "q_lora_rank": _WIDTH, "qk_nope_head_dim": _SMALL,
    "qk_rope_head_dim": _SMALL, "v_head_dim": _SMALL,
    "sliding_window": _TOKENS, "max_window_layers": _SMALL, "norms_per_layer": 8,
    "moe_layer_offset": _SMALL,
    "n_group": _SMALL, "topk_group": _SMALL, "num_nextn_predict_layers": _SMALL,
    "no_rope_layer_interval": _SMALL,
    "original_max_position_embeddings": _TOKENS,
    "index_n_heads": _SMALL, "index_head_dim": _SMALL, "index_topk": _SMALL,
    "mtp_num_layers": _SMALL, "mtp_window": _TOKENS,
    "linear_num_key_heads": _SMALL, "linear_num_value_heads": _SMALL,
    "linear_key_head_dim": _SMALL, "linear_value_head_dim": _SMALL,
    "linear_conv_kernel_dim": _SMALL, "mamba_num_heads": _SMALL, "mamba_head_dim": _SMALL,
    "ssm_state_size": _SMALL, "mamba_n_groups": _SMALL, "mamba_d_conv": _SMALL,
    "mamba_dt_rank": _SMALL,
    "mamba_chunk_size": _TOKENS, "lightning_block_size": _TOKENS,
    "moe_latent_size": _WIDTH, "index_block_size": _TOKENS, "sliding_head_dim": _SMALL,
    "hidden_size_per_layer_input": _SMALL, "vocab_size_per_layer_input": 2**28,
    "zero_expert_num": _SMALL,
    "num_sliding_attention_heads": _SMALL, "num_sliding_key_value_heads": _SMALL,
    "o_groups": _SMALL, "o_lora_rank": _WIDTH, "compress_rate_csa": _TOKENS,
    "compress_rate_hca": _TOKENS, "num_hash_layers": _SMALL, "hc_mult": 64,
    "hc_sinkhorn_iters": _SMALL, "gated_norm_rank": _WIDTH, "sliding_v_head_dim": _SMALL,
    "sliding_q_lora_rank": _WIDTH, "sliding_kv_lora_rank": _WIDTH,
    "sliding_qk_nope_head_dim": _SMALL, "sliding_qk_rope_head_dim": _SMALL,
}  # fmt: skip
# Real numbers above 0, then those that may be 0.
NUMBERS = frozenset({
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "norm_eps", "swiglu_limit",
    "attn_logit_softcapping",
    "final_logit_softcapping", "clip_qkv", "query_pre_attn_scalar", "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier", "logits_scaling", "logits_multiplier", "routed_scaling_factor",
})  # fmt: skip
WEIGHTS = frozenset({
    "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "dropout",
    "attention_dropout", "hidden_dropout",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "residual_dropout", "embedding_dropout",
})  # fmt: skip
MAPPINGS = frozenset({"rope_scaling", "rope_parameters"})
BOOLEAN = frozenset({
    "tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "lm_head_bias",
    "attention_sinks",
    "parallel_residual", "norm_bias", "embedding_norm", "shared_expert_gate", "router_bias",
    "router_correction_bias",
    "expert_bias", "use_sliding_window", "use_qk_norm", "use_bias", "no_bias", "alibi",
    "norm_plus_one", "post_norm", "qk_l2_norm",
    "qk_norm_after_rope", "attn_temperature_tuning", "norm_topk_prob",
    "moe_apply_router_weight_on_input", "seq_aux", "attention_output_gate", "mamba_conv_bias",
    "mamba_proj_bias", "attention_gate_bias", "attention_head_gate", "norm_weight", "qk_norm_bias",
    "moe_output_norm", "linear_full_gates", "fused_query_gate", "k_rope_norm",
    "mamba_norm", "short_conv_bias", "attention_k_eq_v", "value_norm", "moe_branch_norms",
    "mtp_dense", "sliding_sinks", "use_double_wide_mlp", "moe_shortcut",
})  # fmt: skip
CHOICES = {
    "mlp": ("swiglu", "gelu", "squared-relu"), "norm": ("rmsnorm", "layernorm"),
    "qk_norm": ("none", "head", "full"),
    "position_embedding": ("rope", "learned", "none"),
}  # fmt: skip
TEXT = frozenset({"name", "base", "model_type", "hidden_act", "topk_method", "scoring_func"})
LAYER_LISTS = frozenset({
    "layer_types", "mixers", "mlp_only_layers", "mixer_only_layers", "dense_layers",
    "no_rope_layers", "rope_mask", "unread_keys", "left_out", "sliding_windows", "swiglu_limits",
})  # fmt: skip
ALIASES = {
    "n_embd": "hidden_size", "n_embed": "hidden_size", "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings", "max_seq_len": "max_position_embeddings",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts", "num_shared_experts": "n_shared_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok", "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "use_parallel_residual": "parallel_residual", "rms_norm_eps": "norm_eps",
    "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps", "norm_epsilon": "norm_eps", "layernorm_epsilon": "norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor", "aux_loss_alpha": "router_aux_loss_coef",
    "logit_scale": "logits_multiplier",
    "_sliding_window_pattern": "sliding_window_pattern",
}  # fmt: skip
# Keys of config.json that change nothing in the network; an inline mapping may have them too.
WITHOUT_BEARING = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "cache_implementation", "dtype",
    "eos_token_id", "ep_size",
    "initializer_range", "output_router_logits", "pad_token_id", "pretraining_tp",
    "qk_head_dim",
    "quantization_config", "rope_interleave",
    "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
# The same, but only a config.json may have them. `unread_keys` lists every other unknown key of a
# config.json.
_OF_A_FILE = frozenset({
    "_attn_implementation", "attention_softmax_in_fp32", "attn_config.attn_impl",
    "attn_implementation", "chunk_size_feed_forward", "embedding_fraction",
    "for_llm_compressor", "gradient_checkpointing", "id2label", "init_config", "init_device",
    "initial_context_length", "initializer_factor", "is_decoder", "label2id", "language",
    "learned_pos_emb", "masked_softmax_fusion", "mlp_type", "model_name", "norm_type",
    "num_labels", "offset_alibi", "output_attentions", "output_hidden_states", "problem_type",
    "return_dict", "sep_token_id", "seq_length", "skip_bias_add", "skip_bias_add_qkv",
    "sliding_window_size", "slow_but_exact", "summary_activation", "summary_first_dropout",
    "summary_proj_to_logits", "summary_type", "summary_use_proj", "task_specific_params",
    "text_config", "tokenizer_class", "tokenizer_name", "torchscript", "unk_token_id",
    "verbose", "vision_config",
})  # fmt: skip

_OF_ATTENTION = frozenset({"alibi", "clip_qkv", "rope_theta"})

CANONICAL = frozenset({
    *POSITIVE, *NOT_NEGATIVE, *NUMBERS, *WEIGHTS, *MAPPINGS, *BOOLEAN, *CHOICES, *TEXT,
    *LAYER_LISTS,
})  # fmt: skip
KNOWN = CANONICAL | ALIASES.keys() | WITHOUT_BEARING


@dataclass(frozen=True, slots=True)
class Keys:
    """Canonical keys with checked values, and the faults found.

    values: canonical key -> value; None where null was given.
    given_as: canonical key -> the name it was given by.
    """

    values: dict[str, object]
    given_as: dict[str, str]
    faults: list[Fault] = field(default_factory=list)


def read_keys(raw: Mapping[str, object], prefix: str, ignore_unknown: bool) -> Keys:
    """Canonical keys of one mapping.

    raw: keys as written.
    prefix: field of the mapping, such as "model".
    ignore_unknown: True for a config.json, whose unknown keys are listed in `unread_keys` where
        they are switched on; False for an inline mapping, where an unknown key is a fault that
        names the closest one.
    """
    keys = Keys({}, {})
    unread = []
    for key, value in _with_parts(raw).items():
        if not isinstance(key, str) or key not in KNOWN:
            if not ignore_unknown:
                keys.faults.append(_unknown_key(key, value, prefix))
            elif value and isinstance(key, str) and key not in _OF_A_FILE:
                unread.append(key[:MAX_NAME_LENGTH])
        elif key not in WITHOUT_BEARING:
            _add(keys, key, value, prefix)
    if unread:
        keys.values["unread_keys"] = sorted(unread)
    return keys


def _with_parts(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The keys with those of MPT's `attn_config` in place of it.

    A key of it that we do not know becomes `attn_config.key`.
    """
    part = raw.get("attn_config")
    if not isinstance(part, Mapping):
        return raw
    inner = {
        key if key in _OF_ATTENTION else f"attn_config.{key}": value for key, value in part.items()
    }
    return {**{key: value for key, value in raw.items() if key != "attn_config"}, **inner}


def _add(keys: Keys, key: str, value: object, prefix: str) -> None:
    canonical = ALIASES.get(key, key)
    if (
        canonical in keys.values
        and value is not None
        and keys.values[canonical] not in (None, value)
    ):
        # StarCoder2 and Gemma publish two that differ: the common name counts
        if canonical == "hidden_act":
            keys.values[canonical] = value if key == canonical else keys.values[canonical]
            return
        other = keys.given_as[canonical]
        rule = f"is another name of {other}, which says {keys.values[canonical]!r}"
        keys.faults.append(Fault(f"{prefix}.{key}", value, rule, f"give one of {key} and {other}"))
        return
    problem = None if value is None else check_value(canonical, value)
    if problem is not None:
        keys.faults.append(Fault(f"{prefix}.{key}", value, *problem))
    elif value is not None or keys.values.get(canonical) is None:
        keys.values[canonical] = value
    keys.given_as.setdefault(canonical, key)


def _unknown_key(key: object, value: object, prefix: str) -> Fault:
    close = difflib.get_close_matches(str(key), sorted(KNOWN - WITHOUT_BEARING), n=1, cutoff=0.5)
    remedy = (
        f"did you mean {close[0]}?"
        if close
        else "use the keys of a Hugging Face config.json, or base, name, mlp"
    )
    return Fault(f"{prefix}.{str(key)[:MAX_NAME_LENGTH]}", value, "no such model key", remedy)


def check_value(key: str, value: object) -> tuple[str, str] | None:
    """(rule, remedy) where `value` is not allowed for `key`; None where it is."""
    if key in POSITIVE or key in NOT_NEGATIVE:
        least, most = (1, POSITIVE[key]) if key in POSITIVE else (0, NOT_NEGATIVE[key])
        if isinstance(value, bool) or not isinstance(value, int):
            return (
                "must be a whole number",
                f"give {least} to {most} without quotes, point or exponent",
            )
        if not least <= value <= most:
            return (
                "must be positive" if key in POSITIVE else "must not be negative"
            ) if value < least else "is implausibly large", (f"give {least} to {most}")
        return None
    if key in NUMBERS or key in WEIGHTS:
        return _check_number(key, value)
    if key in MAPPINGS:
        return (
            None
            if isinstance(value, Mapping)
            else ("must be a mapping", "give it as in the model's config.json, or null")
        )
    if key in BOOLEAN:
        return (
            None
            if isinstance(value, bool)
            else ("must be true or false", "give true or false without quotes")
        )
    if key in CHOICES:
        options = CHOICES[key]
        return (
            None
            if value in options
            else (f"must be one of {', '.join(options)}", f"give {options[0]}")
        )
    if key in LAYER_LISTS:
        return _check_list(key, value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH:
        return "must be a text", f"give 1 to {MAX_NAME_LENGTH} characters"
    return None


def _check_number(key: str, value: object) -> tuple[str, str] | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, (int, float)) or not known or not math.isfinite(to_float(value)):
        return "must be a number", "give it without quotes"
    if value < 0 or (value == 0 and key in NUMBERS):
        return (
            "must be positive" if key in NUMBERS else "must not be negative"
        ), "give it as in the model's config.json"
    if key == "partial_rotary_factor" and value > 1:
        return "must be a fraction", "give more than 0 and at most 1"
    return None


def _check_list(key: str, value: object) -> tuple[str, str] | None:
    kind, what = (
        (str, "texts")
        if key in ("layer_types", "mixers", "unread_keys", "left_out")
        else ((int, float), "numbers")
        if key == "swiglu_limits"
        else (int, "layer numbers" if key != "sliding_windows" else "windows")
    )
    flags = key in ("no_rope_layers", "rope_mask")
    if isinstance(value, (list, tuple)) and all(
        isinstance(v, kind) and (flags or not isinstance(v, bool)) for v in value
    ):
        return None
    return f"must be a list of {what}", "see the model's config.json for an example"
