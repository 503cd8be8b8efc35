"""How families whose layers differ in their mixer write their config.json."""

from collections.abc import Mapping

from planner.intake.huggingface import hybrid_readers as hybrid
from planner.intake.huggingface.dialect import Dialect

_TIME_STEPS = frozenset(
    {"time_step_floor", "time_step_limit", "time_step_max", "time_step_min", "time_step_rank"}
)
_NEMOTRON_INERT = frozenset(
    {
        "attention_bias",
        "expand",
        "mamba_hidden_act",
        "mamba_proj_bias",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_layers_block_type",
        "num_logits_to_keep",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "sliding_window",
        "use_mamba_kernels",
    }
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
            "conv_kernel": "mamba_d_conv",
            "n_groups": "mamba_n_groups",
            "chunk_size": "mamba_chunk_size",
            "use_conv_bias": "mamba_conv_bias",
            "use_bias": "mamba_proj_bias",
            "mlp_hidden_act": "hidden_act",
            "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        },
        inert=_NEMOTRON_INERT | _TIME_STEPS,
        prepare=hybrid.nemotron_h,
    ),
    "olmo_hybrid": Dialect(
        inert=frozenset(
            {
                "linear_a_log_max",
                "linear_a_log_min",
                "linear_allow_neg_eigval",
                "linear_dt_init_floor",
                "linear_dt_max",
                "linear_dt_min",
            }
        ),
        prepare=hybrid.olmo_hybrid,
    ),
    "kimi_linear": Dialect(
        renames={
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
            "num_expert_group": "n_group",
            "moe_renormalize": "norm_topk_prob",
            "moe_router_activation_func": "scoring_func",
            "model_max_length": "max_position_embeddings",
        },
        inert=frozenset({"head_dim", "mla_use_nope", "use_grouped_topk"}),
        prepare=hybrid.kimi_linear,
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        Dialect(
            inert=frozenset(
                {"head_dim", "indexer_rope_interleave", "qk_head_dim", "rope_interleave"}
            ),
            prepare=hybrid.indexed,
        ),
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini"),
        Dialect(prepare=hybrid.delta),
    ),
}
