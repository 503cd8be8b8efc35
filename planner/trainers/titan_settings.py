"""TorchTitan's settings: what it assumes where a file states nothing, and the names that it knows.

TorchTitan stops at any other name, and so does the planner.
Sources: torchtitan 0.2.0 to 0.2.2 config/job_config.py (JobConfig); before: 0.1.0
    config_manager.py and the repository's of April 2024 to February 2025; 0.3.0 config/configs.py,
    trainer.py (Trainer.Config), components/checkpointer, for each function of a model's
    config_registry.py what it sets, and experiments/graph_trainer's CompileConfig; pull request
    4121 of 20 August 2026, which counts batches in tokens and is not in 0.3.0.
"""

import re
from collections.abc import Iterable, Mapping

P, T, AC, C = "parallelism.", "training.", "activation_checkpoint.", "compile."
Settings = Mapping[str, object]

_COMMON: dict[str, object] = {
    P + "data_parallel_replicate_degree": 1, P + "data_parallel_shard_degree": -1,
    P + "context_parallel_degree": 1, P + "tensor_parallel_degree": 1,
    P + "pipeline_parallel_degree": 1, P + "expert_parallel_degree": 1,
    P + "fsdp_reshard_after_forward": "default", P + "pipeline_parallel_schedule": "1F1B",
    P + "pipeline_parallel_microbatch_size": 1, P + "pipeline_parallel_first_stage_less_layers": 1,
    P + "pipeline_parallel_last_stage_less_layers": 1, P + "pipeline_parallel_schedule_csv": "",
    T + "local_batch_size": 8, T + "global_batch_size": -1, T + "seq_len": 2048,
    T + "max_norm": 1.0, T + "enable_cpu_offload": False, T + "dtype": "float32",
    T + "mixed_precision_param": "bfloat16", T + "mixed_precision_reduce": "float32",
    C + "enable": False, C + "components": ["model", "loss"], "checkpoint.enable": False,
    "checkpoint.interval": 500, "checkpoint.async_mode": "disabled", "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
}  # fmt: skip

DEFAULTS: Mapping[str, Settings] = {
    "0.2": {
        **_COMMON,
        "model.name": "llama3", "model.flavor": "debugmodel", "model.converters": [],
        AC + "mode": "selective", AC + "selective_ac_option": "2", AC + "memory_budget": 0.5,
        P + "enable_async_tensor_parallel": False, P + "disable_loss_parallel": False,
        P + "context_parallel_rotate_method": "allgather", P + "expert_tensor_parallel_degree": 1,
        P + "expert_parallel_comm_backend": "standard", "optimizer.early_step_in_backward": False,
        "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
    },
    "0.3": {
        **_COMMON,
        P + "enable_sequence_parallel": True, C + "enable_async_tensor_parallel": False,
        T + "disable_cuda_graphs": False,
        AC + "mode": "selective", AC + "memory_budget": 0.5,
    },
}  # fmt: skip

# Names that a setting had in releases before 0.2 -> its name now.
FORMER_NAMES: Mapping[str, str] = {
    T + "batch_size": T + "local_batch_size", T + "compile": C + "enable",
    T + "tensor_parallel_degree": P + "tensor_parallel_degree",
    T + "pipeline_parallel_degree": P + "pipeline_parallel_degree",
    T + "data_parallel_degree": P + "data_parallel_shard_degree",
    T + "data_parallel_shard_degree": P + "data_parallel_shard_degree",
    T + "data_parallel_replicate_degree": P + "data_parallel_replicate_degree",
    "experimental.pipeline_parallel_degree": P + "pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": P + "pipeline_parallel_schedule",
    "experimental.context_parallel_degree": P + "context_parallel_degree",
    "experimental.context_parallel_rotate_method": P + "context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": P + "enable_async_tensor_parallel",
    P + "enable_compiled_autograd": P + "enable_compiled_autograd",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
}  # fmt: skip


