"""Holds what we say of NVIDIA's recipes against Megatron-Bridge's own configurations.

    python -m benchmarks.parsed_recipes CHECKOUT
    python -m benchmarks.parsed_recipes CHECKOUT --judge [TAG]
    python -m benchmarks.parsed_recipes CHECKOUT --search TAG

CHECKOUT: a clone of Megatron-Bridge with its tags. For every tag of TAGS the modules of
scripts/performance/configs are run, as its launcher does, with `WorkloadBaseConfig` of the same
tag; of several variants of a configuration the last counts. Prints each difference from
`planner.trainers.recipes`: dispatcher, graphs, overlap. A recipe's function may still change them:
that of Qwen3 235B sets its dispatcher to alltoall on nodes and Hopper (`qwen3_llm_pretrain`).
--judge prices every variant on all of its card: prints those refused, and those that do not fit.
--search compares with the fastest layout that a search finds, of the same precision and on all of
the card, where the job names neither graphs nor overlap: prints what is slower by TOLERANCE.
"""

import argparse
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.free_against_fixed import TOLERANCE, fastest
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.trainers.recipes import expert_recipe
from planner.units import GIB

FOLDER = "scripts/performance"
TAGS = {
    "v0.2.0": "25.11", "v0.3.0": "26.02", "v0.3.1": "26.02.01", "v0.4.0": "26.04",
    "v0.4.2": "26.04.01", "v0.5.0": "26.06", "v0.5.1": "26.06.01",
}  # fmt: skip
DENSE = {
    "LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA31_405B": "llama3.1-405b",
    "NEMOTRONH_56B": "nemotron-h-56b",
}  # fmt: skip
TOKENS = {name: 8192 for name in (*DENSE, "NEMOTRON_3_NANO", "NEMOTRON_3_SUPER")}  # else 4096
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
    "FP8_SC": "float8-blockwise",
}  # fmt: skip
NAME = re.compile(
    rf"({'|'.join(MODELS | DENSE)})_(?:PRETRAIN_CONFIG_)?({'|'.join(GPUS)})_({'|'.join(FORMATS)})"
    r"(?:_BASE_CONFIG)?(?:_V(\d))?"
)
Key = tuple[str, str, str]
Found = tuple[str, str, bool]


def configurations(checkout: Path, tag: str) -> Iterator[tuple[str, Key, int, Any]]:
    """(name, (model, GPU, format), variant, value) of each configuration."""

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
    for path in git("ls-tree", "-r", "--name-only", tag, f"{FOLDER}/configs").split():
        if not path.endswith("workload_base_configs.py"):
            continue
        names: dict[str, Any] = {"__name__": path}
        exec(git("show", f"{tag}:{path}"), names)
        for name, value in names.items():
            said = NAME.fullmatch(name)
            if said:
                yield name, (said[1], said[2], said[3]), int(said[4] or 1), value


def layers_of(text: str) -> list[int]:
    """Layers of each stage in Megatron-LM's letters: "Et*4|(t*4|)*14tmL"."""
    while (more := re.sub(r"\(([^()]*)\)\*(\d+)", lambda x: x[1] * int(x[2]), text)) != text:
        text = more
    stages = re.sub(r"(\w)\*(\d+)", lambda x: x[1] * int(x[2]), text).split("|")
    return [stage.count("t") for stage in stages]


