"""What enumeration leaves out by judgement, looked for in every job.

    python benchmarks/beyond_enumeration.py [--markdown docs/beyond-enumeration.md]

A gain is that of the fastest layout found with a value that no domain lists
(`planner/search/left_out.py`), in the exact simulation, over the best that enumeration has.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from planner.errors import PlannerError
from planner.intake.jobs import read_job
from planner.search.one_size import sample, search_size
from planner.specs.job import Job

INTRO = """# What lies beyond enumeration

Domains leave out what is legal and cannot win by judgement: uneven numbers of stages in steps of at
most 25%, tensor parallelism beyond NVLink, block and uniform recomputation of every count, long
microbatches (`planner/search/space/domains.py`). The search puts every such value of the contract
into the best layouts; where one is faster, the judgement was wrong, and Optuna proposes over all
fields from there. Written by `python benchmarks/beyond_enumeration.py --markdown
docs/beyond-enumeration.md`, on the exact simulation.

"""


def jobs() -> Iterator[tuple[str, Job]]:
    """Dense models and mixtures, small clusters and large ones, under both trainers."""
    cases = [
        ("llama3-8b", "l40s", 8, 8192, 64),
        ("llama3-8b", "a100-sxm-40gb", 8, 32768, 16),
        ("llama3-8b", "a100-sxm-40gb", 16, 8192, 64),
        ("llama2-13b", "a100-sxm-40gb", 8, 4096, 128),
        ("llama3-70b", "a100-sxm-40gb", 64, 8192, 128),
        ("llama3-70b", "l40s", 128, 4096, 512),
        ("llama3-8b", "h100-sxm-80gb", 64, 32768, 64),
        ("llama3-70b", "h100-sxm-80gb", 32, 8192, 128),
        ("llama3-70b", "h100-sxm-80gb", 64, 8192, 128),
        ("llama3-70b", "a100-sxm-80gb", 128, 8192, 512),
        ("llama3-70b", "h100-sxm-80gb", 256, 8192, 512),
        ("llama3-70b", "h100-sxm-80gb", 128, 32768, 128),
        ("llama3.1-405b", "h100-sxm-80gb", 512, 8192, 512),
        ("llama3.1-405b", "h100-sxm-80gb", 256, 8192, 256),
        ("gpt3-175b", "a100-sxm-80gb", 256, 2048, 1024),
        ("mixtral-8x7b", "h100-sxm-80gb", 64, 4096, 256),
        ("mixtral-8x22b", "h100-sxm-80gb", 128, 4096, 512),
        ("qwen3-235b-a22b", "h100-sxm-80gb", 128, 4096, 512),
    ]
    for trainer in ("megatron", "torchtitan"):
        for model, gpu, num_gpus, seq_len, batch in cases:
            job = read_job(
                {
                    "model": model,
                    "cluster": {"gpu": gpu, "num_gpus": num_gpus},
                    "training": {
                        "seq_len": seq_len,
                        "global_batch_size": batch,
                        "trainer": trainer,
                    },
                    "search": {"prefer": "fastest"},
                }
            )
            yield f"{model}, {num_gpus} {gpu.split('-')[0].upper()}, {trainer}", job


def rows() -> Iterator[tuple[str, str, float, int]]:
    """(job, best by enumeration, gain of the study, its trials)."""
    for name, job in jobs():
        try:
            at_size = search_size(job, job.cluster, lambda _: None, samples=False)
        except PlannerError:
            continue
        if at_size.candidates:
            best = f"{at_size.candidates[0][2].short()}, {at_size.best_seconds:.3f} s"
            sample(job, at_size)
            study = at_size.study or {}
            yield name, best, float(str(study.get("gain", 0.0))), int(str(study["trials"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    started, found = time.monotonic(), list(rows())
    sampled = [row for row in found if row[3]]
    gains = [row[2] for row in sampled]
    text = (
        f"{INTRO}{len(found)} jobs. A value left out is faster in {len(sampled)} of them; largest "
        f"gain {max(gains, default=0.0):.2%}.\n\n| job | best by enumeration | trials | gain |\n"
        "|---|---|--:|--:|\n"
    )
    text += "".join(
        f"| {n} | {best} | {trials} | {gain:.2%} |\n" for n, best, gain, trials in found
    )
    print(text, f"{time.monotonic() - started:.0f} s")
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