def _made(local: int, seq_len: int, mode: str, **more: object) -> dict[str, object]:
    """Settings by most functions of 0.3's registries.

    more: other settings by the short names below, such as tp=8.
    """
    names = {
        "tp": P + "tensor_parallel_degree",
        "ep": P + "expert_parallel_degree",
        "schedule": P + "pipeline_parallel_schedule",
        "compiled": C + "enable",
        "components": C + "components",
        "async_tp": C + "enable_async_tensor_parallel",
        "no_graphs": T + "disable_cuda_graphs",
        "interval": "checkpoint.interval",
        "saved": "checkpoint.enable",
    }
    sets = {names[key]: value for key, value in more.items()}
    return {T + "local_batch_size": local, T + "seq_len": seq_len, AC + "mode": mode, **sets}


_DEEPSEEK = {
    "schedule": "Interleaved1F1B",
    "no_graphs": True,
    "compiled": True,
    "components": ["loss"],
}

# Function of 0.3's registries -> its dispatcher of routed tokens, where that is not the standard.
DISPATCHERS_03: Mapping[str, str] = {"deepseek_v3_16b_hybridep": "hybridep"}
# Function of 0.3's registries -> (module, flavor, precision, what it sets).
CONFIGS_03: Mapping[str, tuple[str, str, str, Settings]] = {
    "llama3_8b": ("llama3", "8B", "bf16", _made(1, 8192, "selective")),
    "llama3_8b_first_85_pct_layers_nvfp4": (
        "llama3", "8B", "nvfp4", _made(1, 8192, "selective", compiled=True, components=["model"])),
    "llama3_8b_mxfp8": ("llama3", "8B", "mxfp8",
        _made(1, 8192, "selective", compiled=True, components=["model"])),
    "llama3_70b": ("llama3", "70B", "bf16", _made(8, 8192, "full", tp=8)),
    "llama3_405b": ("llama3", "405B", "float8-rowwise",
        _made(2, 8192, "full", tp=8, compiled=True, async_tp=True)),
    "qwen3_0_6b": ("qwen3", "0.6B", "bf16", _made(4, 4096, "selective")),
    "qwen3_1_7b": ("qwen3", "1.7B", "bf16", _made(4, 4096, "selective", interval=50)),
    "qwen3_8b_first_85_pct_layers_nvfp4": (
        "qwen3", "8B", "nvfp4",
        _made(1, 2048, "selective", compiled=True, components=["model"], saved=True)),
    "qwen3_14b": ("qwen3", "14B", "bf16", _made(4, 4096, "full")),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B", "bf16", _made(2, 4096, "full")),
    "qwen3_32b": ("qwen3", "32B", "bf16", _made(2, 4096, "full")),
    "sft_qwen3_8b_math": ("qwen3", "8B", "bf16", _made(1, 2048, "selective", saved=True)),
    "deepseek_v3_16b": ("deepseek_v3", "16B", "bf16",
        _made(4, 4096, "selective", ep=8, interval=10, **_DEEPSEEK)),
    "deepseek_v3_16b_hybridep": ("deepseek_v3", "16B", "bf16",
        _made(4, 4096, "selective", ep=8, interval=10, **{**_DEEPSEEK, "no_graphs": False})),
    "deepseek_v3_671b": ("deepseek_v3", "671B", "bf16",
        _made(4, 4096, "selective", ep=2, **_DEEPSEEK)),
    "deepseek_v3_671b_float8": ("deepseek_v3", "671B", "float8-rowwise",
        _made(4, 4096, "selective", ep=2, **_DEEPSEEK)),
    "gpt_oss_20b": ("gpt_oss", "20b", "bf16", _made(1, 8192, "full")),
    "gpt_oss_120b": ("gpt_oss", "120b", "bf16", _made(1, 8192, "full")),
}  # fmt: skip


def _dotted(tables: Mapping[str, str]) -> frozenset[str]:
    return frozenset(
        f"{table}.{name}" if table else name
        for table, names in tables.items()
        for name in names.split()
    )


