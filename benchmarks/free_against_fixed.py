"""Is a search ever worse than itself with some fields fixed?

    python -m benchmarks.free_against_fixed [--jobs N] [--fixes N] [--seed N] [--first N]
    python -m benchmarks.free_against_fixed --published [ID]

Draws random jobs, and for each of them random fixes: the values of one to three fields of a layout
that the trainer can run and that fits, every third time of one with an even split into stages that
the search's steps leave out. Every second model has other layers than the published one, so that
many numbers split them evenly. The fastest layout that a search without `search.fix` finds must be
as fast as the fastest with it, but for TOLERANCE. Prints every violation, then the worst ratio.
--published compares with the layouts of published runs instead, which must fit, and searches in
their precision; ID takes the runs whose id begins so.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before NumPy starts its threads
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    )

import numpy as np

from benchmarks.screening import random_layouts
from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.errors import PlannerError
from planner.estimates import simulated_columns
from planner.intake.jobs import read_job
from planner.rules import Context, violations
from planner.rules.base import divisors
from planner.search.fit import OOM_LIMIT
from planner.search.one_size import search_size
from planner.search.space.domains import STEPS_OF_STAGES, default_domains
from planner.search.space.enumerate import build_space
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout, parse_ac
from planner.trainers.registry import TRAINERS, training_release

PUBLIC = Path(__file__).parent / "measured" / "public.jsonl"
TOLERANCE = 0.002
MODELS = (
    "llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama2-13b", "gpt2-xl", "qwen2.5-1.5b",
    "qwen2-7b", "gemma2-2b", "olmoe-1b-7b", "deepseek-v2-lite", "mixtral-8x7b", "qwen3-30b-a3b",
)  # fmt: skip
LAYERS = (14, 22, 26, 27, 28, 30, 33, 39, 42, 44, 45, 49, 52, 55, 56)
GPUS = ("h100-sxm-80gb", "a100-sxm-80gb", "a100-sxm-40gb", "a100-pcie-80gb", "h200-sxm-141gb",
        "gb200-nvl72-186gb")  # fmt: skip
SIZES = (2, 4, 6, 8, 8, 16, 16, 24, 32)
TRAINERS_DRAWN = (
    "torchtitan", "torchtitan", "megatron", "megatron", "megatron-bridge", "fsdp",
    "megatron-deepspeed",
)  # fmt: skip
# Another value of these trains another model, or is the user's to choose, as are those that a
# trainer has by request.
NOT_DRAWN = frozenset({"precision", "param_dtype", "reduce_dtype", "master_dtype"})
DRAWN, MOST_FIXED, ATTEMPTS = 400, 3, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A job, its fix, and the fastest step without and with it, in seconds."""

    job: dict[str, Any]
    fix: dict[str, Any]
    free_seconds: float
    fixed_seconds: float
    free: Layout
    fixed: Layout

    @property
    def ratio(self) -> float:
        """Above 1 where the search without a fix missed something."""
        return self.free_seconds / self.fixed_seconds

    @property
    def violated(self) -> bool:
        """Whether it missed more than TOLERANCE."""
        return self.ratio > 1.0 + TOLERANCE


