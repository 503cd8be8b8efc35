"""Numbers that each family's code fixes in a network, and its configuration class assumes.

`FIXED_BY_CODE` holds what a family's modeling code does whatever its config says.
`ASSUMED_BY_CLASS` holds what its configuration class assumes where a *published* config.json leaves
a key out. It does not complete an inline mapping: a key that a person did not write is unknown.
Sources: transformers, src/transformers/models/<model_type>/configuration_*.py and modeling_*.py;
the repositories of DeepSeek-V3 and Kimi-K2 for their own code; for other types that transformers
does not ship, the modeling file published beside the weights.
"""

from collections.abc import Mapping

Values = Mapping[str, object]

_ROPE: Values = {"rope_theta": 10_000.0}
_LAYERNORM: Values = {**_ROPE, "norm_eps": 1e-5}
_SILU: Values = {"norm_eps": 1e-5, "hidden_act": "silu"}
_LLAMA: Values = {**_ROPE, "norm_eps": 1e-6, "hidden_act": "silu"}
_ROPE_1E5: Values = {**_ROPE, **_SILU}
_SOFTMAX: Values = {"scoring_func": "softmax"}
_SIGMOID: Values = {"scoring_func": "sigmoid"}
_NOAUX: Values = {**_SIGMOID, "topk_method": "noaux_tc"}
_DIVIDED: Values = {"norm_topk_prob": True}
_WHOLE: Values = {"norm_topk_prob": False}
_AUX: Values = {"router_aux_loss_coef": 0.001}
# a softmax over the chosen logits equals one over all of them, divided by its sum
_CHOSEN: Values = {**_SOFTMAX, **_DIVIDED}
_PLUS_ONE: Values = {"norm_plus_one": True}
_SCALED: Values = {"embedding_multiplier": "sqrt(hidden_size)"}
_GEMMA: Values = {"norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_YARN_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_NOAUX_TYPES = (
    "deepseek_v3 kimi_k2 glm4_moe axk1 axk2 dots3_note_text hy_v4 deepseek_v32 glm_moe_dsa beam "
    "exaone_moe mimo_v2_flash glm4_moe_lite kolibri1 solar_open kimi_linear bailing_hybrid "
    "nemotron_h"
)
_CHOSEN_TYPES = (
    "mixtral gpt_oss dbrx ernie4_5_moe granitemoe granitemoeshared granitemoehybrid aria_text "
    "granitemoe_swa minimax"
)
_LLAMA_TYPES = "llama mistral ministral qwen2 qwen3 granite seed_oss qwen3_5_text qwen3_5_moe_text"


def _each(types: str, values: Values) -> Mapping[str, Values]:
    return dict.fromkeys(types.split(), values)