_BOTH = {
    "comm": "init_timeout_seconds mode save_traces_file_prefix save_traces_folder trace_buf_size "
    "train_timeout_seconds",
    "checkpoint": "async_mode create_seed_checkpoint enable enable_first_step_checkpoint "
    "exclude_from_loading export_dtype folder initial_load_in_hf initial_load_in_hf_quantized "
    "initial_load_model_only initial_load_path interval keep_latest_k last_save_in_hf "
    "last_save_model_only load_only load_step",
    "lr_scheduler": "decay_ratio decay_type min_lr_factor total_steps warmup_steps",
    "metrics": "disable_color_printing enable_tensorboard enable_wandb log_freq save_for_all_ranks "
    "save_tb_folder",
}
_PARALLEL = (
    "context_parallel_degree context_parallel_load_balancer data_parallel_replicate_degree "
    "data_parallel_shard_degree expert_parallel_degree fsdp_reshard_after_forward "
    "module_fqns_per_model_part pipeline_parallel_degree pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage "
    "pipeline_parallel_microbatch_size pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "tensor_parallel_degree "
)
_TRAINING = (
    "dtype enable_cpu_offload gc_debug gc_freq global_batch_size local_batch_size max_norm "
    "mixed_precision_param mixed_precision_reduce seq_len steps "
)
_LOADER = "num_workers persistent_workers pin_memory prefetch_factor"
_RECOMPUTED = "debug determinism_check memory_budget mode preserve_rng_state "
BY_TOKENS: Mapping[str, str] = {
    "training.max_context_length": "training.seq_len",
    "training.num_tokens_per_microbatch_per_dp_rank": "training.local_batch_size",
    "training.num_tokens_per_train_step": "training.global_batch_size",
    "parallelism.num_pp_microbatches": "parallelism.pipeline_parallel_microbatch_size",
}
"""Setting of the repository since 20 August 2026 -> the setting of 0.3.0 that it replaced."""

KEYS: Mapping[str, frozenset[str]] = {
    "0.2": _dotted({
        **_BOTH,
        "activation_checkpoint": _RECOMPUTED + "early_stop selective_ac_option "
        "per_op_sac_force_recompute_mm_shapes_by_fqns visualize_memory_budget_pareto",
        "checkpoint": _BOTH["checkpoint"] + " enable_ft_dataloader_checkpoints",
        "compile": "backend components enable",
        "debug": "deterministic deterministic_warn_only moe_force_load_balance seed",
        "experimental": "custom_args_module custom_import",
        "fault_tolerance": "enable group_size min_replica_size process_group "
        "process_group_timeout_ms replica_id semi_sync_method",
        "job": "config_file custom_config_module description dump_folder print_config "
        "save_config_file",
        "memory_estimation": "disable_fake_mode enable",
        "model": "converters flavor hf_assets_path name print_after_conversion tokenizer_path",
        "optimizer": "beta1 beta2 early_step_in_backward eps implementation lr name weight_decay",
        "parallelism": _PARALLEL + "context_parallel_rotate_method disable_loss_parallel "
        "enable_async_tensor_parallel enable_compiled_autograd expert_parallel_comm_backend "
        "expert_tensor_parallel_degree pipeline_parallel_expert_parallel_overlap",
        "profiling": "enable_memory_snapshot enable_profiling profile_freq profiler_active "
        "profiler_warmup save_memory_snapshot_folder save_traces_folder",
        "quantize.grouped_mm.float8": "fqns",
        "quantize.grouped_mm.mx": "fqns recipe_name",
        "quantize.linear.float8": "emulate enable_fsdp_float8_all_gather filter_fqns "
        "precompute_float8_dynamic_scale_for_fsdp recipe_name",
        "quantize.linear.mx": "filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name",
        "training": _TRAINING + "dataset dataset_path debug_moe_force_load_balance deterministic "
        "seed",
        "training.dataloader": _LOADER,
        "validation": "dataset dataset_path enable freq local_batch_size seq_len steps",
        "validation.dataloader": _LOADER,
    }),
    "0.3": _dotted({
        **_BOTH,
        "": "config dump_folder hf_assets_path module",
        "activation_checkpoint": _RECOMPUTED + "force_recompute_mm_shapes_by_fqns "
        "visualize_memory_budget_pareto",
        "compile": "backend components enable enable_async_tensor_parallel",
        "debug": "batch_invariant detect_anomaly deterministic deterministic_warn_only "
        "enable_structured_logging moe_force_load_balance print_config save_config_file seed "
        "spmd_typechecking",
        "optimizer": "implementation",
        "parallelism": _PARALLEL + "context_parallel_ptrr_mask_key enable_fsdp_symm_mem "
        "enable_sequence_parallel spmd_backend",
        "profiler": "enable_memory_snapshot enable_profiling memory_snapshot_freq "
        "memory_snapshot_max_entries profile_freq profiler_active profiler_repeat "
        "profiler_skip_first profiler_skip_first_wait profiler_warmup save_memory_snapshot_folder "
        "save_traces_folder trace_post_processor",
        "training": _TRAINING + "disable_cuda_graphs",
    })
    | BY_TOKENS.keys(),
}  # fmt: skip
"""Line of releases -> its settings."""

