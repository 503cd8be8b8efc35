"""What the space beyond enumeration is worth: samplers against random draws and coordinate descent.

    python benchmarks/beyond_enumeration.py [--trials 128] [--seeds 3] [--samplers tpe,cma-es,...]
                                            [--markdown docs/beyond-enumeration.md]

For every job the enumerated search gives its best layout; each method then walks the same space
(`planner.search.variations.beyond`) with equally many layouts priced, and the gain is that of the
fastest layout that fits, in the exact simulation. Coordinate descent tries both neighbours of one
coordinate after the other, from the best layout, and starts again from a random point when it is
stuck. The last column is no walk: the best candidates with their pipeline ranks inside the
data-parallel ones, which Megatron-LM alone can be told.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from planner.cost.price import Pricer
from planner.errors import PlannerError
from planner.estimates import simulated_columns
from planner.intake.jobs import read_job
from planner.search.fit import OOM_LIMIT
from planner.search.one_size import OneSize, beyond_enumeration, search_size, worth_sampling
from planner.search.paper_study import sample_beyond
from planner.search.sampled import Priced
from planner.search.variations.beyond import Beyond
from planner.specs.job import Job

DESCENT, ORDER = "coordinate descent", "pipeline ranks inside data ranks"
PP_INSIDE = ("tp", "cp", "pp", "dp_shard", "dp_replicate")  # Megatron-LM --use-tp-pp-dp-mapping
REORDERED = 40  # candidates that are priced in the other order
INTRO = """# What lies beyond enumeration

The search enumerates degrees, modes and schedules, bisects how much is recomputed and bounds what
another split of layers can gain (docs/decisions/0002). What is left is to vary splits and
recomputation together, in any chunk of any rank (`planner/search/variations/beyond.py`). This page
is written by `python benchmarks/beyond_enumeration.py --markdown docs/beyond-enumeration.md`: what
each method finds there, against the best that the search has without it, in the exact simulation.

"""
STEPS = (1, -1, 5, -5, 20, -20)


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


def descend(beyond: Beyond, best_seconds: float, most: int, seed: int) -> Priced:
    """Coordinate descent from the best layout, until `most` layouts were priced or refused."""
    draw, ranges = random.Random(seed), beyond.ranges
    priced = Priced(beyond=beyond, best_seconds=best_seconds)
    point = dict(beyond.origins[0])
    while len(priced.known) < most:
        (here,) = priced.at([point])
        value = here.step_seconds if here.fits and here.step_seconds else float("inf")
        moved = False
        for name, (low, high) in ranges.items():
            for step in STEPS:
                if low <= point[name] + step <= high and len(priced.known) < most:
                    near = {**point, name: point[name] + step}
                    (there,) = priced.at([near])
                    if there.fits and there.step_seconds and there.step_seconds < value:
                        point, value, moved = near, there.step_seconds, True
        if not moved:
            point = {name: draw.randint(low, high) for name, (low, high) in ranges.items()}
    return priced


def gain_of(at_size: OneSize, seconds: float) -> float:
    """What a step of the best enumerated layout takes longer than this."""
    return at_size.candidates[0][0] / min(seconds, at_size.candidates[0][0]) - 1.0


def gains(
    job: Job, samplers: list[str], trials: int, seeds: int
) -> tuple[OneSize, Beyond, dict[str, list[float]]] | None:
    """Gains by method, one for each seed; None where the trainer cannot train the model."""
    try:
        at_size = search_size(job, job.cluster, lambda _: None, samples=False)
    except PlannerError:
        return None
    if not at_size.candidates:
        return None
    beyond, best = beyond_enumeration(job, at_size), at_size.candidates[0][0]
    found: dict[str, list[float]] = {name: [] for name in (*samplers, DESCENT, ORDER)}
    if job.training.trainer == "megatron":
        found[ORDER] = [reordered_gain(job, at_size)]
    for seed in range(seeds) if beyond.layouts else ():
        for name in samplers:
            sampled = sample_beyond(
                beyond, name=name, seed=seed, num_trials=trials, best_seconds=best
            )
            steps = [one.step_seconds for one in sampled.trials if one.fits and one.step_seconds]
            found[name].append(gain_of(at_size, min(steps, default=best)))
        found[DESCENT].append(gain_of(at_size, descend(beyond, best, trials, seed).best_seconds))
    return at_size, beyond, found


def reordered_gain(job: Job, at_size: OneSize) -> float:
    """Gain of the best pipelined candidate whose pipeline ranks lie inside the data ranks."""
    cluster = job.cluster.model_copy(update={"rank_order": PP_INSIDE})
    pricer = Pricer.build(job.model, cluster, job.training)
    piped = [layout for _, _, layout in at_size.candidates if layout.pp > 1][:REORDERED]
    steps = [step for step, oom, _ in simulated_columns(pricer, piped) if oom <= OOM_LIMIT]
    return gain_of(at_size, min(steps, default=float("inf")))


def main() -> None:
    """Prints the table, and writes it where `--markdown` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=128, help="layouts for each method")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samplers", default="tpe,cma-es,nsga2,random")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    samplers = options.samplers.split(",")
    lines = [
        "| job | best without it | " + " | ".join((*samplers, DESCENT, ORDER)) + " |",
        "|---|---|" + "--:|" * (len(samplers) + 2),
    ]
    walked, every = 0, dict[str, list[float]]()
    for name, job in jobs():
        found = gains(job, samplers, options.trials, options.seeds)
        if found is None:
            continue
        at_size, beyond, by_method = found
        best = at_size.candidates[0]
        cells = [_cell(values) for values in by_method.values()]
        lines.append(f"| {name} | {best[2].short()}, {best[0]:.3f} s | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        walked += worth_sampling(beyond, best[0]) is None
        for method, values in by_method.items():
            every.setdefault(method, []).append(mean(values) if values else 0.0)
    summary = [
        f"{len(lines) - 2} jobs ('-': no pipeline near the best). A search samples by itself in "
        f"{walked} of them, where anything is left to gain; here all walk. {options.trials} "
        f"layouts for each method, mean (largest) of {options.seeds} seeds.",
        "Mean and largest gain over all jobs: "
        + "; ".join(
            f"{method} {mean(values):.2%}, {max(values):.2%}" for method, values in every.items()
        )
        + ".",
    ]
    print("\n".join(summary))
    if options.markdown:
        text = INTRO + "\n".join([*summary, "", *lines]) + "\n"
        options.markdown.write_text(text, encoding="utf-8")


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    alone = f"{mean(values):.2%}"
    return alone if len(values) == 1 else f"{alone} ({max(values):.2%})"


if __name__ == "__main__":
    main()
