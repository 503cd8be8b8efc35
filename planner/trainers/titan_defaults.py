"""What TorchTitan assumes where a file states nothing, as dotted settings.

Sources: torchtitan 0.2.2 config/job_config.py; 0.3.0 config/configs.py, trainer.py,
    components/checkpointer, and for each function of a model's config_registry.py what it sets.
"""

from collections.abc import Mapping

P, T, AC, C = "parallelism.", "training.", "activation_checkpoint.", "compile."
Settings = Mapping[str, object]

_COMMON: dict[str, object] = {
    P + "data_parallel_replicate_degree": 1, P + "data_parallel_shard_degree": -1,
    P + "context_parallel_degree": 1,
    P + "tensor_parallel_degree": 1, P + "pipeline_parallel_degree": 1,
    P + "expert_parallel_degree": 1,
    P + "fsdp_reshard_after_forward": "default", P + "pipeline_parallel_schedule": "1F1B",
    P + "pipeline_parallel_microbatch_size": 1, P + "pipeline_parallel_first_stage_less_layers": 1,
    P + "pipeline_parallel_last_stage_less_layers": 1, P + "pipeline_parallel_schedule_csv": "",
    T + "local_batch_size": 8, T + "global_batch_size": -1, T + "seq_len": 2048,
    T + "max_norm": 1.0,
    T + "enable_cpu_offload": False, T + "dtype": "float32",
    T + "mixed_precision_param": "bfloat16",
    T + "mixed_precision_reduce": "float32", C + "enable": False,
    C + "components": ["model", "loss"],
    "checkpoint.enable": False, "checkpoint.interval": 500, "checkpoint.async_mode": "disabled",
    "optimizer.name": "AdamW", "optimizer.implementation": "fused",
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
    """What most functions of 0.3's registries set.

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
