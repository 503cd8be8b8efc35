"""How each family writes its config.json: other key names, nested parts, and who reads the rest.

A config with a block that we cannot express is refused, and the message names the block
(`missing_blocks`): a wrong count is worse than none. A family that uses Hugging Face's common keys
needs no row here, only one in `families`.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.intake.huggingface import dialect_readers as read
from planner.intake.huggingface.dialect import (
    Dialect,
    MissingBlock,
    dense_at,
    pairs,
    switch,
    switched,
    without,
    words,
)
from planner.intake.huggingface.families import SAME_NETWORK
from planner.intake.huggingface.hybrid_dialects import HYBRIDS
from planner.intake.huggingface.layer_readers import BY_LAYER
from planner.intake.huggingface.missing_blocks import check_blocks, missing

_ERNIE_MOE_INERT = words(
    "moe_capacity moe_gate moe_norm_min moe_gate_act moe_aux_loss_lambda moe_z_loss_lambda "
    "moe_dropout_prob moe_orthogonal_loss_lambda moe_use_hard_gate "
    "moe_multimodal_dispatch_use_allgather moe_all_to_all_dropout moe_group moe_norm_gate_logits"
)
_ERNIE_MOE = Dialect(
    renames=pairs(
        "moe_num_experts=num_experts moe_k=num_experts_per_tok "
        "moe_num_shared_experts=n_shared_experts"
    ),
    inert=_ERNIE_MOE_INERT,
    switches={"moe_use_aux_free": switch(True, "router_correction_bias")},
    prepare=read.ernie_moe,
)
_COHERE_INERT = frozenset({
    "model_max_length", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block", "use_parallel_embedding", "layer_switch",
    "order_of_interleaved_layers",
})  # fmt: skip
# query-key norms of Command R+ have separate weights for every head
_COHERE = Dialect(
    inert=_COHERE_INERT, switches={"use_qk_norm": (False, {"qk_norm": "full"}, {"qk_norm": "none"})}
)
_BIASES = ("attention_bias", "attention_output_bias", "mlp_bias")
_BAILING_INERT = words(
    "norm_head norm_softmax embedding_dropout output_dropout router_dtype use_rmsnorm"
)
_BAILING = Dialect(
    renames={
        "num_shared_experts": "n_shared_experts",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "score_function": "scoring_func",
    },
    inert=_BAILING_INERT,
    switches={
        "use_bias": switch(False, *_BIASES),
        "use_qkv_bias": (False, {"attention_bias": True}, {}),
        "use_qk_norm": (False, {"qk_norm": "head"}, {"qk_norm": "none"}),
        "moe_router_enable_expert_bias": switch(False, "router_correction_bias"),
    },
)
_HUNYUAN = pairs(
    "num_shared_expert=n_shared_experts moe_topk=num_experts_per_tok attention_head_dim=head_dim"
)
_HUNYUAN_INERT = words(
    "add_classification_head anyres_pooling_size class_num dense_list eod_token_id im_end_id "
    "im_newline_id im_start_id image_token_id mask_init_id max_image_size moe_drop_tokens "
    "moe_random_routing_dropped_token pool_type q_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim use_rotary_pos_emb sep_token_id org_vocab_size text_end_id text_start_id "
    "video_end_id video_start_id vit_input_resolution vit_mapping_type vit_norm_type vit_patch "
    "vit_path vit_remove_prenorm vit_token vit_type vit_used_rms_norm vit_add_patchemb_bias "
    "group_limited_greedy n_group topk_group xdrope_section use_cla cla_share_factor use_qk_norm "
    "kv_lora_rank norm_type use_mixed_mlp_moe"
)

_DBRX_INERT = frozenset({
    "moe_jitter_eps", "moe_loss_weight", "emb_pdrop", "attn_pdrop",
    "moe_normalize_expert_weights", "uniform_expert_assignment",
})  # fmt: skip
_MINIMAX_M2_INERT = words(
    "mtp_transformer_layers num_mtp_modules use_mtp shared_moe_mode layernorm_full_attention_beta "
    "layernorm_linear_attention_beta layernorm_mlp_beta max_model_len"
)
_GPT_BIGCODE_INERT = frozenset({
    "attention_softmax_in_fp32", "inference_runner", "max_batch_size", "max_sequence_length",
    "pad_key_length", "pre_allocate_kv_cache", "scale_attention_softmax_in_fp32",
    "scale_attn_weights", "validate_runner_input",
})  # fmt: skip
_QWEN_INERT = frozenset({
    "attn_dropout_prob", "emb_dropout_prob", "fp16", "bf16", "fp32", "onnx_safe",
    "scale_attn_weights", "use_cache_kernel", "use_cache_quantization", "use_dynamic_ntk",
    "use_flash_attn", "use_logn_attn", "softmax_in_fp32",
})  # fmt: skip
_CHATGLM_INERT = frozenset({
    "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
    "classifier_dropout", "fp32_residual_connection", "original_rope", "pre_seq_len",
    "prefix_projection", "quantization_bit",
})  # fmt: skip
DIALECTS: Mapping[str, Dialect] = {
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, prepare=read.full_without_rope),
    # a sigmoid router as in DeepSeek-V3, which the config names only by its top-k method
    "dots1": Dialect(fixed={"scoring_func": "sigmoid"}),
    "falcon": Dialect(
        renames=pairs(
            "ffn_hidden_size=intermediate_size activation=hidden_act n_head_kv=num_kv_heads "
            "n_layer=num_hidden_layers n_head=num_attention_heads"
        ),
        inert=frozenset({"ff_factor", "apply_residual_connection_post_layernorm"}),
        switches={
            "bias": switch(False, "attention_bias", "mlp_bias"),
            "alibi": (False, read.ALIBI, {}),
        },
        prepare=read.falcon,
    ),
    "dbrx": Dialect(
        renames=pairs(
            "kv_n_heads=num_key_value_heads ffn_hidden_size=moe_intermediate_size "
            "moe_num_experts=num_experts moe_top_k=num_experts_per_tok"
        ),
        parts=("attn_config", "ffn_config"),
        inert=_DBRX_INERT,
        prepare=read.dbrx,
    ),
    "ernie4_5_moe": _ERNIE_MOE,
    "minimax_m2": Dialect(
        renames={"shared_intermediate_size": "shared_expert_intermediate_size"},
        inert=_MINIMAX_M2_INERT,
        switches={"use_routing_bias": switch(True, "router_correction_bias")},
        prepare=read.minimax_m2,
    ),
    "granitemoeshared": Dialect(
        renames={"shared_intermediate_size": "shared_expert_intermediate_size"}
    ),
    **HYBRIDS,
    **BY_LAYER,
    # a parallel residual has one norm; query-key norms are one LayerNorm per head, no bias
    "stablelm": Dialect(
        renames={"use_qkv_bias": "attention_bias"},
        switches={
            "use_parallel_residual": (False, {"parallel_residual": True, "norms_per_layer": 1}, {}),
            "qk_layernorm": (False, {"qk_norm": "full"}, {"qk_norm": "none"}),
        },
    ),
    "gpt_bigcode": Dialect(
        inert=_GPT_BIGCODE_INERT, switches={"multi_query": (True, {"num_key_value_heads": 1}, {})}
    ),
    "gptj": Dialect(inert=frozenset({"rotary", "scale_attn_weights"}), prepare=read.rotated),
    "codegen": Dialect(inert=frozenset({"scale_attn_weights"}), prepare=read.rotated),
    "gpt_neo": Dialect(
        renames=pairs(
            "num_heads=num_attention_heads num_layers=num_hidden_layers window_size=sliding_window"
        ),
        inert=frozenset({"embed_dropout", "resid_dropout"}),
        prepare=read.gpt_neo,
    ),
    "opt": Dialect(
        renames={"enable_bias": "use_bias"},
        inert=frozenset({"activation_dropout", "init_std", "layerdrop", "prefix"}),
        prepare=read.opt,
    ),
    "exaone": Dialect(
        renames={"num_layers": "num_hidden_layers"}, inert=frozenset({"embed_dropout"})
    ),
    "exaone4": Dialect(prepare=read.exaone4),
    "seed_oss": Dialect(renames={"attention_out_bias": "attention_output_bias"}),
    "hunyuan_v1_dense": Dialect(renames=_HUNYUAN, inert=_HUNYUAN_INERT, prepare=read.hunyuan_dense),
    "hunyuan_v1_moe": Dialect(renames=_HUNYUAN, inert=_HUNYUAN_INERT, prepare=read.hunyuan_moe),
    "qwen": Dialect(
        renames={"kv_channels": "head_dim", "seq_length": "max_position_embeddings"},
        inert=_QWEN_INERT,
        prepare=read.qwen,
    ),
    "chatglm": Dialect(
        renames=pairs(
            "num_layers=num_hidden_layers ffn_hidden_size=intermediate_size "
            "padded_vocab_size=vocab_size kv_channels=head_dim seq_length=max_position_embeddings"
        ),
        inert=_CHATGLM_INERT,
        switches={
            "add_bias_linear": switch(False, *_BIASES),
            "add_qkv_bias": (False, {"attention_bias": True}, {}),
        },
        prepare=read.chatglm,
    ),
    "internlm": Dialect(renames={"bias": "attention_bias"}),
    "internlm2": Dialect(renames={"bias": "attention_bias"}),
    "internlm3": Dialect(
        switches={"bias": switch(False, *_BIASES[1:]), "qkv_bias": switch(False, "attention_bias")}
    ),
    "baichuan": Dialect(
        inert=frozenset(
            {"model_max_length", "gradient_checkpointing", "z_loss_weight", "_from_model_config"}
        ),
        prepare=read.baichuan,
    ),
    "phimoe": Dialect(inert=frozenset({"input_jitter_noise"})),
    "apertus": Dialect(inert=frozenset({"qk_norm", "post_norm"})),
    "persimmon": Dialect(inert=frozenset({"qk_layernorm"})),
    "afmoe": Dialect(
        renames=pairs(
            "num_dense_layers=first_k_dense_replace "
            "global_attn_every_n_layers=sliding_window_pattern route_scale=routed_scaling_factor"
        ),
        inert=frozenset({"mup_enabled"}),
        prepare=read.full_without_rope,
    ),
    "aria_text": Dialect(
        renames={"moe_num_experts": "num_experts", "moe_num_shared_experts": "n_shared_experts"}
    ),
    "beam": Dialect(prepare=read.full_without_rope),
    "biogpt": Dialect(
        renames={
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        inert=frozenset({"activation_dropout", "layerdrop"}),
        prepare=read.from_second_row,
    ),
    "cohere2_moe": Dialect(
        renames=pairs(
            "intermediate_size=moe_intermediate_size "
            "prefix_dense_intermediate_size=intermediate_size expert_selection_fn=scoring_func"
        ),
        inert=_COHERE.inert | {"shared_expert_combination_strategy"},
        switches=_COHERE.switches,
        prepare=read.cohere2_moe,
    ),
    "flint": Dialect(prepare=read.full_without_rope),
    "granite_swa": Dialect(prepare=read.granite_swa),
    "granitemoe_swa": Dialect(
        renames={"shared_intermediate_size": "shared_expert_intermediate_size"},
        prepare=read.granite_swa,
    ),
    "hy_v3": Dialect(
        renames={"router_scaling_factor": "routed_scaling_factor"},
        inert=frozenset({"enable_moe_fp32_combine"}),
    ),
    # Granite, with norms behind the branches as well if asked for
    "hyperclovax": Dialect(switches={"use_post_norm": (False, {"norms_per_layer": 4}, {})}),
    "kolibri1": Dialect(prepare=read.exaone4),
    "laguna": Dialect(
        renames={"moe_routed_scaling_factor": "routed_scaling_factor"},
        inert=frozenset({"moe_router_logit_softcapping"}),
        prepare=read.laguna,
    ),
    "minicpm3": Dialect(prepare=read.minicpm3),
    "xglm": Dialect(
        renames={"num_layers": "num_hidden_layers", "attention_heads": "num_attention_heads"},
        inert=frozenset({"activation_dropout", "layerdrop", "init_std"}),
        prepare=read.sinusoidal,
    ),
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
}


def translated(raw: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """The config in common keys; the same object where its family has no dialect.

    raw: the language model's own keys, as written.
    prefix: field of the mapping, such as "model".
    Raises SpecError for a block that we have no operations for.
    """
    model_type = raw.get("model_type")
    check_blocks(raw, prefix)
    if isinstance(model_type, str) and model_type in SAME_NETWORK:
        model_type = SAME_NETWORK[model_type]
        raw = {**raw, "model_type": model_type}
    raw = _by_kinds_of_mlp(raw, prefix)
    dialect = DIALECTS.get(model_type) if isinstance(model_type, str) else None
    if dialect is None:
        return raw
    values = without(raw, *dialect.parts)
    for part in dialect.parts:
        if isinstance(inner := raw.get(part), Mapping):
            values |= without(inner, "model_type")
    values = {
        dialect.renames.get(key, key): value
        for key, value in values.items()
        if key not in dialect.inert
    }
    values = {**switched(values, dialect.switches), **dialect.fixed}
    try:
        return dialect.prepare(values) if dialect.prepare is not None else values
    except MissingBlock as found:
        raise missing(prefix, found.key, raw.get(found.key), found.block) from None


def _by_kinds_of_mlp(raw: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """The config with `mlp_layer_types`, a list of kinds of each layer, as the layers it means."""
    kinds = raw.get("mlp_layer_types")
    if not isinstance(kinds, (list, tuple)):
        return raw
    hashed = sum(kind == "hash_moe" for kind in kinds)
    known = ("dense", "sparse", "moe", *["hash_moe"] * all(k == "hash_moe" for k in kinds[:hashed]))
    odd = next((kind for kind in kinds if kind not in known), None)
    if odd is not None:
        raise missing(prefix, "mlp_layer_types", odd, f"an MLP of the kind {str(odd)[:40]!r}")
    dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
    others = ("mlp_layer_types", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
    return {
        **without(raw, *others),
        **dense_at(dense),
        **({"num_hash_layers": hashed} if {"moe", "hash_moe"} & {*kinds} else {}),
    }
