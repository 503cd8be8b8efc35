"""Model families by Hugging Face `model_type`: what each family's code sets beyond its config.json.

`defaults` are canonical keys for what the config leaves out: the defaults of the family's
configuration class, and what its modeling code hard-wires. Source of every row: transformers,
src/transformers/models/<model_type>/ configuration_*.py and modeling_*.py. A new family whose
layers are of a known kind is one row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type.

    gated: its MLP has a gate whatever the activation.
    bias_on_output: `attention_bias` also applies to the output projection.
    expert_width_key, dense_width_key: the keys for the width of an expert and of a dense MLP.
    needs_experts: it is always MoE.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    gated: bool = True
    bias_on_output: bool = True
    expert_width_key: str = "moe_intermediate_size"
    dense_width_key: str = "intermediate_size"
    needs_experts: bool = False


_LAYERNORM_BIASED: dict[str, object] = {
    "norm": "layernorm", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu",
}  # fmt: skip
_GPT2 = {
    **_LAYERNORM_BIASED, "position_embedding": "learned", "tie_word_embeddings": True,
    "expansion_ratio": 4,
}  # fmt: skip
_BLOOM = {**_GPT2, "position_embedding": "none", "embedding_norm": True}
_MPT = {
    **_BLOOM, "attention_bias": False, "mlp_bias": False, "norm_bias": False,
    "embedding_norm": False,
}  # fmt: skip
_PHI = {**_LAYERNORM_BIASED, "parallel_residual": True, "norms_per_layer": 1, "lm_head_bias": True}
_GEMMA: dict[str, object] = {
    "tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA2 = {**_GEMMA, "norms_per_layer": 4, "sliding_window": 4096, "sliding_window_pattern": 2}
_GEMMA3 = {**_GEMMA2, "qk_norm": "head", "sliding_window_pattern": 6, "vocab_size": 262_208}
_GEMMA3 |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
_QWEN: dict[str, object] = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN2 = {**_QWEN, "attention_bias": True, "attention_output_bias": False}
_QWEN3 = {**_QWEN, "qk_norm": "head"}
_LLAMA4: dict[str, object] = {
    "n_shared_experts": 1, "interleave_moe_layer_step": 1, "qk_norm": "none",
}  # fmt: skip
_LLAMA4 |= {"attention_chunk_size": 8192, "sliding_window_pattern": 4}
_GPT_OSS: dict[str, object] = {
    "attention_sinks": True, "router_bias": True, "expert_bias": True, "attention_bias": True,
}  # fmt: skip
_GPT_OSS |= {"sliding_window_pattern": 2}
_COHERE: dict[str, object] = {
    "norm": "layernorm", "norm_bias": False, "norms_per_layer": 1, "parallel_residual": True,
}  # fmt: skip
_COHERE |= {"tie_word_embeddings": True}
_COHERE2 = {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4}
_FALCON: dict[str, object] = {
    "norm": "layernorm", "hidden_act": "gelu", "tie_word_embeddings": True, "expansion_ratio": 4,
}  # fmt: skip
_GPTJ = {**_PHI, "attention_bias": False, "expansion_ratio": 4}
_GPT_NEO = {**_GPT2, "attention_bias": False, "attention_output_bias": True, "sliding_window": 256}
_DELTA: dict[str, object] = {"qk_norm": "head", "linear_conv_kernel_dim": 4, "head_dim": 256}
_QWEN_DELTA = {**_DELTA, "attention_output_gate": True, "partial_rotary_factor": 0.25}
_GATED_SHARED: dict[str, object] = {"shared_expert_gate": True}
_TIED: dict[str, object] = {"tie_word_embeddings": True}
_QK_HEAD: dict[str, object] = {"qk_norm": "head"}
_QK_FULL: dict[str, object] = {"qk_norm": "full"}
_SINKS: dict[str, object] = {"attention_sinks": True}
_HEAD_GATE: dict[str, object] = {"attention_head_gate": True}
_GATE: dict[str, object] = {"attention_output_gate": True}
_BIASED_GATE = {**_GATE, "attention_gate_bias": True}
_GATED_LATENT = {**_GATE, "fused_query_gate": True, "gated_norm_rank": 16}
_IHC: dict[str, object] = {"hc_mult": 4, "hc_sinkhorn_iters": 0}
_MAMBA2: dict[str, object] = {"mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_chunk_size": 256}
_V4: dict[str, object] = {"hc_mult": 4, "num_hash_layers": 3, "n_shared_experts": 1}
_FOUR_NORMS: dict[str, object] = {"norms_per_layer": 4}
_LLAMAS = (
    "llama mistral ministral deepseek_v2 phi3 granite exaone chatglm internlm2 internlm3 baichuan "
    "qwen deepseek deepseek_v3 kimi_k2 helium hyperclovax minicpm3 bamba"
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_LLAMAS.split(), Family()),
    **dict.fromkeys(
        ("mixtral", "minimax_m2", "granitemoe", "granitemoeshared", "aria_text"),
        Family(expert_width_key="intermediate_size", needs_experts=True),
    ),
    **dict.fromkeys(
        ("olmoe", "flex_olmo"),
        Family(defaults=_QK_FULL, expert_width_key="intermediate_size", needs_experts=True),
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "bailing_moe", "bailing_moe_v2"),
        Family(needs_experts=True),
    ),
    **dict.fromkeys(
        ("dots1", "minimax_m3_vl_text", "exaone_moe", "hy_v3"),
        Family(defaults=_QK_HEAD, needs_experts=True),
    ),
    "qwen2": Family(defaults=_QWEN2),
    "qwen2_moe": Family(defaults={**_QWEN2, "shared_expert_gate": True}, needs_experts=True),
    "qwen3": Family(defaults=_QWEN3),
    "qwen3_moe": Family(defaults=_QWEN3, needs_experts=True),
    "gemma": Family(defaults=_GEMMA),
    "gemma2": Family(defaults=_GEMMA2),
    "gemma3_text": Family(defaults=_GEMMA3),
    "glm4_moe": Family(bias_on_output=False, needs_experts=True),
    "llama4_text": Family(
        defaults=_LLAMA4,
        expert_width_key="intermediate_size",
        dense_width_key="intermediate_size_mlp",
        needs_experts=True,
    ),
    "gpt_oss": Family(defaults=_GPT_OSS, expert_width_key="intermediate_size", needs_experts=True),
    "gpt2": Family(defaults=_GPT2, gated=False),
    "gpt_neox": Family(defaults={**_LAYERNORM_BIASED, "parallel_residual": True}, gated=False),
    "phi": Family(defaults=_PHI, gated=False),
    "starcoder2": Family(defaults={**_LAYERNORM_BIASED, "tie_word_embeddings": True}, gated=False),
    "bloom": Family(defaults=_BLOOM, gated=False),
    "mpt": Family(defaults=_MPT, gated=False),
    "nemotron": Family(defaults={"norm": "layernorm", "hidden_act": "relu2"}, gated=False),
    "olmo2": Family(defaults={"qk_norm": "full"}),
    "olmo3": Family(defaults={"qk_norm": "full", "sliding_window_pattern": 4}),
    "cohere": Family(defaults=_COHERE),
    "cohere2": Family(defaults=_COHERE2),
    "falcon": Family(defaults=_FALCON, gated=False),
    "dbrx": Family(defaults={"norm": "layernorm", "norm_bias": False}, needs_experts=True),
    "olmo": Family(defaults={"norm": "layernorm", "norm_bias": False, "norm_weight": False}),
    **dict.fromkeys(("ernie4_5", "smollm3", "youtu"), Family(defaults=_TIED)),
    "ernie4_5_moe": Family(defaults=_TIED, needs_experts=True),
    "granitemoehybrid": Family(expert_width_key="intermediate_size"),
    "stablelm": Family(defaults={"norm": "layernorm"}, bias_on_output=False),
    "gpt_bigcode": Family(defaults=_GPT2, gated=False),
    **dict.fromkeys(("gptj", "codegen"), Family(defaults=_GPTJ, gated=False)),
    "gpt_neo": Family(defaults=_GPT_NEO, gated=False),
    "opt": Family(defaults={**_GPT2, "hidden_act": "relu"}, gated=False),
    "exaone4": Family(defaults=_QK_HEAD),
    "hunyuan_v1_moe": Family(
        defaults={**_QK_HEAD, **_TIED}, expert_width_key="intermediate_size", needs_experts=True
    ),
    **dict.fromkeys(("glm", "seed_oss"), Family(bias_on_output=False)),
    "glm4": Family(defaults={"norms_per_layer": 4}, bias_on_output=False),
    "internlm": Family(defaults={"attention_bias": True}),
    "phimoe": Family(
        defaults={"norm": "layernorm"}, expert_width_key="intermediate_size", needs_experts=True
    ),
    "apertus": Family(defaults={**_QK_HEAD, "hidden_act": "xielu"}, gated=False),
    "arcee": Family(defaults={"hidden_act": "relu2"}, gated=False),
    "mimo": Family(defaults=_QWEN2),
    "persimmon": Family(
        defaults={**_LAYERNORM_BIASED, **_QK_HEAD, "qk_norm_bias": True, "hidden_act": "relu2"},
        gated=False,
    ),
    "afmoe": Family(
        defaults={**_QK_HEAD, **_FOUR_NORMS, "attention_output_gate": True}, needs_experts=True
    ),
    "axk1": Family(defaults={"moe_output_norm": True}, needs_experts=True),
    "axk2": Family(defaults=_GATED_LATENT, needs_experts=True),
    "dots3_note_text": Family(defaults={**_HEAD_GATE, "k_rope_norm": True}, needs_experts=True),
    "hy_v4": Family(defaults={**_SINKS, **_GATE, **_IHC}, needs_experts=True),
    "beam": Family(defaults={**_QK_HEAD, **_FOUR_NORMS, **_BIASED_GATE}, needs_experts=True),
    "biogpt": Family(defaults={**_GPT2, "embedding_norm": False}, gated=False),
    "cohere2_moe": Family(defaults=_COHERE2, needs_experts=True),
    **dict.fromkeys(
        ("step3p5", "laguna"), Family(defaults={**_QK_HEAD, **_HEAD_GATE}, needs_experts=True)
    ),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        Family(defaults={**_GEMMA, **_QK_HEAD, **_FOUR_NORMS, "value_norm": True}),
    ),
    "longcat_flash": Family(defaults={"router_correction_bias": True}, needs_experts=True),
    "mimo_v2_flash": Family(defaults={"sliding_sinks": True}, needs_experts=True),
    "deepseek_v4": Family(defaults={**_SINKS, **_V4}, needs_experts=True),
    "flint": Family(defaults={**_QK_HEAD, **_SINKS}, needs_experts=True),
    "granite_swa": Family(defaults=_SINKS),
    "granitemoe_swa": Family(
        defaults=_SINKS, expert_width_key="intermediate_size", needs_experts=True
    ),
    "jais2": Family(defaults={"norm": "layernorm", "hidden_act": "relu2"}, gated=False),
    "kolibri1": Family(defaults={**_QK_HEAD, **_FOUR_NORMS}, needs_experts=True),
    "mellum": Family(defaults=_QK_HEAD, needs_experts=True),
    "nanochat": Family(
        defaults={**_QK_HEAD, "norm_weight": False, "hidden_act": "relu2"}, gated=False
    ),
    "solar_open": Family(bias_on_output=False, needs_experts=True),
    "vaultgemma": Family(defaults={**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2}),
    "xglm": Family(defaults={**_BLOOM, "embedding_norm": False}, gated=False),
    "qwen3_next": Family(defaults={**_QWEN_DELTA, **_GATED_SHARED}, needs_experts=True),
    "qwen3_5_text": Family(defaults=_QWEN_DELTA),
    "qwen3_5_moe_text": Family(defaults={**_QWEN_DELTA, **_GATED_SHARED}, needs_experts=True),
    "olmo_hybrid": Family(defaults={"qk_norm": "full", "linear_conv_kernel_dim": 4}),
    "lara_mini": Family(defaults={**_DELTA, **_TIED}, needs_experts=True),
    "kimi_linear": Family(defaults={"position_embedding": "none"}, needs_experts=True),
    "bailing_hybrid": Family(
        defaults={**_HEAD_GATE, "linear_full_gates": True}, needs_experts=True
    ),
    "nemotron_h": Family(
        defaults={"position_embedding": "none", "hidden_act": "relu2"}, gated=False
    ),
    "jamba": Family(
        defaults={"position_embedding": "none", "mamba_conv_bias": True, "mamba_d_conv": 4},
        expert_width_key="intermediate_size",
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        Family(defaults={**_MAMBA2, **_TIED, "position_embedding": "none"}),
    ),
    "mamba2": Family(defaults={**_MAMBA2, "position_embedding": "none", "mamba_n_groups": 8}),
    "falcon_h1": Family(defaults={**_MAMBA2, "mamba_norm": False, "mamba_n_groups": 1}),
    **dict.fromkeys(("hunyuan_v1_dense", "lfm2", "lfm3"), Family(defaults={**_QK_HEAD, **_TIED})),
    "lfm2_moe": Family(defaults={**_QK_HEAD, **_TIED}, needs_experts=True),
    "minimax": Family(
        defaults={"lightning_block_size": 256},
        expert_width_key="intermediate_size",
        needs_experts=True,
    ),
}
# Model types that have the same language model as another type.
SAME_NETWORK: Mapping[str, str] = {
    "code_llama": "llama", "Yi": "llama", "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe", "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe",
    "phi3_v": "phi3", "hunyuan": "hunyuan_v1_moe", "apertus1p5_text": "apertus", "cwm": "llama",
    "emu3_text_model": "llama", "gpt-sw3": "gpt2", "iquestcoder": "llama", "ministral3": "mistral",
    "minimax_text_01": "minimax", "minimax_m1": "minimax", "dots3_note": "dots3_note_text",
    "sarvam_mla": "deepseek_v3", "sarvam_moe": "glm4_moe",
}  # fmt: skip

# A multimodal config has its language model under `text_config`. This is the type to assume where
# that part names none.
TEXT_PARTS = {
    "gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral", "llava": "llama",
    "kimi_vl": "deepseek_v3", "kimi_k25": "kimi_k2", "llava_next": "llama",
    "llava_onevision": "qwen2", "paligemma": "gemma", "aya_vision": "cohere2",
    "cohere2_vision": "cohere2", "idefics3": "llama", "smolvlm": "llama", "internvl": "qwen2",
    "emu3": "llama", "aria": "aria_text", "apertus1p5": "apertus", "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "dots3_note": "dots3_note_text", "glm4v": "glm4", "glm4v_moe": "glm4_moe", "step3p7": "step3p5",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "minimax_m3_vl": "minimax_m3_vl_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# Defaults of configuration classes, which a text_config leaves out. A config.json of the language
# model alone writes them all.
_LLAMA_CLASS: dict[str, object] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip
_QWEN2_CLASS = {
    **_LLAMA_CLASS, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151_936,
}  # fmt: skip
_GLM4_CLASS = {
    **_LLAMA_CLASS, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "vocab_size": 151_552, "attention_bias": True,
}  # fmt: skip
_GEMMA_CLASS = {
    **_LLAMA_CLASS, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16,
}  # fmt: skip
CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": _LLAMA_CLASS,
    "mistral": {**_LLAMA_CLASS, "intermediate_size": 14336, "num_key_value_heads": 8,
        "sliding_window": 4096},
    "qwen2": _QWEN2_CLASS,
    "qwen3": {**_QWEN2_CLASS, "head_dim": 128},
    "gemma": {**_GEMMA_CLASS, "num_key_value_heads": 16, "vocab_size": 256_000},
    "cohere2": {
        **_LLAMA_CLASS, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "vocab_size": 256_000,
    },
    "glm4": _GLM4_CLASS,
    "gemma4_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_144,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    },
}  # fmt: skip


def generic_family(mlp: str) -> Family:
    """Family of an inline mapping without model_type.

    swiglu: as Llama (RMSNorm, no biases, RoPE).
    gelu: as GPT-3 (LayerNorm and biases on every projection).
    squared-relu: as Nemotron-4 (LayerNorm, no other biases).
    Positions are RoPE unless `position_embedding: learned` and `max_position_embeddings` are given:
    the size of a table is not guessed. Experts are as wide as `moe_intermediate_size`, else as
    `intermediate_size`. A gelu MLP without a width is 4 hidden sizes wide, as in GPT-2.
    """
    if mlp == "swiglu":
        return Family(expert_width_key="intermediate_size")
    if mlp == "gelu":
        return Family(
            gated=False,
            expert_width_key="intermediate_size",
            defaults={**_LAYERNORM_BIASED, "expansion_ratio": 4},
        )
    return Family(gated=False, expert_width_key="intermediate_size", defaults={"norm": "layernorm"})
