"""Tiny models and layouts that the probe program is tried on."""

from typing import Any

Values = dict[str, Any]

_SMALL: Values = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip
_SHORT: Values = {**_SMALL, "num_hidden_layers": 2}
_EXPERTS: Values = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, Values] = {
    "llama": {"base": "debug-tiny", **_SMALL},
    "moe": {"base": "qwen3-30b-a3b", **_SHORT, **_EXPERTS, "num_experts": 4},
    "mla": {
        "base": "deepseek-v3", **{k: v for k, v in _SHORT.items() if k != "head_dim"}, **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "tied": {"base": "gpt2", **_SMALL, "num_key_value_heads": 4},
    "windows": {"base": "gemma3-1b", **_SHORT, "sliding_window": 8},
    "sinks": {"base": "gpt-oss-20b", **_SHORT, **_EXPERTS, "num_experts": 4, "sliding_window": 8},
    "wide-norms": {"base": "olmo2-7b", **_SHORT, "num_key_value_heads": 4},
    "parallel": {"base": "pythia-1.4b", **_SHORT, "num_key_value_heads": 4},
    "gated-shared": {"base": "qwen1.5-moe-a2.7b", **_SHORT, **_EXPERTS, "num_experts": 4,
        "shared_expert_intermediate_size": 64},
}  # fmt: skip


def task(
    layout: Values,
    *,
    num_gpus: int = 1,
    model: str | Values = "llama",
    training: Values | None = None,
    **options: Any,
) -> Values:
    """A probe of a tiny model in float32 on CPUs."""
    return {
        "id": "test",
        "device": "cpu",
        "learning_rate": 1e-3,  # a few steps of a tiny model show a wrong gradient
        "routing": "learned",
        **options,
        "job": {
            "model": MODELS[model] if isinstance(model, str) else model,
            "cluster": {"gpu": "cpu", "num_gpus": num_gpus},
            "training": {
                "seq_len": 32,
                "global_batch_size": 8,
                "trainer": "fsdp",
                **(training or {}),
            },
            "layout": {"param_dtype": "float32", "reduce_dtype": "float32", **layout},
        },
    }