def random_job(rng: np.random.Generator) -> dict[str, Any]:
    """A job whose search takes some tenths of a second."""
    num_gpus = int(rng.choice(SIZES))
    batch = int(num_gpus * rng.choice([1, 2, 4, 8, 16]) + rng.choice([0, 0, 0, num_gpus // 2]))
    name = str(rng.choice(MODELS))
    other = {"base": name, "num_hidden_layers": int(rng.choice(LAYERS))}
    return {
        "model": other if rng.random() < 0.5 else name,
        "cluster": {"gpu": str(rng.choice(GPUS)), "num_gpus": num_gpus},
        "training": {
            "seq_len": int(rng.choice([2048, 4096, 8192])),
            "global_batch_size": batch,
            "trainer": str(rng.choice(TRAINERS_DRAWN)),
        },
        "search": {"prefer": "fastest"},
    }


def fastest(job: dict[str, Any], fix: dict[str, Any]) -> tuple[float, Layout] | None:
    """(step seconds, layout) of the fastest that this search finds; None if nothing fits."""
    read = read_job({**job, "search": {**job["search"], "fix": fix}})
    found = search_size(read, read.cluster, lambda _: None).candidates
    return (found[0][0], found[0][2]) if found else None


class Runnable:
    """Layouts of a job that the trainer can run and that fit, searched or not."""

    def __init__(self, job: dict[str, Any], rng: np.random.Generator) -> None:
        read = read_job(job)
        self.rng, self.model = rng, read.model
        self.context = Context(model=read.model, cluster=read.cluster, training=read.training)
        self.pricer = Pricer.build(read.model, read.cluster, read.training)
        allow = _wide(self.context)
        self.left_alone = NOT_DRAWN | self.context.trainer.by_request
        self.batch = self._fitting(allow)
        self.even = self._fitting(allow | _unlisted(self.context))

    def _fitting(self, allow: dict[str, list[Any]]) -> LayoutBatch:
        """Random layouts of a space that fit, fastest first."""
        space = build_space(self.context, SearchSpec(allow=allow))
        seed = int(self.rng.integers(2**31))
        if not space.num_layouts:
            return space.cells
        batch = random_layouts(space, min(DRAWN, space.num_layouts), seed)
        prices = self.pricer.price(batch)
        device = prices.least_device_bytes
        fits = oom_probability(self.pricer.profile, self.pricer.cluster, device) <= OOM_LIMIT
        rows = np.flatnonzero(fits)
        return batch.take(rows[np.argsort(prices.step_seconds[rows], kind="stable")])

    @property
    def fitting(self) -> int:
        """How many fit."""
        return len(self.batch)

    def draw(self) -> Layout:
        """One of them: of the fastest tenth every second time, even or with another split.

        One of three is even over stages that the steps of the search leave out, one of nine is
        split at random.
        """
        even = len(self.even) > 0 and self.rng.random() < 1 / 3
        batch = self.even if even else self.batch
        most = len(batch) if self.rng.random() < 0.5 else max(1, len(batch) // 10)
        layout = batch.row(int(self.rng.integers(most)))
        if even or layout.pp == 1 or self.rng.random() < 2 / 3:
            return layout
        stages, layers = layout.pp * layout.virtual_stages, self.model.num_hidden_layers
        if stages > layers:
            return layout
        sizes = np.full(stages, layers // stages)
        sizes[self.rng.permutation(stages)[: layers % stages]] += 1
        giving, taking = self.rng.integers(stages, size=2)
        sizes[giving] -= 1
        sizes[taking] += 1
        uneven = layout.model_copy(update={"layers_per_stage": tuple(int(n) for n in sizes)})
        context = self.context
        broken = violations(uneven, context.model, context.cluster, context.training)
        return layout if broken or sizes.min() < 1 else uneven

    def fix(self) -> dict[str, Any]:
        """One to MOST_FIXED fields of one of them."""
        layout = self.draw()
        names = [name for name in Layout.model_fields if name not in self.left_alone]
        count = int(self.rng.integers(1, MOST_FIXED + 1))
        chosen = {str(name) for name in self.rng.choice(names, count, replace=False)}
        if layout.virtual_stages not in STEPS_OF_STAGES:
            chosen.add("virtual_stages")
        return {name: getattr(layout, name) for name in sorted(chosen)}


def _wide(context: Context) -> dict[str, list[Any]]:
    """Every value that a trainer may be told unasked, of what trains the same model."""
    domains = default_domains(context)
    allow = {name: list(domain.values) for name, domain in domains.items()}
    trainer = TRAINERS[context.training.trainer].at(training_release(context.training))
    degrees = list(divisors(context.cluster.num_gpus))
    allow.update(dict.fromkeys(("tp", "cp", "pp", "dp_replicate", "dp_shard"), degrees))
    allow["virtual_stages"] = list(range(1, context.model.num_hidden_layers + 1))
    allow["cpu_offload"] = [False, True]
    allow.update((name, list(domains[name].values)) for name in context.trainer.by_request)
    kinds = {parse_ac(text)[0] for text in trainer.searched_ac} | trainer.dials
    allow["ac"] = [
        text
        for text in (*allow["ac"], "selective-layer-3", "selective-layer-4", "memory-budget-0.3",
                     "memory-budget-0.5", "memory-budget-0.75", "modules-mlp", "modules-layernorm",
                     "modules-moe+moe_act", "modules-shared_experts+mla_up_proj")
        if parse_ac(str(text))[0] in kinds & trainer.ac_kinds
    ]  # fmt: skip
    return allow


def _unlisted(context: Context) -> dict[str, list[Any]]:
    """Pipelines whose stages split the layers evenly, as the steps of the search do not."""
    if "pp" in context.trainer.by_request:
        return {}
    layers = context.model.num_hidden_layers
    counts = [n for n in divisors(layers) if n not in STEPS_OF_STAGES]
    degrees = [n for n in divisors(context.cluster.num_gpus) if n > 1 and layers % n == 0]
    return {"virtual_stages": counts or [1], "pp": degrees or [1], "layers_per_stage": [None]}


def compared(rng: np.random.Generator, num_fixes: int) -> Iterator[Compared]:
    """A random job with something that fits, against its fixes."""
    for _ in range(ATTEMPTS):
        job = random_job(rng)
        try:
            free = fastest(job, {})
            runnable = Runnable(job, rng) if free else None
        except PlannerError:
            continue
        if free and runnable and runnable.fitting:
            break
    else:
        raise RuntimeError(f"{ATTEMPTS} random jobs, and nothing fits any of them")
    done = 0
    for _ in range(ATTEMPTS * num_fixes):
        fix = runnable.fix()
        try:
            fixed = fastest(job, fix)
        except PlannerError:
            continue
        if fixed is not None:
            done += 1
            yield Compared(
                job=job,
                fix=fix,
                free_seconds=free[0],
                fixed_seconds=fixed[0],
                free=free[1],
                fixed=fixed[1],
            )
        if done == num_fixes:
            return


def published(beginning: str) -> Iterator[Compared]:
    """The search of each published job against the layout that ran, where it fits and can run."""
    searches: dict[str, tuple[float, Layout] | None] = {}
    for line in PUBLIC.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["id"].startswith(beginning):
            continue
        try:
            read = read_job(row)
        except PlannerError:
            continue
        job = {**{key: row[key] for key in ("model", "cluster")}, "search": {"prefer": "fastest"}}
        job["training"] = read.training.model_dump(mode="json")
        fix = {"precision": read.layout.precision} if read.layout else {}
        if read.layout is None or violations(read.layout, read.model, read.cluster, read.training):
            continue
        pricer = Pricer.build(read.model, read.cluster, read.training)
        ((step, oom, _),) = simulated_columns(pricer, [read.layout])
        key = json.dumps([job, fix], sort_keys=True)
        if key not in searches:
            searches[key] = fastest(job, fix)
        if (found := searches[key]) and oom <= OOM_LIMIT and np.isfinite(step):
            yield Compared(
                job={"id": row["id"], **job}, fix=fix, free_seconds=found[0],
                fixed_seconds=step, free=found[1], fixed=read.layout,
            )  # fmt: skip


def main() -> None:
    """Compares as many as asked and prints what was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--fixes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--published", nargs="?", const="", help="runs whose id begins so")
    asked = parser.parse_args()
    worst, count, violated, started = 0.0, 0, 0, time.process_time()
    drawn = (
        one
        for number in range(asked.first, asked.first + asked.jobs)
        for one in compared(np.random.default_rng((asked.seed, number)), asked.fixes)
    )
    for one in drawn if asked.published is None else published(asked.published):
        worst, count = max(worst, one.ratio), count + 1
        if one.violated:
            violated += 1
            print(f"{one.ratio - 1.0:+.2%}  {one.job}  fix {one.fix}")
            print(f"    free   {one.free_seconds:.4f} s  {one.free.short()}")
            print(f"    fixed  {one.fixed_seconds:.4f} s  {one.fixed.short()}", flush=True)
    print(
        f"{count} compared, {violated} violations of {TOLERANCE:.1%}, worst ratio "
        f"{worst:.4f}, {time.process_time() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
