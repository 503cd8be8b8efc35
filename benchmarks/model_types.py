"""Reads every causal language model that transformers ships, held against the real package.

    python benchmarks/model_types.py            one line a type, and the counts
    python benchmarks/model_types.py llama phi  these types alone

For each type its default config is built on the meta device (no memory) and read by us. `equal` is
the same number of weights to the last one; `wrong` is a bug.
Needs transformers and torch: `PYTHONPATH=.venv/titan`, which `make test-slow` sets up.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import PlannerError
from planner.intake.models import read_model

# What a default config leaves out though its own network cannot be built, or trained, without.
COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
# Buffers that are published with the weights, and which we count.
COUNTED_BUFFERS = ("e_score_correction_bias", "expert_bias")
OTHER_PARTS = ("vision", "image", "audio", "speech", "projector", "embed_tokens_extend", "vq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one type was read: equal, wrong, refused (by a named block or not) or unbuilt."""

    name: str
    verdict: str
    detail: str = ""


def built(name: str) -> tuple[dict[str, Any], int]:
    """Keys of the type's default config and weights of the language model that it builds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **COMPLETED.get(name, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = [*model.named_parameters()]
    weights += [(key, one) for key, one in model.named_buffers() if key.endswith(COUNTED_BUFFERS)]
    count = sum(one.numel() for key, one in weights if not any(part in key for part in OTHER_PARTS))
    keys = json.loads(json.dumps(config.to_dict(), default=str))
    return {"architectures": [type(model).__name__], **keys}, count


def judge(name: str) -> Verdict:
    """Builds one type with transformers and reads its config."""
    try:
        keys, count = built(name)
    except Exception as error:  # a default config that its own package cannot build
        return Verdict(name=name, verdict="unbuilt", detail=f"{type(error).__name__}: {error}"[:90])
    try:
        ours = read_model(keys).total_parameters()
    except PlannerError as error:
        named = "our operations have no such block" in str(error)
        return Verdict(name=name, verdict="refused" if named else "UNNAMED", detail=str(error))
    if ours == count:
        return Verdict(name=name, verdict="equal", detail=f"{count:,}")
    detail = f"{ours:,} read, {count:,} built ({ours / count - 1:+.4%})"
    return Verdict(name=name, verdict="WRONG", detail=detail)


def verdicts(names: list[str]) -> Iterator[Verdict]:
    """One verdict a type; all types that `AutoModelForCausalLM` builds, unless some are named."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

    logging.disable(logging.WARNING)
    return map(judge, names or sorted(TYPES))


def main() -> int:
    """Prints the table; 1 where a type is read wrong."""
    counts: Counter[str] = Counter()
    for one in verdicts(sys.argv[1:]):
        counts[one.verdict] += 1
        print(f"{one.verdict:8} {one.name:26} {one.detail}"[:160], flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return int(counts["WRONG"] + counts["UNNAMED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
