"""Every pair of features: whether plain torch and each trainer run it.

    python benchmarks/feature_pairs.py [--check]

Writes docs/feature-pairs.md from docs/feature-pairs.yaml and the rules. A pair that plain torch has
is run by tests/e2e/test_feature_pairs.py, or names why no CPU can run it.
"""

import argparse
import math
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any

import yaml

from planner.columns import LayoutBatch
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.rules import Context, broken_rules
from planner.rules.support import obstacles
from planner.trainers.registry import TRAINERS, resolve_layout

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SOURCE, PAGE = DOCS / "feature-pairs.yaml", DOCS / "feature-pairs.md"
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
GLOBAL_BATCH = 16
# Every pair starts from here: one rank, fp32, nothing recomputed or compiled.
PLAIN = {
    "dp_shard": 1, "ac": "none", "param_dtype": "float32", "reduce_dtype": "float32",
    "master_dtype": "float32", "compile": False,
}  # fmt: skip
TORCH = "plain torch"
# Low precisions of Megatron-LM start from 16-bit parameters.
RUNS: Mapping[str, Mapping[str, Any]] = {
    TORCH: {"trainer": "fsdp"},
    "TorchTitan 0.2.2": {"trainer": "torchtitan", "trainer_version": "0.2.2"},
    "TorchTitan 0.3.0": {"trainer": "torchtitan", "trainer_version": "0.3.0"},
    "Megatron-LM 0.18": {"trainer": "megatron", "trainer_version": "0.18"},
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feature:
    """What switches a feature on, alone or beside others.

    microbatches: a step has at least so many on a rank.
    tolerance: relative, of a loss after two updates against the same feature on one rank.
    meets: why no CPU can run it; "" where gloo can.
    unmet: the same beside one other feature, by its name.
    """

    name: str
    layout: Mapping[str, Any]
    training: Mapping[str, Any]
    microbatches: int = 1
    moe: bool = False
    tolerance: float = 1e-6
    meets: str = ""
    unmet: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Features together: a layout and what it needs of its job.

    layers: of a tiny model, two stages of a layer on each of two pipeline ranks.
    """

    layout: Mapping[str, Any]
    training: Mapping[str, Any]
    moe: bool
    tolerance: float
    layers: int

    @property
    def ranks(self) -> int:
        """Processes of the layout."""
        return math.prod(self.layout.get(axis, 1) for axis in AXES)


@lru_cache(maxsize=1)
def features() -> tuple[Feature, ...]:
    """The features, in the order of the page."""
    rows = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    return tuple(Feature(**{"layout": {}, "training": {}, **row}) for row in rows)


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Every two features."""
    return combinations(features(), 2)


def joined(*chosen: Feature) -> Job | None:
    """The features in one job; None where two of them set one field to different values."""
    layout: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for feature in chosen:
        for into, own in ((layout, feature.layout), (training, feature.training)):
            if any(into.get(name, value) != value for name, value in own.items()):
                return None
            into.update(own)
    layout = {**PLAIN, **layout}
    local = GLOBAL_BATCH // (layout.get("dp_replicate", 1) * layout["dp_shard"])
    layout["micro_batch_size"] = local // max(feature.microbatches for feature in chosen)
    return Job(
        layout=layout,
        training=training,
        moe=any(feature.moe for feature in chosen),
        tolerance=max(feature.tolerance for feature in chosen),
        layers=4 if layout.get("pp", 1) > 1 else 2,
    )


@lru_cache(maxsize=2)
def _model(moe: bool) -> Any:
    return read_model("deepseek-v2-lite" if moe else "llama3-8b")


@lru_cache(maxsize=16)
def _cluster(ranks: int) -> Any:
    return read_cluster({"gpu": "b200-sxm-180gb", "num_gpus": ranks})


def refusals(run: str, job: Job) -> dict[str, str]:
    """The rules that a job breaks under a trainer, key to sentence."""
    options = {"cuda_graphs": "none", **RUNS[run], **job.training}
    if options["trainer"] == "torchtitan" and options["trainer_version"] == "0.2.2":
        options["cuda_graphs"] = job.training.get("cuda_graphs")
    training = read_training({"seq_len": 8192, "global_batch_size": GLOBAL_BATCH, **options})
    context = Context(model=_model(job.moe), cluster=_cluster(job.ranks), training=training)
    given = dict(job.layout)
    if training.trainer == "megatron" and "precision" in given:
        given["param_dtype"] = "bfloat16"
    if not TRAINERS[training.trainer].compiles and given.get("async_tp"):
        given["compile"] = False  # Megatron-LM's is user buffers, torch's a pass of the compiler
    layout = resolve_layout(given, trainer=training.trainer, num_gpus=job.ranks)
    found = {fault.rule: fault.rule for fault in obstacles(context)}
    for rule, _ in broken_rules(LayoutBatch.from_layouts([layout]), context):
        found[rule.key] = rule.rule(layout, context)
    return found


@lru_cache(maxsize=256)
def _lacks(run: str, feature: Feature) -> bool:
    job = joined(feature)
    assert job is not None
    return bool(refusals(run, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one trainer does with one pair.

    kind: runs, refused, apart (values of one field), absent (the trainer lacks one of the two), or
        unmet (legal, and no CPU can run it).
    why: rules, key to sentence, or {reason: reason}.
    """

    kind: str
    why: Mapping[str, str]


def cell(run: str, one: Feature, other: Feature) -> Cell:
    """The pair under a trainer."""
    job = joined(one, other)
    if job is None:
        return Cell(kind="apart", why={})
    if _lacks(run, one) or _lacks(run, other):
        return Cell(kind="absent", why={})
    if broken := refusals(run, job):
        return Cell(kind="refused", why=broken)
    unmet = {f"{feature.name} {feature.meets}": "" for feature in (one, other) if feature.meets}
    for feature, beside in ((one, other), (other, one)):
        if beside.name in feature.unmet:
            unmet[f"{feature.name} beside {beside.name} {feature.unmet[beside.name]}"] = ""
    return Cell(kind="unmet" if unmet else "runs", why=unmet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    text = page()
    if parser.parse_args().check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("" if same else f"{PAGE.name} differs; python {sys.argv[0]}", end="")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
