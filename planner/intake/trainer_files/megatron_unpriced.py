"""Flags of Megatron-LM that change time or memory and that nothing here prices.

Source: Megatron-LM core 0.14 to 0.20 megatron/training/arguments.py, transformer_config.py.
"""

from collections.abc import Iterator, Sequence

from planner.export.commands import spelled
from planner.export.megatron_read import Words, word
from planner.export.megatron_settings import CAPACITY, PADDED
from planner.specs.layout import RECOMPUTE_MODULES

FLAGS = frozenset(
    {
        "activation_offload_fraction", "batch_invariant_mode", "cross_entropy_fusion_impl",
        "cross_entropy_loss_fusion", "delay_wgrad_compute", "deterministic_mode",
        "distribute_saved_activations", "empty_unused_memory_level",
        "experimental_attention_variant", "expert_tensor_parallel_num_weight_shards",
        "fine_grained_activation_offloading", "first_last_layers_bf16", "fp32_residual_connection",
        "fp8_output_proj", "freeze_all_layers", "heterogeneous_layers_config_path",
        "hierarchical_context_parallel_sizes", "hybrid_context_parallel",
        "main_grads_dtype", "main_params_dtype", "mla_down_proj_fusion",
        "moe_deepep_num_sms", CAPACITY, "moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms",
        PADDED, "moe_permute_fusion", "moe_router_fusion",
        "moe_router_padding_for_fp8", "moe_router_padding_for_quantization",
        "moe_shared_expert_overlap", "muon_coefficient_type", "muon_fp32_matmul_prec",
        "muon_no_split_qkv", "muon_num_ns_steps", "muon_scalar_optimizer", "muon_use_syrk",
        "no_bias_dropout_fusion",
        "no_bias_gelu_fusion", "no_bias_swiglu_fusion", "no_fp8_wgrad", "no_rope_fusion",
        "num_layers_at_end_in_bf16", "num_layers_at_start_in_bf16", "offload_modules",
        "overlap_cpu_optimizer_d2h_h2d", "overlap_param_gather_with_optimizer_step",
        "tensor_parallel_num_weight_shards", "transformer_impl",
        "no_use_layer_wise_param_layout", "use_nccl_ub", "use_sharp",
        "use_torch_optimizer_for_cpu_offload", "use_tp_pp_dp_mapping",
    }
)  # fmt: skip
# values that are what is priced
USUAL = {
    "transformer_impl": {"transformer_engine"},
    "main_grads_dtype": {"fp32"},
    "main_params_dtype": {"fp32"},
    "experimental_attention_variant": {"gated_delta_net", "gdn", "dsa"},
    "empty_unused_memory_level": {"0"},
    "muon_coefficient_type": {"quintic"},
    "muon_fp32_matmul_prec": {"medium"},
    "muon_num_ns_steps": {"5"},
    "muon_scalar_optimizer": {"adam"},
}


def fuses_cross_entropy(words: Words) -> bool:
    """Whether the loss is Transformer Engine's; Megatron's own fusion keeps the fp32 copy."""
    kinds = words.get("cross_entropy_fusion_impl", ())
    return "cross_entropy_loss_fusion" in words and list(kinds) == ["te"]


def unpriced(words: Words) -> Iterator[str]:
    """Sentences on settings of a script that the figures leave out."""
    sparse = list(words.get("experimental_attention_variant", ())) == ["dsa"]
    unfused = sparse or ("multi_latent_attention" in words and word(words, "rope_type") == "rope")
    found = [
        _spelled(name, values)
        for name, values in words.items()
        if name in FLAGS - ({"no_rope_fusion"} if unfused else set())  # their kernels exclude it
        and not (values and set(values) <= USUAL.get(name, set()))
        and not (name.startswith("cross_entropy") and fuses_cross_entropy(words))
        and not (name in (CAPACITY, PADDED) and {CAPACITY, PADDED} <= words.keys())
    ]
    if found:
        yield f"changes time or memory and is not priced: {', '.join(found)}"
    if sparse and list(words.get("dsa_kernel_backend", ["none"])) == ["none"]:
        yield "sparse attention without --dsa-kernel-backend scores all tokens in fp32, unpriced"
    other = [one for one in words.get("recompute_modules", ()) if one not in RECOMPUTE_MODULES]
    if other:
        yield f"recomputing {', '.join(other)} is not priced"


def _spelled(name: str, values: Sequence[str]) -> str:
    return " ".join([spelled(name), *values])
