"""Reads every causal language model that transformers ships, held against the real package.

    python benchmarks/model_types.py            one line a type, and the counts
    python benchmarks/model_types.py llama phi  these types alone
    python benchmarks/model_types.py --markdown docs/reference/model-types.md

For each type its default config is built on the meta device (no memory) and read by us. `equal` is
the same number of weights to the last one; `wrong` is a bug.
Needs transformers and torch: `PYTHONPATH=.venv/titan`, which `make test-slow` sets up.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
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
# Published sizes of a type whose default size lacks what they have, or has more: the language model
# of a multimodal type where transformers builds no other. Row -> (type, keys).
_WINDOW_OF_FOUR = ["full_attention", *["sliding_attention"] * 3] * 12
PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DeepSeek V4 Flash": ("deepseek_v4", {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}),
    "DeepSeek V4 Pro": ("deepseek_v4", {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024, "n_routed_experts": 384,
        "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    }),
    "Gemma 4 26B A4B": ("gemma4_text", {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }),
    "Gemma 4 E2B": ("gemma4_text", {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    }),
    "Gemma 4 E4B": ("gemma4_text", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
    }),
    "MiniMax M3": ("minimax_m3_vl_text", {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    }),
    "Step 3.5 Flash": ("step3p7", {"text_config": {
        "vocab_size": 128_896, "sliding_window": 512, "num_nextn_predict_layers": 3,
        "layer_types": _WINDOW_OF_FOUR, "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 96,
            "num_attention_groups": 8, "head_dim": 128,
        },
    }}),
}  # fmt: skip
# Buffers that are published with the weights, and which we count.
COUNTED_BUFFERS = ("e_score_correction_bias", "expert_bias")
OTHER_PARTS = ("vision", "image", "audio", "speech", "projector", "embed_tokens_extend", "vq")


PAGE = """# Model types

Every causal language model of transformers {version}, in its default size: the weights that the
real class has, built on the meta device, and the weights that planner reads from its config.
`equal` is the same number to the last one. A refused type has a block without operations here;
transformers itself does not build the default config of an unbuilt one. Weights that its class
of `longcat_flash` gives to experts that compute nothing, and which nothing reads, do not count.
`benchmarks/model_types.py` writes this page.

{counts}

| type | transformers | planner | |
| --- | --: | --: | --- |
{rows}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one type was read: equal, wrong, refused (by a named block or not) or unbuilt.

    built, ours: weights of the real class and of what we read; None where there is none.
    """

    name: str
    verdict: str
    detail: str = ""
    built: int | None = None
    ours: int | None = None

    @property
    def row(self) -> str:
        """Its line of the page's table: a refusal by its block, an unbuilt one by its error."""
        numbers = " | ".join("" if n is None else f"{n:,}" for n in (self.built, self.ours))
        _, _, block = self.detail.replace("stands for ", "it has ").partition("it has ")
        words = {"refused": f": {block.partition('; our')[0]}"}.get(self.verdict, "")
        return f"| `{self.name}` | {numbers} | {self.verdict}{words} |"


def built(name: str) -> tuple[dict[str, Any], int]:
    """Keys of the type's default config and weights of the language model that it builds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, keys = PUBLISHED.get(name, (name, COMPLETED.get(name, {})))
    config = AutoConfig.for_model(kind, **keys)
    made = AutoModelForImageTextToText if "text_config" in keys else AutoModelForCausalLM
    with torch.device("meta"):
        model = made.from_config(config)
    weights = [*model.named_parameters()]
    weights += [(key, one) for key, one in model.named_buffers() if key.endswith(COUNTED_BUFFERS)]
    named = [(key, one) for key, one in weights if not any(part in key for part in OTHER_PARTS)]
    count = sum(one.numel() for _, one in named)
    unread = getattr(config, "zero_expert_num", 0)  # rows of LongCat's gate_up_proj
    count -= sum(unread * one[0].numel() for key, one in named if key.endswith("s.gate_up_proj"))
    written = json.loads(json.dumps(config.to_dict(), default=str))
    return {"architectures": [type(model).__name__], **written}, count


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
        verdict = "refused" if named else "UNNAMED"
        return Verdict(name=name, verdict=verdict, detail=str(error), built=count)
    if ours == count:
        detail = f"{count:,}"
        return Verdict(name=name, verdict="equal", detail=detail, built=count, ours=ours)
    detail = f"{ours:,} read, {count:,} built ({ours / count - 1:+.4%})"
    return Verdict(name=name, verdict="WRONG", detail=detail, built=count, ours=ours)


def verdicts(names: list[str]) -> Iterator[Verdict]:
    """One verdict a type; all that `AutoModelForCausalLM` builds and PUBLISHED, unless named."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

    logging.disable(logging.WARNING)
    return map(judge, names or [*sorted(TYPES), *PUBLISHED])


def main() -> int:
    """Prints the table; 1 where a type is read wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    found = []
    for one in verdicts(asked.names):
        found.append(one)
        print(f"{one.verdict:8} {one.name:26} {one.detail}"[:160], flush=True)
    counts = Counter(one.verdict for one in found)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(told)
    if asked.markdown:
        rows = "\n".join(one.row for one in found)
        page = PAGE.format(version=metadata.version("transformers"), counts=f"{told}.", rows=rows)
        asked.markdown.write_text(page, encoding="utf-8")
    return int(counts["WRONG"] + counts["UNNAMED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
