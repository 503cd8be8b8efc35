"""Checks whether a change of the code moved any prediction, plan, replayed study or export.

    python benchmarks/unchanged.py --write FILE      records what this checkout answers
    python benchmarks/unchanged.py --against FILE    exit 1 and the differences, if it differs

A refactor moves nothing. Four tables: an estimate for every published row (each number of the whole
document), plans of JOBS with every ranked layout, studies replayed on published sweeps and
generated landscapes, and the files that export writes for number one of each plan. Texts may
change; numbers and chosen layouts may not. Numbers are compared to DIGITS significant digits,
because processors differ in the last ones.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from landscapes import JOBS as LANDSCAPES
from landscapes import generate
from replay_strategies import Truth
from replay_studies import play
from replay_sweeps import published_sweeps

from planner.estimates import estimate_job
from planner.export import export
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend

PUBLIC = Path(__file__).parent / "measured" / "public.jsonl"
DIGITS, STUDIES = 12, 8
HOPPER = "h100-sxm-80gb"
JOBS: dict[str, dict[str, Any]] = {
    "8B on 8": {"model": "llama3.1-8b", "gpu": HOPPER, "num_gpus": 8, "seq_len": 8192, "batch": 64},
    "70B on 256": {
        "model": "llama3-70b",
        "gpu": HOPPER,
        "num_gpus": 256,
        "seq_len": 8192,
        "batch": 512,
    },
    "405B on 512": {
        "model": "llama3.1-405b",
        "gpu": HOPPER,
        "num_gpus": 512,
        "seq_len": 8192,
        "batch": 512,
    },
    "8B, 131k tokens, on 64 H200": {
        "model": "llama3.1-8b",
        "gpu": "h200-sxm-141gb",
        "num_gpus": 64,
        "seq_len": 131072,
        "batch": 64,
    },
    "13B on 16 A100 40 GB": {
        "model": "llama2-13b",
        "gpu": "a100-sxm-40gb",
        "num_gpus": 16,
        "seq_len": 4096,
        "batch": 64,
    },
    "8x7B on 64": {
        "model": "mixtral-8x7b",
        "gpu": HOPPER,
        "num_gpus": 64,
        "seq_len": 4096,
        "batch": 256,
    },
    "16B MoE on 64": {
        "model": "deepseek-v2-lite",
        "gpu": HOPPER,
        "num_gpus": 64,
        "seq_len": 4096,
        "batch": 512,
    },
    "70B with Megatron on 64 B200": {
        "model": "llama3-70b",
        "gpu": "b200-sxm-180gb",
        "num_gpus": 64,
        "seq_len": 8192,
        "batch": 128,
        "training": {"trainer": "megatron"},
    },
    "8B with open size on up to 16": {
        "model": "llama3-8b",
        "gpu": HOPPER,
        "num_gpus": 16,
        "seq_len": 4096,
        "batch": 32,
        "search": {"fix": {"precision": "bf16"}, "prefer": "fastest"},
    },
    "405B on 16,384": {
        "model": "llama3-405b",
        "gpu": HOPPER,
        "num_gpus": 16384,
        "seq_len": 8192,
        "batch": 2048,
    },
    "405B on 128, with CPU offload": {
        "model": "llama3-405b",
        "gpu": HOPPER,
        "num_gpus": 128,
        "seq_len": 8192,
        "batch": 256,
    },
    "70B for the least money": {
        "model": "llama3-70b",
        "gpu": HOPPER,
        "num_gpus": "64..256",
        "seq_len": 8192,
        "batch": 512,
        "search": {"objective": "cost"},
    },
    "70B in the least memory": {
        "model": "llama3-70b",
        "gpu": HOPPER,
        "num_gpus": 128,
        "seq_len": 8192,
        "batch": 256,
        "search": {"objective": "memory"},
    },
    "Qwen3 235B on 256": {
        "model": "qwen3-235b-a22b",
        "gpu": HOPPER,
        "num_gpus": 256,
        "seq_len": 4096,
        "batch": 2048,
    },
    "Qwen3 235B with Megatron on 128": {
        "model": "qwen3-235b-a22b",
        "gpu": HOPPER,
        "num_gpus": 128,
        "seq_len": 8192,
        "batch": 512,
        "training": {"trainer": "megatron"},
    },
    "Kimi K2 on 1,024": {
        "model": "kimi-k2",
        "gpu": HOPPER,
        "num_gpus": 1024,
        "seq_len": 4096,
        "batch": 8192,
    },
    "DeepSeek V3 on 2,048 H800": {
        "model": "deepseek-v3",
        "gpu": "h800-sxm-80gb",
        "num_gpus": 2048,
        "seq_len": 4096,
        "batch": 15360,
    },
    "DeepSeek V3 with Megatron on 2,048": {
        "model": "deepseek-v3",
        "gpu": HOPPER,
        "num_gpus": 2048,
        "seq_len": 4096,
        "batch": 15360,
        "training": {"trainer": "megatron"},
    },
}


def as_job(case: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": case["model"],
        "cluster": {"gpu": case["gpu"], "num_gpus": case["num_gpus"]},
        "training": {
            "seq_len": case["seq_len"],
            "global_batch_size": case["batch"],
            **case.get("training", {}),
        },
        "search": {"top_k": 5, **case.get("search", {})},
    }


def rounded(value: float | int) -> str:
    return f"{value:.{DIGITS}g}"


def numbers_in(document: object) -> Iterator[str]:
    """Every number of a document of dicts and lists, in no particular order."""
    match document:
        case bool() | None | str():
            return
        case int() | float():
            yield rounded(document)
        case dict():
            for value in document.values():
                yield from numbers_in(value)
        case list() | tuple():
            for value in document:
                yield from numbers_in(value)


def digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def of_estimate(document: Mapping[str, Any]) -> list[str]:
    """Step seconds and the fullest GPU's bytes in readable form, then a digest of every number."""
    seconds, memory = document.get("step_seconds"), document.get("memory") or {}
    return [
        "-" if seconds is None else rounded(seconds),
        *(
            f"{key} {rounded(memory[key])}"
            for key in sorted(memory)
            if isinstance(memory[key], int | float)
        ),
        digest(sorted(numbers_in(document))),
    ]


