"""How families whose layers differ in their mixer write their config.json."""

from collections.abc import Mapping
from functools import partial

from planner.intake.huggingface import hybrid_readers as hybrid
from planner.intake.huggingface.dialect import Dialect, pairs, switch, words

_TIME_STEPS = frozenset(
    {"time_step_floor", "time_step_limit", "time_step_max", "time_step_min", "time_step_rank"}
)
_NEMOTRON_INERT = frozenset({
    "attention_bias", "expand", "mamba_hidden_act", "mamba_proj_bias", "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap", "mtp_layers_block_type", "num_logits_to_keep",
    "rescale_prenorm_residual", "residual_in_fp32", "sliding_window", "use_mamba_kernels",
})  # fmt: skip
_KIMI = {
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func", "model_max_length": "max_position_embeddings",
}  # fmt: skip
_MAMBA = {
    "conv_kernel": "mamba_d_conv", "n_groups": "mamba_n_groups", "chunk_size": "mamba_chunk_size",
    "use_conv_bias": "mamba_conv_bias", "use_bias": "mamba_proj_bias",
}  # fmt: skip
_LFM = {"conv_L_cache": "linear_conv_kernel_dim", "conv_bias": "short_conv_bias"}
_LFM |= {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
_LFM_INERT = words(
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
    "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc"
)
_FALCON_MULTIPLIERS = frozenset({
    "attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "layers_block_type",
    "mamba_norm_before_gate", "mamba_use_mlp", "mlp_expansion_factor", "mlp_multipliers",
    "num_logits_to_keep", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier",
})  # fmt: skip

_OLMO_HYBRID_INERT = frozenset({
    "linear_a_log_max", "linear_a_log_min", "linear_allow_neg_eigval", "linear_dt_init_floor",
    "linear_dt_max", "linear_dt_min",
})  # fmt: skip
_MAMBA1_INERT = frozenset({
    "mixer_rms_eps", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32",
    "time_step_init_scheme", "time_step_scale", "use_associative_scan", "use_falcon_mamba_norms",
    "use_mamba_kernels", "use_mambapy", "mamba_inner_layernorms", "n_ctx",
    "calc_logits_for_entire_prompt", "layer_types", "layers_block_type", "layers_num_experts",
})  # fmt: skip
_MINIMAX_INERT = frozenset({
    "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
    "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor", "postnorm",
    "layernorm_full_attention_alpha", "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha", "layernorm_mlp_beta", "shared_moe_mode",
})  # fmt: skip
_INDEXED_INERT = frozenset(
    {"head_dim", "indexer_rope_interleave", "qk_head_dim", "rope_interleave"}
)

HYBRIDS: Mapping[str, Dialect] = {
    "granitemoehybrid": Dialect(
        renames={
            "shared_intermediate_size": "shared_expert_intermediate_size",
            **hybrid.MAMBA_KEYS,
        },
        inert=frozenset({"normalization_function"}) | _TIME_STEPS,
        prepare=hybrid.granite_hybrid,
    ),
    "bamba": Dialect(
        renames=hybrid.MAMBA_KEYS,
        inert=frozenset({"num_logits_to_keep", "z_loss_coefficient"}) | _TIME_STEPS,
        prepare=hybrid.bamba,
    ),
    "nemotron_h": Dialect(
        renames={
            **_MAMBA,
            "mlp_hidden_act": "hidden_act",
            "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        },
        inert=_NEMOTRON_INERT | _TIME_STEPS,
        prepare=hybrid.nemotron_h,
    ),
    "olmo_hybrid": Dialect(inert=_OLMO_HYBRID_INERT, prepare=hybrid.olmo_hybrid),
    "kimi_linear": Dialect(
        renames=_KIMI,
        inert=frozenset({"head_dim", "mla_use_nope", "use_grouped_topk"}),
        prepare=hybrid.kimi_linear,
    ),
    "bailing_hybrid": Dialect(
        renames={**_KIMI, "num_mtp_layers": "num_nextn_predict_layers"},
        inert=frozenset({"kda_lower_bound", "kda_safe_gate", "mtp_loss_scaling_factor"}),
        prepare=hybrid.bailing_hybrid,
    ),
    "mamba2": Dialect(
        renames={
            **_MAMBA,
            **pairs("num_heads=mamba_num_heads head_dim=mamba_head_dim state_size=ssm_state_size"),
        },
        inert=frozenset({"expand", "rescale_prenorm_residual", "residual_in_fp32"}) | _TIME_STEPS,
        prepare=hybrid.only_mamba,
    ),
    "jamba": Dialect(
        renames={
            **hybrid.MAMBA_KEYS,
            "expert_layer_period": "moe_layer_freq",
            "expert_layer_offset": "moe_layer_offset",
        },
        inert=_MAMBA1_INERT,
        prepare=hybrid.mamba1,
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        Dialect(
            renames={
                **_MAMBA,
                **pairs(
                    "state_size=ssm_state_size expand=mamba_expand intermediate_size=mamba_width "
                    "time_step_rank=mamba_dt_rank"
                ),
            },
            inert=_MAMBA1_INERT | (_TIME_STEPS - {"time_step_rank"}),
            prepare=hybrid.mamba1,
        ),
    ),
    "falcon_h1": Dialect(
        renames={
            **hybrid.MAMBA_KEYS,
            "mamba_rms_norm": "mamba_norm",
            "lm_head_multiplier": "logits_multiplier",
        },
        inert=_FALCON_MULTIPLIERS | _TIME_STEPS,
        prepare=hybrid.falcon_h1,
    ),
    "lfm2": Dialect(renames=_LFM, inert=_LFM_INERT, prepare=hybrid.short_conv),
    "lfm2_moe": Dialect(
        renames={
            **_LFM,
            "num_dense_layers": "first_k_dense_replace",
            "use_expert_bias": "router_correction_bias",
        },
        prepare=hybrid.short_conv,
    ),
    "lfm3": Dialect(
        renames=_LFM,
        switches={
            "use_sandwich_norm": (True, {"norms_per_layer": 4}, {"norms_per_layer": 2}),
            "use_attention_gate": switch(True, "attention_head_gate"),
        },
        prepare=hybrid.short_conv,
    ),
    "minimax": Dialect(
        renames={"block_size": "lightning_block_size"},
        inert=_MINIMAX_INERT,
        prepare=hybrid.lightning,
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "axk2"),
        Dialect(inert=_INDEXED_INERT, prepare=hybrid.indexed),
    ),
    "hy_v4": Dialect(
        inert=_INDEXED_INERT | {"hc_eps", "hc_magnitude", "learnable_sink_init"},
        prepare=partial(hybrid.indexed, every=4),
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini"),
        Dialect(prepare=hybrid.delta),
    ),
}
