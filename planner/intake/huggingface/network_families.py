"""What the code of the families in `dialects` fixes in a network, and what their classes assume.

These are the same two tables as in `network_keys`, which joins them. Sources: transformers,
src/transformers/models/<model_type>/configuration_*.py and modeling_*.py; for types that
transformers does not ship, the modeling file published beside the weights.
"""

from collections.abc import Mapping

Values = Mapping[str, object]

_ROPE: Values = {"rope_theta": 10_000.0}
_LAYERNORM: Values = {**_ROPE, "norm_eps": 1e-5}
_SILU: Values = {"norm_eps": 1e-5, "hidden_act": "silu"}
_SOFTMAX: Values = {"scoring_func": "softmax"}
_NOAUX: Values = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_CHOSEN: Values = {**_SOFTMAX, "norm_topk_prob": True}
_CHATGLM: Values = {"hidden_act": "silu", "partial_rotary_factor": 0.5}

_GEMMA4: Values = {
    **_CHOSEN,
    "embedding_multiplier": "sqrt(hidden_size)",
    "attention_multiplier": 1.0,
}
_GEMMA4_CLASS: Values = {"norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}

FIXED_BY_CODE: Mapping[str, Values] = {
    "olmoe": _SOFTMAX,
    "flex_olmo": {**_SOFTMAX, "post_norm": True},
    "dbrx": _CHOSEN,
    "ernie4_5_moe": _CHOSEN,
    "minimax_m2": {"scoring_func": "sigmoid", "norm_topk_prob": True},
    "granitemoe": _CHOSEN,
    "granitemoeshared": _CHOSEN,
    "granitemoehybrid": _CHOSEN,
    "phimoe": {"scoring_func": "sparsemixer"},
    "exaone4": {"post_norm": True},
    "hunyuan_v1_dense": {"qk_norm_after_rope": True},
    "hunyuan_v1_moe": {**_CHOSEN, "qk_norm_after_rope": True},
    "bailing_moe": _SOFTMAX,
    "dots1": {"topk_method": "noaux_tc"},
    "deepseek": _SOFTMAX,
    "afmoe": {**_NOAUX, "norm_topk_prob": True},
    "aria_text": _CHOSEN,
    **dict.fromkeys(("axk1", "axk2", "dots3_note_text", "hy_v4"), _NOAUX),
    "deepseek_v32": _NOAUX,
    "glm_moe_dsa": _NOAUX,
    "beam": _NOAUX,
    "laguna": {**_NOAUX, "norm_topk_prob": True},
    "nanochat": {"qk_norm_after_rope": True},
    "exaone_moe": _NOAUX,
    "deepseek_v4": {"topk_method": "noaux_tc", "norm_topk_prob": True},
    "step3p5": {**_NOAUX, "norm_topk_prob": True, "norm_plus_one": True},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "longcat_flash": {**_SOFTMAX, "norm_topk_prob": False},
    "minimax_m3_vl_text": {**_NOAUX, "norm_topk_prob": True, "norm_plus_one": True},
    "mimo_v2_flash": _NOAUX,
    "flint": {"scoring_func": "sigmoid"},
    "glm4_moe_lite": _NOAUX,
    "granitemoe_swa": _CHOSEN,
    "hy_v3": {**_NOAUX, "norm_topk_prob": True},
    "kolibri1": _NOAUX,
    "mellum": _SOFTMAX,
    "solar_open": _NOAUX,
    "vaultgemma": {"norm_plus_one": True, "embedding_multiplier": "sqrt(hidden_size)"},
    "gpt_neo": {"attention_multiplier": 1.0},
    "qwen3_next": {**_SOFTMAX, "norm_plus_one": True},
    "qwen3_5_text": {"norm_plus_one": True},
    "qwen3_5_moe_text": {**_CHOSEN, "norm_plus_one": True},
    "lara_mini": _SOFTMAX,
    "kimi_linear": _NOAUX,
    "bailing_hybrid": _NOAUX,
    "nemotron_h": _NOAUX,
    "jamba": {**_SOFTMAX, "norm_topk_prob": False},
    "lfm2_moe": {"scoring_func": "sigmoid"},
    "minimax": _CHOSEN,
    "chatglm": _CHATGLM,
    "qwen": {"hidden_act": "silu"},
}
ASSUMED_BY_CLASS: Mapping[str, Values] = {
    "step3p5": _SILU,
    "gemma4_text": {**_GEMMA4_CLASS, "sliding_window": 512},
    "gemma4_unified_text": {**_GEMMA4_CLASS, "sliding_window": 1024},
    "longcat_flash": {**_SILU, "rope_theta": 1e7},
    "minimax_m3_vl_text": {**_SILU, "norm_eps": 1e-6, "rope_theta": 5e6},
    "deepseek_v4": {
        "scoring_func": "sqrtsoftplus",
        "hidden_act": "silu",
        "norm_eps": 1e-6,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    },
    "dots3_note_text": {**_SILU, "rope_theta": 8e7, "norm_topk_prob": True},
    "hy_v4": {**_SILU, "swiglu_limit": 10.0, "routed_scaling_factor": 2.827},
    "mimo_v2_flash": {**_SILU, "norm_topk_prob": True},
    "cohere": {**_LAYERNORM, "hidden_act": "silu", "logits_multiplier": 0.0625},
    "cohere2": {**_LAYERNORM, "hidden_act": "silu", "logits_multiplier": 0.0625},
    "falcon": _LAYERNORM,
    "dbrx": {**_LAYERNORM, "hidden_act": "silu", "router_aux_loss_coef": 0.05},
    "olmo": _LAYERNORM,
    "olmoe": {**_LAYERNORM, "norm_topk_prob": False},
    "ernie4_5_moe": {"num_nextn_predict_layers": 0},
    "stablelm": {**_LAYERNORM, "partial_rotary_factor": 0.25},
    "qwen3_next": {**_ROPE, "norm_eps": 1e-6, "hidden_act": "silu", "norm_topk_prob": True},
    "qwen3_5_text": {**_ROPE, "norm_eps": 1e-6, "hidden_act": "silu"},
    "qwen3_5_moe_text": {**_ROPE, "norm_eps": 1e-6, "hidden_act": "silu"},
    "olmo_hybrid": {"norm_eps": 1e-6, "hidden_act": "silu"},
    "kimi_linear": {"norm_eps": 1e-5, "hidden_act": "silu", "norm_topk_prob": True},
    "bailing_hybrid": {**_SILU, "rope_theta": 6e6, "norm_eps": 1e-6, "norm_topk_prob": True},
    "mamba": {"norm_eps": 1e-5},
    "falcon_mamba": {"norm_eps": 1e-5},
    "mamba2": {"norm_eps": 1e-5},
    "jamba": {"norm_eps": 1e-6, "hidden_act": "silu"},
    "falcon_h1": {**_SILU, **_ROPE},
    "lfm2": {**_SILU, "rope_theta": 1e6},
    "lfm2_moe": {**_SILU, "rope_theta": 1e6, "norm_topk_prob": True},
    "lfm3": _SILU,
    "minimax": {**_SILU, "rope_theta": 1e6},
    "nemotron_h": {"norm_eps": 1e-5, "norm_topk_prob": True},
    "bamba": {**_ROPE, "norm_eps": 1e-5, "hidden_act": "silu", "partial_rotary_factor": 0.5},
    "gpt_bigcode": {"norm_eps": 1e-5},
    "gptj": _LAYERNORM,
    "codegen": _LAYERNORM,
    "gpt_neo": {"norm_eps": 1e-5},
    "opt": {"norm_eps": 1e-5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "baichuan": _ROPE,
    "internlm": _ROPE,
    "chatglm": {**_ROPE, "norm_eps": 1e-5},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
}