def predictions() -> dict[str, Any]:
    """Every published row by its id."""
    rows = [json.loads(line) for line in PUBLIC.read_text().splitlines()]
    return {row["id"]: of_estimate(estimate_job(read_job(row)).model_dump()) for row in rows}


def plans() -> tuple[dict[str, Any], dict[str, Any]]:
    """(plans of JOBS, digests of the files that export writes for their number one)."""
    found, exported = {}, {}
    for name, case in JOBS.items():
        job = read_job(as_job(case))
        plan = recommend(job, now=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        first = plan.ranked[0]
        found[name] = {
            "ranked": [
                [str(one.layout), *of_estimate(one.estimate.model_dump())] for one in plan.ranked
            ],
            "searched": [
                plan.searched.layouts,
                plan.searched.priced,
                plan.searched.fitting,
                plan.searched.simulated,
            ],
            "regret": digest(sorted(numbers_in(plan.regret.model_dump()))) if plan.regret else None,
            "pareto": digest([str(one.layout) for one in plan.pareto]),
            "sensitivity": digest(
                [[str(one.layout), rounded(one.step_ratio or 0.0)] for one in plan.sensitivity]
            ),
            "run": digest(sorted(numbers_in(first.run.model_dump()))) if first.run else None,
        }
        cluster = job.cluster.model_copy(update={"num_gpus": first.num_gpus})
        written = export(first.layout, job.model, cluster, job.training, to=job.training.trainer)
        exported[name] = {file: digest(text) for file, text in written.files.items()}
        print(name, file=sys.stderr, flush=True)
    return found, exported


def replayed() -> dict[str, Any]:
    """Studies by their truth: rows and step seconds of all probes in order, each best so far."""
    truths = [
        *published_sweeps()[:STUDIES],
        *(Truth.of_landscape(generate(name, 0.3, 0), 0.02) for name in LANDSCAPES),
    ]
    found = {}
    for number, truth in enumerate(truths):
        played = play(truth, number, probes=6, tolerance=-1.0)
        told = [
            [row, None if seconds is None else rounded(seconds)] for row, seconds in played.told
        ]
        best = [rounded(event.best_seconds) for event in played.events if event.best_seconds]
        found[f"{number} {truth.name}"] = [told, best[-1:], digest(best)]
    return found


def table() -> dict[str, Any]:
    """The answers of this checkout."""
    made, exported = plans()
    return {"predictions": predictions(), "plans": made, "exports": exported, "replays": replayed()}


def differences(before: object, after: object, place: str = "") -> Iterator[str]:
    """One line for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differences(before.get(key), after.get(key), f"{place}/{key}")
    elif before != after:
        yield f"{place}: {before} -> {after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", type=Path)
    chosen.add_argument("--against", type=Path)
    options = parser.parse_args()
    now = json.loads(json.dumps(table()))
    if options.write:
        options.write.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        return
    before = json.loads(options.against.read_text())
    found = sorted(differences(before, now))
    print("\n".join(found))
    for name in now:
        print(
            f"{name}: {len(now[name])} compared, "
            f"{sum(line.startswith('/' + name) for line in found)} differences"
        )
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