def job_of(key: Key, value: Any, nemo: str) -> dict[str, Any]:
    """What a user would ask about this configuration."""
    model, gpu, precision = key
    layout = {
        "tp": value.tensor_model_parallel_size, "pp": value.pipeline_model_parallel_size,
        "cp": value.context_parallel_size, "ep": value.expert_model_parallel_size,
        "micro_batch_size": value.micro_batch_size, "precision": FORMATS[precision],
    }  # fmt: skip
    if layout["pp"] > 1 and (value.virtual_pipeline_model_parallel_size or 1) > 1:
        layout["virtual_stages"] = value.virtual_pipeline_model_parallel_size
        layout["pp_schedule"] = "Interleaved1F1B"
    if getattr(value, "pp_layout", None):
        layout["layers_per_stage"] = layers_of(value.pp_layout)
    if value.moe_flex_dispatcher_backend and model in MODELS:
        layout["moe_dispatcher"] = value.moe_flex_dispatcher_backend
    if value.recompute_modules or value.recompute_num_layers:
        modules = f"modules-{'+'.join(value.recompute_modules or ())}"
        layout["ac"] = modules if value.recompute_modules else f"block-{value.recompute_num_layers}"
    if value.cpu_offloading_num_layers:
        layout["activation_offload_layers"] = value.cpu_offloading_num_layers
    if value.use_megatron_fsdp:
        layout["zero_stage"] = 3
    training = {"seq_len": TOKENS.get(model, 4096), "global_batch_size": value.global_batch_size}
    training |= {"trainer": "megatron-bridge", "trainer_version": f"NeMo {nemo}"}
    _, training["cuda_graphs"], overlap = theirs(value)
    cluster = {"gpu": GPUS[gpu], "num_gpus": value.num_gpus, "memory_fraction": 1.0}
    return {
        "model": (MODELS | DENSE)[model], "cluster": cluster, "layout": layout,
        "training": {**training, "overlap": {"ep": True} if overlap else {}},
    }  # fmt: skip


def judged(checkout: Path, tags: Sequence[str], *, search: bool) -> Iterator[str]:
    """A line for each configuration that is refused or does not fit, or beats a search."""
    seen, counts = set(), Counter[str]()
    for tag in tags:
        for name, key, _, value in configurations(checkout, tag):
            job = job_of(key, value, TAGS[tag])
            known = repr({**job, "training": {**job["training"], "trainer_version": ""}})
            if known in seen:
                continue
            seen.add(known)
            found = estimate_job(read_job(job))
            counts["judged"] += 1
            if not found.valid:
                counts["refused"] += 1
                yield f"{tag} {name}: refused, {'; '.join(map(str, found.violations))}"
            elif not found.fits:
                counts["do not fit"] += 1
                risk, size = found.oom_probability, found.device_bytes / GIB
                yield f"{tag} {name}: does not fit, P {risk:.2f}, {size:.1f} GiB"
            elif search:
                free = {**job, "search": {"prefer": "fastest"}}
                del free["layout"], free["training"]["cuda_graphs"], free["training"]["overlap"]
                best = fastest(free, {"precision": job["layout"]["precision"]})
                ratio = best[0] / found.step_seconds if best else np.inf
                if ratio > 1.0 + TOLERANCE:
                    counts["beat the search"] += 1
                    yield f"{tag} {name}: {ratio - 1.0:+.1%} {best and best[1].short()}"
    yield ", ".join(f"{count} {what}" for what, count in counts.items())


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


def _rank(found: tuple[str, Key, int, Any]) -> int:
    return found[2]


def differences(checkout: Path) -> Iterator[str]:
    for tag, nemo in TAGS.items():
        last = {key: value for _, key, _, value in sorted(configurations(checkout, tag), key=_rank)}
        for (model, gpu, name), value in sorted(last.items()):
            if model not in MODELS:
                continue
            own = ours(MODELS[model], GPUS[gpu], FORMATS[name], nemo, value)
            if own != theirs(value):
                yield f"NeMo {nemo} {model} {gpu} {name}: theirs {theirs(value)}, ours {own}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--judge", nargs="?", const="", metavar="TAG")
    parser.add_argument("--search", metavar="TAG")
    asked = parser.parse_args()
    tag, search = asked.search or asked.judge, asked.search is not None
    lines = differences(asked.checkout)
    if tag is not None:
        lines = judged(asked.checkout, [tag] if tag else list(TAGS), search=search)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
