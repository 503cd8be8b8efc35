"""The keys by which a person or a config.json describes a model: their other names, kinds and bounds.

`read_keys` turns raw keys into canonical ones and collects every fault on the way. Canonical keys are Hugging Face's
most common names plus the fields of `ModelSpec`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.errors import Fault

MAX_NAME_LENGTH = 200
_TOKENS, _WIDTH, _SMALL = 2**31, 2**24, 2**16

# canonical key -> (least, most); sizes beyond `most` are taken for typing errors, not for models
POSITIVE = {
    "hidden_size": _WIDTH, "num_hidden_layers": _SMALL, "num_attention_heads": _SMALL, "num_key_value_heads": _SMALL,
    "head_dim": _SMALL, "intermediate_size": _WIDTH, "vocab_size": 2**28, "num_experts_per_tok": _SMALL,
    "moe_intermediate_size": _WIDTH, "moe_layer_freq": _SMALL, "decoder_sparse_step": _SMALL, "interleave_moe_layer_step": _SMALL,
    "intermediate_size_mlp": _WIDTH, "sliding_window_pattern": _SMALL, "attention_chunk_size": _TOKENS, "expansion_ratio": _SMALL,
    "max_position_embeddings": _TOKENS,
}  # fmt: skip
NOT_NEGATIVE = {
    "num_experts": _SMALL, "n_shared_experts": _SMALL, "shared_expert_intermediate_size": _WIDTH, "first_k_dense_replace": _SMALL,
    "kv_lora_rank": _WIDTH, "q_lora_rank": _WIDTH, "qk_nope_head_dim": _SMALL, "qk_rope_head_dim": _SMALL, "v_head_dim": _SMALL,
    "sliding_window": _TOKENS, "max_window_layers": _SMALL, "norms_per_layer": 8, "moe_layer_offset": _SMALL,
}  # fmt: skip
BOOLEAN = frozenset({
    "tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "lm_head_bias", "attention_sinks",
    "parallel_residual", "norm_bias", "embedding_norm", "shared_expert_gate", "router_bias", "router_correction_bias",
    "expert_bias", "use_sliding_window", "use_qk_norm", "use_bias", "no_bias",
})  # fmt: skip
CHOICES = {
    "mlp": ("swiglu", "gelu", "squared-relu"), "norm": ("rmsnorm", "layernorm"), "qk_norm": ("none", "head", "full"),
    "position_embedding": ("rope", "learned", "none"),
}  # fmt: skip
TEXT = frozenset({"name", "base", "model_type", "hidden_act", "topk_method"})
LAYER_LISTS = frozenset({"layer_types", "mlp_only_layers", "dense_layers"})
ALIASES = {
    "n_embd": "hidden_size", "n_embed": "hidden_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers", "n_head": "num_attention_heads", "n_heads": "num_attention_heads",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size", "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings", "max_seq_len": "max_position_embeddings", "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts", "num_shared_experts": "n_shared_experts", "experts_per_token": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok", "activation_function": "hidden_act", "hidden_activation": "hidden_act",
    "use_parallel_residual": "parallel_residual",
}  # fmt: skip
# keys of config.json without bearing on shapes: an inline mapping may carry them too
WITHOUT_BEARING = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "attn_logit_softcapping", "attn_pdrop", "auto_map", "aux_loss_alpha",
    "bos_token_id", "cache_implementation", "dtype", "embd_pdrop", "eos_token_id", "ep_size", "final_logit_softcapping", "hidden_dropout",
    "initializer_range", "layer_norm_eps", "layer_norm_epsilon", "n_group", "norm_topk_prob", "num_nextn_predict_layers",
    "original_max_position_embeddings", "output_router_logits", "pad_token_id", "partial_rotary_factor", "pretraining_tp",
    "quantization_config", "query_pre_attn_scalar", "resid_pdrop", "rms_norm_eps", "rope_interleave", "rope_parameters", "rope_scaling",
    "rope_theta", "rotary_emb_base", "rotary_pct", "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise",
    "scoring_func", "seq_aux", "swiglu_limit", "topk_group", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip

CANONICAL = frozenset({*POSITIVE, *NOT_NEGATIVE, *BOOLEAN, *CHOICES, *TEXT, *LAYER_LISTS})
KNOWN = CANONICAL | ALIASES.keys() | WITHOUT_BEARING


@dataclass(frozen=True, slots=True)
class Keys:
    """Canonical keys with checked values (None: given as null), the name each was given by, and the faults found."""

    values: dict[str, object]
    given_as: dict[str, str]
    faults: list[Fault] = field(default_factory=list)


def read_keys(raw: Mapping[str, object], prefix: str, ignore_unknown: bool) -> Keys:
    """Canonical keys of one mapping.

    raw: keys as written.  prefix: field of the mapping, "model".  ignore_unknown: true for a config.json, whose other
    keys are none of our business; false for an inline mapping, where an unknown key is a fault naming the closest one.
    """
    keys = Keys({}, {})
    for key, value in raw.items():
        if not isinstance(key, str) or key not in KNOWN:
            if not ignore_unknown:
                keys.faults.append(_unknown_key(key, value, prefix))
        elif key not in WITHOUT_BEARING:
            _add(keys, key, value, prefix)
    return keys


def _add(keys: Keys, key: str, value: object, prefix: str) -> None:
    canonical = ALIASES.get(key, key)
    if canonical in keys.values and value is not None and keys.values[canonical] not in (None, value):
        if canonical == "hidden_act":  # StarCoder2 and Gemma publish two that differ: the common name holds
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
    remedy = f"did you mean {close[0]}?" if close else "use the keys of a Hugging Face config.json, or base, name, mlp"
    return Fault(f"{prefix}.{str(key)[:MAX_NAME_LENGTH]}", value, "no such model key", remedy)


def check_value(key: str, value: object) -> tuple[str, str] | None:
    """(rule, remedy) when `value` cannot be what `key` says; None when it can."""
    if key in POSITIVE or key in NOT_NEGATIVE:
        least, most = (1, POSITIVE[key]) if key in POSITIVE else (0, NOT_NEGATIVE[key])
        if isinstance(value, bool) or not isinstance(value, int):
            return "must be a whole number", f"give {least} to {most} without quotes, point or exponent"
        if not least <= value <= most:
            return ("must be positive" if key in POSITIVE else "must not be negative") if value < least else "is implausibly large", (
                f"give {least} to {most}"
            )
        return None
    if key in BOOLEAN:
        return None if isinstance(value, bool) else ("must be true or false", "give true or false without quotes")
    if key in CHOICES:
        options = CHOICES[key]
        return None if value in options else (f"must be one of {', '.join(options)}", f"give {options[0]}")
    if key in LAYER_LISTS:
        return _check_list(key, value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH:
        return "must be a text", f"give 1 to {MAX_NAME_LENGTH} characters"
    return None


def _check_list(key: str, value: object) -> tuple[str, str] | None:
    kind, what = (str, "texts") if key == "layer_types" else (int, "layer numbers")
    if isinstance(value, (list, tuple)) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value):
        return None
    return f"must be a list of {what}", "see the model's config.json for an example"