BEFORE_02 = _dotted({
    "checkpoint": "enable_checkpoint initial_load_model_weights_only interval_type "
    "last_save_model_weights_only model_weights_only",
    "experimental": "context_parallel_degree context_parallel_rotate_method "
    "enable_async_tensor_parallel enable_compiled_autograd pipeline_parallel_degree "
    "pipeline_parallel_microbatches pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_split_mode pipeline_parallel_split_points",
    "fault_tolerance": "fragment_sync_delay fragment_update_alpha should_quantize sync_steps",
    "float8": "emulate enable_float8_linear enable_fsdp_float8_all_gather filter_fqns "
    "moe_fqns_prototype "
    "force_recompute_fp8_weight_in_bwd precompute_float8_dynamic_scale_for_fsdp recipe_name",
    "job": "print_args use_for_integration_test",
    "lr_scheduler": "lr_min",
    "memory_estimation": "enabled",
    "metrics": "enable_color_printing rank_0_only",
    "model": "norm_type",
    "mx": "filter_fqns recipe_name use_fp8_dim1_cast_triton_kernel",
    "optimizer": "fused",
    "parallelism": "pipeline_parallel_split_points",
    "training": "batch_size compile data_parallel_degree data_parallel_replicate_degree "
    "data_parallel_shard_degree data_parallel_type deterministic disable_loss_parallel "
    "enable_float8_linear enable_fsdp_float8_all_gather enable_loss_parallel fp8_linear "
    "fsdp_reshard_after_forward pipeline_parallel_degree "
    "precompute_float8_dynamic_scale_for_fsdp seed tensor_parallel_degree warmup_steps",
})  # fmt: skip
"""Settings that only releases before 0.2 have."""

# parts of a 0.3 configuration whose settings depend on the class that its function chose
_CHOSEN_03 = re.compile(
    r"(?:dataloader|tokenizer|validator|loss|override|optimizer\.(?:param_groups|"
    r"optimizer_factory_kwargs_by_name))(?:\.|$)"
)
_GRAPH_03 = re.compile(r"compile\.")


def unknown(keys: Iterable[str], line: str, *, graph: bool = False) -> list[str]:
    """The settings that TorchTitan does not have, in the order given.

    graph: whether experiments/graph_trainer runs, whose compile table is its own.
    """
    known = KEYS[line] | (BEFORE_02 | FORMER_NAMES.keys() if line == "0.2" else frozenset())
    return [
        key
        for key in keys
        if key not in known
        and not (line == "0.3" and _CHOSEN_03.match(key))
        and not (graph and _GRAPH_03.match(key))
    ]
