"""Model families by Hugging Face `model_type`: what each one's code fixes beyond its config.json.

`defaults` are canonical keys used where the config says nothing (the defaults of the family's configuration class and
what its modeling code hard-wires). Source of every row: transformers, src/transformers/models/<model_type>/
configuration_*.py and modeling_*.py. A new family whose layers are of a known kind is one row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type.

    gated: its MLP has a gate whatever the activation.  bias_on_output: `attention_bias` also means the output projection.
    expert_width_key, dense_width_key: where the width of an expert and of a dense MLP stands.  needs_experts: always MoE.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    gated: bool = True
    bias_on_output: bool = True
    expert_width_key: str = "moe_intermediate_size"
    dense_width_key: str = "intermediate_size"
    needs_experts: bool = False


_LAYERNORM_BIASED: dict[str, object] = {"norm": "layernorm", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
_GPT2 = {**_LAYERNORM_BIASED, "position_embedding": "learned", "tie_word_embeddings": True, "expansion_ratio": 4}
_BLOOM = {**_GPT2, "position_embedding": "none", "embedding_norm": True}
_MPT = {**_BLOOM, "attention_bias": False, "mlp_bias": False, "norm_bias": False, "embedding_norm": False}
_PHI = {**_LAYERNORM_BIASED, "parallel_residual": True, "norms_per_layer": 1, "lm_head_bias": True}
_GEMMA: dict[str, object] = {"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 = {**_GEMMA, "norms_per_layer": 4, "sliding_window": 4096, "sliding_window_pattern": 2}
_GEMMA3 = {**_GEMMA2, "qk_norm": "head", "sliding_window_pattern": 6, "vocab_size": 262_208}
_GEMMA3 |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
_QWEN: dict[str, object] = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN2 = {**_QWEN, "attention_bias": True, "attention_output_bias": False}
_QWEN3 = {**_QWEN, "qk_norm": "head"}
_LLAMA4: dict[str, object] = {"n_shared_experts": 1, "interleave_moe_layer_step": 1, "qk_norm": "none"}
_LLAMA4 |= {"attention_chunk_size": 8192, "sliding_window_pattern": 4}
_GPT_OSS: dict[str, object] = {"attention_sinks": True, "router_bias": True, "expert_bias": True, "attention_bias": True}
_GPT_OSS |= {"sliding_window_pattern": 2}
_NO_AUX: dict[str, object] = {"topk_method": "noaux_tc"}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "mixtral": Family(expert_width_key="intermediate_size", needs_experts=True),
    "qwen2": Family(defaults=_QWEN2),
    "qwen2_moe": Family(defaults={**_QWEN2, "shared_expert_gate": True}, needs_experts=True),
    "qwen3": Family(defaults=_QWEN3),
    "qwen3_moe": Family(defaults=_QWEN3, needs_experts=True),
    "gemma": Family(defaults=_GEMMA),
    "gemma2": Family(defaults=_GEMMA2),
    "gemma3_text": Family(defaults=_GEMMA3),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(defaults=_NO_AUX),
    "kimi_k2": Family(defaults=_NO_AUX),
    "glm4_moe": Family(defaults=_NO_AUX, bias_on_output=False, needs_experts=True),
    "llama4_text": Family(
        defaults=_LLAMA4, expert_width_key="intermediate_size", dense_width_key="intermediate_size_mlp", needs_experts=True
    ),
    "gpt_oss": Family(defaults=_GPT_OSS, expert_width_key="intermediate_size", needs_experts=True),
    "gpt2": Family(defaults=_GPT2, gated=False),
    "gpt_neox": Family(defaults={**_LAYERNORM_BIASED, "parallel_residual": True}, gated=False),
    "phi": Family(defaults=_PHI, gated=False),
    "phi3": Family(),
    "starcoder2": Family(defaults={**_LAYERNORM_BIASED, "tie_word_embeddings": True}, gated=False),
    "bloom": Family(defaults=_BLOOM, gated=False),
    "mpt": Family(defaults=_MPT, gated=False),
    "nemotron": Family(defaults={"norm": "layernorm", "hidden_act": "relu2"}, gated=False),
    "olmo2": Family(defaults={"qk_norm": "full"}),
    "olmo3": Family(defaults={"qk_norm": "full", "sliding_window_pattern": 4}),
    "granite": Family(),
    "seed_oss": Family(bias_on_output=False),
    "smollm3": Family(defaults={"tie_word_embeddings": True}),
}

# a multimodal config holds the language model under `text_config`; the type to assume where that part names none
TEXT_PARTS = {
    "gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral", "llava": "llama",
    "kimi_vl": "deepseek_v3", "kimi_k25": "kimi_k2",
}  # fmt: skip


def generic_family(mlp: str) -> Family:
    """Family of an inline mapping without model_type.

    swiglu: as Llama (RMSNorm, no biases, RoPE).  gelu: as GPT-3 (LayerNorm and biases on every projection).
    squared-relu: as Nemotron-4 (LayerNorm, no other biases). Positions are RoPE unless `position_embedding: learned`
    and `max_position_embeddings` say otherwise: the size of a table is not guessed. Experts are as wide as
    `moe_intermediate_size`, else as `intermediate_size`; a gelu MLP without a width is 4 hidden sizes wide, as GPT-2's.
    """
    if mlp == "swiglu":
        return Family(expert_width_key="intermediate_size")
    if mlp == "gelu":
        return Family(gated=False, expert_width_key="intermediate_size", defaults={**_LAYERNORM_BIASED, "expansion_ratio": 4})
    return Family(gated=False, expert_width_key="intermediate_size", defaults={"norm": "layernorm"})
