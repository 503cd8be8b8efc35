"""Checks that every layout that a search may rank runs, by exporting samples.

    python -m benchmarks.runnable [--layouts 24] [--plans 40] [--workers 2] [--shard 1/4]
        [--models a,b] [--gpus a,b]

Covers all models x all GPUs x trainers x sizes. For every combination it reports why the job is
rejected before the search. If it is not, it exports a seeded sample of the legal layouts, spread
over the cells of the space, with the splits and memory budgets that later stages add. Every blocker
counts as a failure. GPUs that no rule distinguishes share one space, whose cells include those
whose states no memory would hold. `--plans` searches a sample in full and exports all ranked
layouts.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import product
from zlib import crc32

import numpy as np

from planner.catalog.clusters import gpu_names
from planner.catalog.models import model_names
from planner.errors import InfeasibleError, UnsupportedError
from planner.export import export
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.plan.recommend import recommend
from planner.rules import Context, violations
from planner.rules.features import peer_gpus, scale_up_gpus
from planner.rules.precisions import gpu_precisions
from planner.rules.support import obstacles
from planner.search.space.enumerate import build_space
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec

TRAINERS = (("torchtitan", "0.2.2"), ("torchtitan", "0.3.0"), ("megatron", "0.14"))
SIZES = (8, 64, 512)
SEQ_LEN, SEQUENCES_PER_GPU, SEED = 4096, 4, 20261122
BUDGET = "memory-budget-0.37"


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination: a model on a number of GPUs with a release of a trainer."""

    model: str
    gpu: str
    trainer: str
    version: str
    num_gpus: int

    def job(self) -> dict[str, object]:
        """The job as a user would write it."""
        training = {
            "seq_len": SEQ_LEN,
            "global_batch_size": SEQUENCES_PER_GPU * self.num_gpus,
            "trainer": self.trainer,
            "trainer_version": self.version,
        }
        return {
            "model": self.model,
            "cluster": {"gpu": self.gpu, "num_gpus": self.num_gpus},
            "training": training,
        }

    def context(self) -> Context:
        """The parsed job; models and clusters are parsed once."""
        training = self.job()["training"]
        return Context(
            model=_model(self.model),
            cluster=_cluster(self.gpu, self.num_gpus),
            training=read_training(training),
        )

    def seed(self) -> int:
        """The seed of its sample, the same in every process."""
        return crc32(f"{self} {SEED}".encode())


@lru_cache(maxsize=4)
def _model(name: str) -> ModelSpec:
    return read_model(name)


@lru_cache(maxsize=256)
def _cluster(gpu: str, num_gpus: int) -> ClusterSpec:
    return read_cluster({"gpu": gpu, "num_gpus": num_gpus})


@dataclass(slots=True)
class Tally:
    """The counts. blocked: layouts with a blocker, by its text."""

    combinations: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    blocked: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Adds the other's counts."""
        self.combinations += other.combinations
        self.refused += other.refused
        self.layouts += other.layouts
        self.plans += other.plans
        self.blocked += other.blocked


def combinations(models: Sequence[str], gpus: Sequence[str]) -> Iterator[Combination]:
    """All combinations, model by model."""
    for model, (trainer, version), num_gpus, gpu in product(models, TRAINERS, SIZES, gpus):
        yield Combination(model, gpu, trainer, version, num_gpus)


def told_apart(c: Context) -> tuple[object, ...]:
    """What rules read of a cluster, except its memory, which `oversized` spaces ignore."""
    gpu = c.cluster.gpu
    return (
        gpu.vendor,
        gpu_precisions(c),
        tuple(sorted(gpu.peak_flops_per_second)),
        peer_gpus(c),
        scale_up_gpus(c),
        c.cluster.gpus_per_node,
    )


def reason(c: Context) -> str | None:
    """A short reason why the job is rejected before the search; None if it is not."""
    found = obstacles(c)
    if not found:
        return None
    first = found[0]
    what = (
        c.cluster.gpu.vendor
        if first.field == "cluster.gpu"
        else first.rule.partition("for lack of: ")[2]
    )
    return f"{first.field}: {what or first.rule}"


def sample(c: Context, count: int, seed: int) -> list[Layout]:
    """Legal layouts spread over the space, some with an uneven split or a memory budget.

    Empty if none is legal.
    """
    space = build_space(c, oversized=True)
    if not len(space.cells):
        return []
    draw = np.random.default_rng(seed)
    cells = draw.choice(len(space.cells), size=min(count, len(space.cells)), replace=False)
    found = []
    for cell in cells:
        batch = space.expand(np.array([cell]))
        layout = batch.row(int(draw.integers(len(batch))))
        found.append(layout)
        found += [
            one
            for one in (_with_budget(layout), _uneven(layout, c, draw))
            if one is not None and not violations(one, c.model, c.cluster, c.training)
        ]
    return found


