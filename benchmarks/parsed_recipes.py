"""Holds the table of NVIDIA's recipes for experts against Megatron-Bridge's own configurations.

    python benchmarks/parsed_recipes.py CHECKOUT

CHECKOUT: a clone of Megatron-Bridge with its tags. For every tag of TAGS the modules of
scripts/performance/configs are run, as its launcher does, with `WorkloadBaseConfig` of the same
tag; of several variants of a configuration the last counts. Prints each difference from
`planner.trainers.recipes`: dispatcher, graphs, overlap. A recipe's function may still change them:
that of Qwen3 235B sets its dispatcher to alltoall on nodes and Hopper (`qwen3_llm_pretrain`).
"""

import argparse
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.intake.jobs import read_job
from planner.trainers.recipes import expert_recipe

FOLDER = "scripts/performance"
TAGS = {
    "v0.2.0": "25.11", "v0.3.0": "26.02", "v0.3.1": "26.02.01", "v0.4.0": "26.04",
    "v0.4.2": "26.04.01", "v0.5.0": "26.06", "v0.5.1": "26.06.01",
}  # fmt: skip
MODELS = {
    "DEEPSEEK_V3": "deepseek-v3", "QWEN3_235B_A22B": "qwen3-235b-a22b", "KIMI_K2": "kimi-k2",
    "QWEN3_30B_A3B": "qwen3-30b-a3b", "QWEN3_NEXT_80B_A3B": "qwen3-next-80b-a3b",
    "GPT_OSS_120B": "gpt-oss-120b", "NEMOTRON_3_NANO": "nemotron-3-nano-30b-a3b",
    "NEMOTRON_3_SUPER": "nemotron-3-super-120b-a12b",
}  # fmt: skip
GPUS = {
    "GB300": "gb300-nvl72-288gb", "GB200": "gb200-nvl72-186gb", "B300": "b300-sxm-288gb",
    "B200": "b200-sxm-180gb", "H100": "h100-sxm-80gb",
}  # fmt: skip
FORMATS = {
    "BF16": "bf16", "FP8_CS": "float8-tensorwise", "FP8_MX": "mxfp8", "NVFP4": "nvfp4",
}  # fmt: skip
NAME = re.compile(
    rf"({'|'.join(MODELS)})_(?:PRETRAIN_CONFIG_)?({'|'.join(GPUS)})_({'|'.join(FORMATS)})"
    r"(?:_BASE_CONFIG)?(?:_V(\d))?"
)
Found = tuple[str, str, bool]


def configurations(checkout: Path, tag: str) -> dict[tuple[str, str, str], Any]:
    """The last variant of each configuration, by model, GPU and format."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *words], check=True, capture_output=True, text=True
        ).stdout

    text = git("show", f"{tag}:{FOLDER}/utils/utils.py")
    start = text.index("@dataclass\nclass WorkloadBaseConfig")
    end = re.compile(r"^(?:@|def |class (?!Workload))", re.M).search(text, start + 20)
    base: dict[str, Any] = {}
    head = "from dataclasses import dataclass, field, replace\nfrom typing import *\n"
    exec(head + text[start : end.start() if end else None], base)
    module: Any = types.ModuleType("utils.utils")
    module.WorkloadBaseConfig = base["WorkloadBaseConfig"]
    sys.modules |= {"utils": types.ModuleType("utils"), "utils.utils": module}
    found: dict[tuple[str, str, str], tuple[int, Any]] = {}
    for path in git("ls-tree", "-r", "--name-only", tag, f"{FOLDER}/configs").split():
        if not path.endswith("workload_base_configs.py"):
            continue
        names: dict[str, Any] = {"__name__": path}
        exec(git("show", f"{tag}:{path}"), names)
        for name, value in names.items():
            said = NAME.fullmatch(name)
            if said:
                key, variant = (said[1], said[2], said[3]), int(said[4] or 1)
                found[key] = max(found.get(key, (0, None)), (variant, value), key=lambda x: x[0])
    return {key: value for key, (_, value) in found.items()}


def theirs(value: Any) -> Found:
    graphs = f"{value.cuda_graph_impl} {value.cuda_graph_scope}"
    kind = "none" if value.cuda_graph_impl in (None, "none") else "partial"
    return (
        value.moe_flex_dispatcher_backend or "alltoall",
        "full" if "full_iteration" in graphs else kind,
        bool(value.moe_a2a_overlap),
    )


def ours(model: str, gpu: str, precision: str, nemo: str, value: Any) -> Found:
    training = {"seq_len": 4096, "global_batch_size": value.global_batch_size}
    training |= {"trainer": "megatron", "trainer_version": f"NeMo {nemo}"}
    cluster = {"gpu": gpu, "num_gpus": value.num_gpus}
    job = read_job({"model": model, "cluster": cluster, "training": training})
    recipe = expert_recipe(job.model, job.cluster, job.training, precision)
    if recipe is None:
        return "alltoall", "none", False  # what a job without a recipe has
    return recipe.dispatcher, recipe.graphs, recipe.overlap


def differences(checkout: Path) -> Iterator[str]:
    for tag, nemo in TAGS.items():
        for (model, gpu, name), value in sorted(configurations(checkout, tag).items()):
            own = ours(MODELS[model], GPUS[gpu], FORMATS[name], nemo, value)
            if own != theirs(value):
                yield f"NeMo {nemo} {model} {gpu} {name}: theirs {theirs(value)}, ours {own}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    for line in differences(parser.parse_args().checkout):
        print(line)


if __name__ == "__main__":
    main()
