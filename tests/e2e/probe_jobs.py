"""Tiny models and layouts that the probe program is tried on, and waiting for what it does."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.probes import guardian
from planner.probes.folder import BEGIN
from planner.probes.outcome import Begin
from planner.probes.pools.slurm_node import node_token
from tests.conftest import ROOT, ran

Values = dict[str, Any]

_SMALL: Values = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip
_SHORT: Values = {**_SMALL, "num_hidden_layers": 2}
_EXPERTS: Values = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY: Values = {**_SHORT, "model_type": "llama", "name": "tiny"}
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
    layout: Values, *, num_gpus: int = 1, model: str | Values = "llama",
    training: Values | None = None, **options: Any,
) -> Values:  # fmt: skip
    """A probe of a tiny model in float32 on CPUs."""
    training = {"seq_len": 32, "global_batch_size": 8, "trainer": "fsdp", **(training or {})}
    job = {
        "model": MODELS[model] if isinstance(model, str) else model,
        "cluster": {"gpu": "cpu", "num_gpus": num_gpus},
        "training": training,
        "layout": {"param_dtype": "float32", "reduce_dtype": "float32", **layout},
    }
    # a few steps of a tiny model show a wrong gradient at this learning rate
    common = {"id": "test", "device": "cpu", "learning_rate": 1e-3, "routing": "learned"}
    return {**common, **options, "job": job}


def torchrun(
    world: int, *program: object, env: Mapping[str, str], seconds: float = 300.0
) -> "subprocess.CompletedProcess[str]":
    """The real one on this machine, each rank with one thread."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words = (sys.executable, *launch, world, *program)
    return ran(*words, env={**env, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=seconds)


def until(came: Callable[[], Any], what: object = "it did not come") -> Any:
    """Waits for what has to happen, on however busy a machine; what came."""
    deadline = time.monotonic() + 300.0
    while not (found := came()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def working(folder: Path) -> str:
    """Waits until both ranks of a probe in one of its folders are at work; its token."""

    def at_work() -> list[Path]:
        logs = (
            log for log in folder.glob("*/output.log") if not (log.parent / "end.json").exists()
        )
        return [log for log in logs if log.read_text(errors="replace").count("step 1 of 9") == 2]

    until(at_work, "the probe did not start")
    return Begin.read(at_work()[0].parent / BEGIN).token


def node_tokens(folder: Path, of: str = "probe-*") -> list[str]:
    """The tokens of these probes, and of each on two nodes."""
    found = [Begin.read(path).token for path in folder.glob(f"{of}/begin.json")]
    return [one for token in found for one in (token, node_token(token, 0), node_token(token, 1))]


def nobody_bears(tokens: list[str]) -> bool:
    """Whether no process of these probes is left."""
    return not any(map(guardian.bearers, tokens))