def _with_budget(layout: Layout) -> Layout | None:
    return layout.model_copy(update={"ac": BUDGET}) if layout.compile else None


def _uneven(layout: Layout, c: Context, draw: np.random.Generator) -> Layout | None:
    """The layout with every layer put on a random stage, so that some stages may be empty."""
    stages = layout.pp * layout.virtual_stages
    if layout.pp == 1:
        return None
    split = draw.multinomial(c.model.num_hidden_layers, np.full(stages, 1.0 / stages))
    return layout.model_copy(update={"layers_per_stage": tuple(int(size) for size in split)})


def examine(model: str, gpus: Sequence[str], layouts: int) -> Tally:
    """Examines all combinations of one model."""
    tally, spaces = Tally(), dict[tuple[object, ...], int]()
    for one in combinations([model], gpus):
        context, key = one.context(), f"{one.trainer} {one.version}"
        tally.combinations[key] += 1
        why = reason(context)
        if why is not None:
            tally.refused[f"{key}: {why}"] += 1
            continue
        alike = (key, one.num_gpus, *told_apart(context))
        if alike not in spaces:
            spaces[alike] = _exported(one, context, layouts, tally)
        if not spaces[alike]:
            tally.refused[f"{key}: no layout is legal"] += 1
    return tally


def _exported(one: Combination, context: Context, layouts: int, tally: Tally) -> int:
    """Exports the sample of a combination; returns how many legal layouts were exported."""
    found = sample(context, layouts, one.seed())
    for layout in found:
        written = export(layout, context.model, context.cluster, context.training, to=one.trainer)
        tally.layouts[f"{one.trainer} {one.version}"] += 1
        tally.blocked += [f"{one}: {layout.short()}: {fault}" for fault in written.blockers]
    return len(found)


def plan(one: Combination) -> Tally:
    """A whole search, with every ranked layout exported."""
    tally, key = Tally(), f"{one.trainer} {one.version}"
    job = read_job({**one.job(), "search": {"top_k": 10}})
    try:
        found = recommend(job, now=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    except UnsupportedError:
        tally.plans[f"{key}: refused"] += 1
        return tally
    except InfeasibleError:
        tally.plans[f"{key}: nothing fits"] += 1
        return tally
    tally.plans[f"{key}: planned"] += 1
    for entry in found.ranked:
        written = export(entry.layout, job.model, job.cluster, job.training, to=one.trainer)
        tally.plans[f"{key}: layouts ranked"] += 1
        tally.blocked += [
            f"{one}: ranked {entry.layout.short()}: {fault}" for fault in written.blockers
        ]
    return tally


def report(tally: Tally) -> str:
    """The table."""
    lines = ["trainer          combinations  refused  layouts exported"]
    for key, count in sorted(tally.combinations.items()):
        refused = sum(n for name, n in tally.refused.items() if name.startswith(key))
        lines.append(f"{key:<16} {count:>12,}  {refused:>7,}  {tally.layouts[key]:>16,}")
    total, away = sum(tally.combinations.values()), sum(tally.refused.values())
    lines.append(f"{'all':<16} {total:>12,}  {away:>7,}  {sum(tally.layouts.values()):>16,}")
    lines += ["", f"blocked layouts: {len(tally.blocked)}", *tally.blocked[:20]]
    lines += ["", "refused before the search, or without a legal layout:"]
    lines += [f"{count:>7,}  {name}" for name, count in tally.refused.most_common()]
    if tally.plans:
        lines += ["", "plans searched in full:"]
        lines += [f"{count:>7,}  {name}" for name, count in sorted(tally.plans.items())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; exits 1 if a layout is blocked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=24)
    parser.add_argument("--plans", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--models", default="")
    parser.add_argument("--gpus", default="")
    asked = parser.parse_args(argv)
    mine, shards = (int(part) for part in asked.shard.split("/"))
    models = [name for name in asked.models.split(",") if name] or list(model_names())
    gpus = [name for name in asked.gpus.split(",") if name] or list(gpu_names())
    every = list(combinations(models, gpus))
    draw = np.random.default_rng(SEED)
    chosen = [every[place] for place in draw.permutation(len(every))[: asked.plans]]
    total = Tally()
    with ProcessPoolExecutor(asked.workers) as pool:
        work = partial(examine, gpus=gpus, layouts=asked.layouts)
        for done, tally in enumerate(pool.map(work, models[mine - 1 :: shards]), start=1):
            total.add(tally)
            sys.stderr.write(f"\r{done} of {len(models[mine - 1 :: shards])} models")
        for tally in pool.map(plan, chosen[mine - 1 :: shards]):
            total.add(tally)
    sys.stderr.write("\n")
    sys.stdout.write(report(total) + "\n")
    return 1 if total.blocked else 0


if __name__ == "__main__":
    sys.exit(main())