FIXED_BY_CODE: Mapping[str, Values] = {
    **_each(_NOAUX_TYPES, _NOAUX),
    **_each("afmoe laguna hy_v3", {**_NOAUX, **_DIVIDED}),
    **_each("step3p5 minimax_m3_vl_text", {**_NOAUX, **_DIVIDED, **_PLUS_ONE}),
    **_each(_CHOSEN_TYPES, _CHOSEN),
    **_each("qwen2_moe qwen3_moe olmoe bailing_moe deepseek mellum lara_mini", _SOFTMAX),
    **_each("longcat_flash jamba", {**_SOFTMAX, **_WHOLE}),
    **_each("flint lfm2_moe", _SIGMOID),
    **_each("gemma gemma2 gemma3_text vaultgemma", {**_PLUS_ONE, **_SCALED}),
    **_each("gemma4_text gemma4_unified_text", {**_CHOSEN, **_SCALED, "attention_multiplier": 1.0}),
    **_each("nemotron qwen3_5_text", _PLUS_ONE),
    **_each("olmo2 olmo3 exaone4", {"post_norm": True}),
    **_each("hunyuan_v1_dense nanochat", {"qk_norm_after_rope": True}),
    "llama4_text": {**_SIGMOID, **_WHOLE, "moe_apply_router_weight_on_input": True},
    "bloom": {"alibi": True},
    "flex_olmo": {**_SOFTMAX, "post_norm": True},
    "minimax_m2": {**_SIGMOID, **_DIVIDED},
    "phimoe": {"scoring_func": "sparsemixer"},
    "hunyuan_v1_moe": {**_CHOSEN, "qk_norm_after_rope": True},
    "dots1": {"topk_method": "noaux_tc"},
    "deepseek_v4": {"topk_method": "noaux_tc", **_DIVIDED},
    "gpt_neo": {"attention_multiplier": 1.0},
    "qwen3_next": {**_SOFTMAX, **_PLUS_ONE},
    "qwen3_5_moe_text": {**_CHOSEN, **_PLUS_ONE},
    "chatglm": {"hidden_act": "silu", "partial_rotary_factor": 0.5},
    "qwen": {"hidden_act": "silu"},
}
ASSUMED_BY_CLASS: Mapping[str, Values] = {
    **_each(_LLAMA_TYPES, _LLAMA),
    **_each("phi3 olmo2 olmo3 falcon_h1", _ROPE_1E5),
    **_each("qwen2_moe qwen3_moe", {**_LLAMA, **_AUX, **_WHOLE}),
    **_each("step3p5 lfm3", _SILU),
    **_each("mimo_v2_flash kimi_linear", {**_SILU, **_DIVIDED}),
    **_each("cohere cohere2", {**_ROPE_1E5, "logits_multiplier": 0.0625}),
    **_each("falcon olmo gptj codegen chatglm", _LAYERNORM),
    **_each("olmo_hybrid jamba", {**_SILU, "norm_eps": 1e-6}),
    **_each("mamba falcon_mamba mamba2 gpt_bigcode gpt_neo opt", {"norm_eps": 1e-5}),
    **_each("lfm2 minimax", {**_SILU, "rope_theta": 1e6}),
    **_each("persimmon glm glm4", {"partial_rotary_factor": 0.5}),
    **_each("baichuan internlm", _ROPE),
    "mixtral": {**_SILU, **_AUX, "rope_theta": 1e6},
    "gemma": {**_ROPE, **_GEMMA},
    "gemma2": {
        **_ROPE, **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
    "gemma3_text": {
        **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    },
    "gemma4_text": {**_GEMMA, "sliding_window": 512},
    "gemma4_unified_text": {**_GEMMA, "sliding_window": 1024},
    "deepseek_v2": {
        **_LLAMA, **_SOFTMAX, **_WHOLE, **_AUX, "topk_method": "greedy", "seq_aux": True,
    },
    "deepseek_v3": {
        **_LLAMA, **_DIVIDED, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    },
    "kimi_k2": {**_LLAMA, **_DIVIDED, "routed_scaling_factor": 2.5},
    "glm4_moe": {
        **_ROPE_1E5, **_DIVIDED, "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1,
    },
    "llama4_text": {
        **_SILU, **_AUX, "rope_theta": 500_000.0, "qk_l2_norm": True,
        "attn_temperature_tuning": True, "no_rope_layer_interval": 4,
    },
    "gpt_oss": {
        **_SILU, "rope_theta": 150_000.0, "rope_scaling": _YARN_GPT_OSS, "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
    },
    "gpt2": {"norm_eps": 1e-5, "hidden_act": "gelu_new", "dropout": 0.1},
    "gpt_neox": {**_LAYERNORM, "hidden_act": "gelu", "partial_rotary_factor": 0.25},
    "phi": {**_LAYERNORM, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "starcoder2": {**_LAYERNORM, "hidden_act": "gelu_pytorch_tanh"},
    "bloom": {"norm_eps": 1e-5, "hidden_act": "gelu_new"},
    "mpt": {"norm_eps": 1e-5, "hidden_act": "gelu", "alibi": True},
    "nemotron": {**_LAYERNORM, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "smollm3": {**_LLAMA, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    "longcat_flash": {**_SILU, "rope_theta": 1e7},
    "minimax_m3_vl_text": {**_LLAMA, "rope_theta": 5e6},
    "deepseek_v4": {
        "scoring_func": "sqrtsoftplus", "hidden_act": "silu", "norm_eps": 1e-6,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    },
    "dots3_note_text": {**_SILU, **_DIVIDED, "rope_theta": 8e7},
    "hy_v4": {**_SILU, "swiglu_limit": 10.0, "routed_scaling_factor": 2.827},
    "dbrx": {**_ROPE_1E5, "router_aux_loss_coef": 0.05},
    "olmoe": {**_LAYERNORM, **_WHOLE},
    "ernie4_5_moe": {"num_nextn_predict_layers": 0},
    "stablelm": {**_LAYERNORM, "partial_rotary_factor": 0.25},
    "qwen3_next": {**_LLAMA, **_DIVIDED},
    "bailing_hybrid": {**_LLAMA, **_DIVIDED, "rope_theta": 6e6},
    "lfm2_moe": {**_SILU, **_DIVIDED, "rope_theta": 1e6},
    "nemotron_h": {**_DIVIDED, "norm_eps": 1e-5},
    "bamba": {**_ROPE_1E5, "partial_rotary_factor": 0.5},
}  # fmt: skip
