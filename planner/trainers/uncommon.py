"""Parts that few models have, in the words of every trainer's messages."""

from collections.abc import Mapping

from planner.specs.model import ModelSpec

# A model has it where the field of this name is not what it is by default.
WORDS: Mapping[str, str] = {
    "alibi": "ALiBi",
    "attention_multiplier": "its own scale of attention scores",
    "attn_logit_softcapping": "soft cap on attention scores",
    "attn_temperature_tuning": "attention temperature",
    "clip_qkv": "clamped queries, keys and values",
    "embedding_multiplier": "scaled embedding",
    "final_logit_softcapping": "soft cap on logits",
    "logits_multiplier": "scaled logits",
    "post_norm": "norms after attention and MLP",
    "qk_l2_norm": "query-key norm without weights",
    "qk_norm_after_rope": "query-key norm after RoPE",
    "residual_multiplier": "scaled residual",
    "rope_mask": "layers without RoPE",
    "swiglu_limit": "clamped SwiGLU",
    "swiglu_limits": "clamped SwiGLU in some layers",
}


def uncommon(model: ModelSpec, *fields: str) -> list[tuple[str, str]]:
    """(field, its words) for every field here in which the model is no ordinary one."""
    usual = ModelSpec.model_fields
    return [(one, WORDS[one]) for one in fields if getattr(model, one) != usual[one].default]


def other_rope_base(model: ModelSpec) -> bool:
    """Whether layers with a window rotate by another base than those without."""
    local = model.rope_local_base_freq
    return local not in (None, model.rope_theta) and bool(model.sliding_mask)
