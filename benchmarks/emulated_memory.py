"""Peak allocated memory of single ranks of large layouts, from fake tensors and from the planner.

    python benchmarks/emulated_memory.py [--only NAME ...] [--json OUT.jsonl]

Each row runs `python -m planner.probes.worker` in its own process with FakeTensorMode and torch's
fake process group: no GPU, no weights, exact shapes. Some rows have fewer layers; the estimate is
then of the same smaller model. Prints one line per row and the largest difference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.estimates import estimate_job
from planner.probes.protocol import ProbeResult, ProbeTask
from planner.probes.reference.recipe import ReferenceRecipe
from planner.units import GIB

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.03
LONG = {"seq_len": 131072, "global_batch_size": 8}
PIPE_405B = {"dp_shard": 4, "tp": 8, "pp": 16, "ac": "full"}
LLAMA_8B = {
    "model": "llama3.1-8b",
    "training": {"seq_len": 8192, "global_batch_size": 16},
    "gpus": 8,
}
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"8b-fsdp8-{ac}": {**LLAMA_8B, "layout": {"dp_shard": 8, "micro_batch_size": 2, "ac": ac}}
        for ac in ("none", "selective-op", "full")
    },
    "8b-fsdp8-mbs1": {**LLAMA_8B,
        "layout": {"dp_shard": 8, "micro_batch_size": 1, "ac": "selective-op"}},
    "8b-fsdp8-zero2": {**LLAMA_8B,
        "layout": {"dp_shard": 8, "micro_batch_size": 2, "ac": "full", "zero_stage": 2}},
    "8b-fsdp8-layer2": {**LLAMA_8B,
        "layout": {"dp_shard": 8, "micro_batch_size": 2, "ac": "selective-layer-2"}},
    "8b-fsdp64": {
        "model": "llama3.1-8b", "gpus": 64, "training": {"seq_len": 8192, "global_batch_size": 128},
        "layout": {"dp_shard": 64, "micro_batch_size": 2, "ac": "selective-op"},
    },
    "8b-hsdp8x8": {
        "model": "llama3.1-8b", "gpus": 64, "training": {"seq_len": 8192, "global_batch_size": 128},
        "layout": {"dp_replicate": 8, "dp_shard": 8, "micro_batch_size": 2, "ac": "full"},
    },
    "70b-fsdp32-tp8": {
        "model": "llama3.1-70b", "gpus": 256,
        "training": {"seq_len": 8192, "global_batch_size": 512},
        "layout": {"dp_shard": 32, "tp": 8, "micro_batch_size": 16, "ac": "full"},
    },
    **{
        f"405b-{name}": {
            "model": "llama3.1-405b", "gpus": 512,
            "training": {"seq_len": 8192, "global_batch_size": 128},
            "layout": PIPE_405B, "rank": rank,
        }
        for name, rank in (("first", 0), ("middle", 8 * 32), ("last", 15 * 32))
    },
    "mixtral-ep8": {
        "model": {"base": "mixtral-8x7b", "num_hidden_layers": 4}, "gpus": 64,
        "training": {"seq_len": 4096, "global_batch_size": 64},
        "layout": {"dp_shard": 64, "ep": 8, "micro_batch_size": 1, "ac": "selective-op"},
    },
    "mixtral-ep8-full": {
        "model": {"base": "mixtral-8x7b", "num_hidden_layers": 4}, "gpus": 64,
        "training": {"seq_len": 4096, "global_batch_size": 64},
        "layout": {"dp_shard": 64, "ep": 8, "micro_batch_size": 1, "ac": "full"},
    },
    "deepseek-v3-ep32": {
        "model": {"base": "deepseek-v3", "num_hidden_layers": 5}, "gpus": 256,
        "training": {"seq_len": 4096, "global_batch_size": 256},
        "layout": {"dp_shard": 256, "ep": 32, "micro_batch_size": 1, "ac": "full"},
    },
    "8b-cp8-128k": {
        "model": {"base": "llama3.1-8b", "num_hidden_layers": 4}, "gpus": 64, "training": LONG,
        "layout": {"dp_shard": 8, "cp": 8, "ac": "full"}},
    "8b-cp8-128k-op": {
        "model": {"base": "llama3.1-8b", "num_hidden_layers": 4}, "gpus": 64, "training": LONG,
        "layout": {"dp_shard": 8, "cp": 8, "ac": "selective-op"},
    },
    "8b-tp8-mbs8-none": {
        "model": {"base": "llama3.1-8b", "num_hidden_layers": 8}, "gpus": 64,
        "training": {"seq_len": 8192, "global_batch_size": 64},
        "layout": {"dp_shard": 8, "tp": 8, "micro_batch_size": 8, "ac": "none"},
    },
}  # fmt: skip


def task_of(name: str, row: dict[str, Any]) -> ProbeTask:
    """The row as a probe."""
    job = {
        "model": row["model"],
        "cluster": {"gpu": row.get("gpu", "h100-sxm-80gb"), "num_gpus": row["gpus"]},
        "training": {"trainer": "torchtitan", **row["training"]},
        "layout": row["layout"],
    }
    return ProbeTask(
        id=name, job=job, device="cpu", emulate_rank=row.get("rank", 0), fake_tensors=True, steps=1
    )


def emulated(task: ProbeTask) -> ProbeResult:
    """Runs the task in its own process."""
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        given, result = Path(folder) / "task.json", Path(folder) / "result.json"
        given.write_text(task.model_dump_json(), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "planner.probes.worker", str(given), str(result)],
            check=False,
            cwd=ROOT,
        )
        return ProbeResult.model_validate_json(result.read_text(encoding="utf-8"))


def estimated(task: ProbeTask) -> dict[str, float]:
    """The planner's parts of the same rank's memory, bytes."""
    recipe = ReferenceRecipe.of(task)
    answer = estimate_job(recipe.task.parsed())
    assert answer.memory is not None
    assert task.emulate_rank is not None
    inside = recipe.layout.num_gpus // recipe.layout.pp
    return answer.memory.stages[task.emulate_rank // inside].model_dump()


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yields each row's figures as soon as they are known."""
    for name in names or ROWS:
        task, start = task_of(name, ROWS[name]), time.monotonic()
        outcome, parts = emulated(task).outcome, estimated(task)
        if outcome.status != "ok":
            yield {"name": name, "error": outcome.message}
            continue
        peak = outcome.memory[0].peak_allocated_bytes
        assert peak is not None
        yield {
            "name": name,
            "emulated_bytes": peak,
            "estimated_bytes": parts["peak_allocated_bytes"],
            "difference": parts["peak_allocated_bytes"] / peak - 1.0,
            "parts": parts,
            "counts": outcome.counts,
            "seconds": time.monotonic() - start,
        }


def main() -> int:
    """Prints the table; status 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(ROWS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(f"{'row':20} {'emulated':>10} {'estimated':>10} {'off by':>8} {'seconds':>8}")
    for row in rows(options.only):
        found.append(row)
        if "error" in row:
            print(f"{row['name']:20} failed: {row['error'][:200]}", flush=True)
            continue
        gib = [row[key] / GIB for key in ("emulated_bytes", "estimated_bytes")]
        print(
            f"{row['name']:20} {gib[0]:6.2f} GiB {gib[1]:6.2f} GiB {row['difference']:+8.1%} "
            f"{row['seconds']:8.0f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    differences = [abs(row["difference"]) for row in found if "difference" in row]
    if differences:
        within = sum(value <= GOAL for value in differences)
        print(f"{within} of {len(differences)} within {GOAL:.0%}; largest {max(differences):.1%}")
    return 0 if len(differences) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
