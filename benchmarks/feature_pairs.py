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
from collections.abc import Iterator, Mapping
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
from planner.specs.layout import Layout
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
    "Megatron-LM 0.19": {"trainer": "megatron", "trainer_version": "0.19"},
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

    layers: of a tiny model, as few as its stages need.
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
    stages = layout.get("pp", 1) * layout.get("virtual_stages", 1)
    layout["micro_batch_size"] = local // max(feature.microbatches for feature in chosen)
    return Job(
        layout=layout,
        training=training,
        moe=any(feature.moe for feature in chosen),
        tolerance=max(feature.tolerance for feature in chosen),
        # a layer a stage, two where only a part of them is recomputed
        layers=max(2, stages * (1 + layout["ac"].startswith("block"))),
    )


@lru_cache(maxsize=64)
def _context(run: str, moe: bool, ranks: int, own: tuple[tuple[str, Any], ...]) -> Context:
    options = {"cuda_graphs": "none", **RUNS[run], **dict(own)}
    return Context(
        model=read_model("deepseek-v2-lite" if moe else "llama3-8b"),
        cluster=read_cluster({"gpu": "b200-sxm-180gb", "num_gpus": ranks}),
        training=read_training({"seq_len": 8192, "global_batch_size": GLOBAL_BATCH, **options}),
    )


def _layout(trainer: str, job: Job) -> Layout:
    given = dict(job.layout)
    if trainer == "megatron" and "precision" in given:
        given["param_dtype"] = "bfloat16"
    if not TRAINERS[trainer].compiles and given.get("async_tp"):
        given["compile"] = False  # Megatron-LM's is user buffers, torch's a pass of the compiler
    return resolve_layout(given, trainer=trainer, num_gpus=job.ranks)


def rules_broken(run: str, job: Job) -> bool:
    """Whether a trainer's rules refuse the job's layout."""
    context = _context(run, job.moe, job.ranks, tuple(job.training.items()))
    batch = LayoutBatch.from_layouts([_layout(context.training.trainer, job)])
    return any(mask.any() for _, mask in broken_rules(batch, context))


@lru_cache(maxsize=8)
def refusals(run: str) -> Mapping[tuple[Feature, ...], dict[str, str]]:
    """The rules that each feature and each pair breaks under a trainer, key to sentence.

    Jobs that differ only in their layout are checked at once.
    """
    found: dict[tuple[Feature, ...], dict[str, str]] = {}
    alike: dict[Any, list[tuple[tuple[Feature, ...], Job]]] = defaultdict(list)
    for chosen in (*((feature,) for feature in features()), *pairs()):
        if job := joined(*chosen):
            alike[job.moe, job.ranks, tuple(job.training.items())].append((chosen, job))
    for key, jobs in alike.items():
        context = _context(run, *key)
        layouts = [_layout(context.training.trainer, job) for _, job in jobs]
        whole = {fault.rule: fault.rule for fault in obstacles(context)}
        found.update({chosen: dict(whole) for chosen, _ in jobs})
        for rule, mask in broken_rules(LayoutBatch.from_layouts(layouts), context):
            for i in mask.nonzero()[0]:
                found[jobs[i][0]][rule.key] = rule.words(layouts[i], context)[0]
    return found


def _lacks(run: str, feature: Feature) -> bool:
    return bool(refusals(run)[feature,])


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
    if (one, other) not in refusals(run):
        return Cell(kind="apart", why={})
    if _lacks(run, one) or _lacks(run, other):
        return Cell(kind="absent", why={})
    if broken := refusals(run)[one, other]:
        return Cell(kind="refused", why=broken)
    unmet = {f"{feature.name} {feature.meets}": "" for feature in (one, other) if feature.meets}
    for feature, beside in ((one, other), (other, one)):
        if beside.name in feature.unmet:
            unmet[f"{feature.name} beside {beside.name} {feature.unmet[beside.name]}"] = ""
    return Cell(kind="unmet" if unmet else "runs", why=unmet)


SYMBOLS = {"runs": "✓", "unmet": "○", "refused": "✗", "apart": "·", "absent": "–"}
LEGEND = (
    "✓ runs · ○ legal, and no CPU can run it (reasons below) · ✗ refused by a rule · `·` two "
    "values of one field · – the trainer lacks one of the two"
)
HEAD = (
    "# Pairs of features",
    "Written by `python benchmarks/feature_pairs.py` from `docs/feature-pairs.yaml` and the rules "
    "(`planner/rules/`): two features together and nothing else, fp32, on as few ranks as they "
    "need. Every pair of plain torch that is marked ✓ is run on gloo by "
    "`tests/e2e/test_feature_pairs.py`: the third loss, two updates in, equals that of one rank "
    "within 1e-6, within 1e-4 where a feature rounds. Replicas beside TP or a pipeline are FSDP2's "
    "outer axis there, and DDP alone is torch's DistributedDataParallel.",
    LEGEND,
)


def page() -> str:
    """The page as text."""
    return "\n".join(["\n\n".join(HEAD), "", *_counts(), *_triangle(), *_refused(), *_unmet()])


def _counts() -> Iterator[str]:
    kinds = {"runs": "runs", "unmet": "not on a CPU", "refused": "refused", "apart": "one field",
        "absent": "lacked"}  # fmt: skip
    yield f"| trainer | {' | '.join(f'{SYMBOLS[k]} {name}' for k, name in kinds.items())} | lacks |"
    yield "|---" * (len(kinds) + 2) + "|"
    for run in RUNS:
        found = [cell(run, *pair).kind for pair in pairs()]
        lacks = ", ".join(feature.name for feature in features() if _lacks(run, feature))
        yield f"| {run} | {' | '.join(str(found.count(kind)) for kind in kinds)} | {lacks} |"
    yield ""


def _triangle() -> Iterator[str]:
    own = [feature for feature in features() if not _lacks(TORCH, feature)]
    yield f"## {TORCH[0].upper()}{TORCH[1:]}"
    yield ""
    yield f"| | {' | '.join(str(i + 1) for i in range(len(own) - 1))} |"
    yield "|---" * len(own) + "|"
    for i, feature in enumerate(own):
        marks = [SYMBOLS[cell(TORCH, beside, feature).kind] for beside in own[:i]]
        marks += [""] * (len(own) - 1 - len(marks))
        yield f"| {i + 1} {feature.name} | {' | '.join(marks)} |"
    yield ""


def _refused() -> Iterator[str]:
    yield "## Refused, by rule"
    yield ""
    yield "| rule | for example | pairs |"
    yield "|---|---|---|"
    by_rule: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    sentence: dict[str, str] = {}
    for run in RUNS:
        for one, other in pairs():
            for key, text in cell(run, one, other).why.items():
                if cell(run, one, other).kind == "refused":
                    by_rule[key][run].append(f"{one.name} x {other.name}")
                    sentence.setdefault(key, text)
    for key, runs in by_rule.items():
        yield f"| {key} | {sentence[key]} | {'; '.join(_by_run(runs))} |"
    yield ""


def _by_run(runs: Mapping[str, list[str]]) -> Iterator[str]:
    """Pairs with the trainers that refuse them, those of equal lists together."""
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for run, found in runs.items():
        same[tuple(found)].append(run)
    for found, trainers in same.items():
        yield f"**{', '.join(trainers)}**: {', '.join(found)}"


def _unmet() -> Iterator[str]:
    yield "## Legal, and not run on a CPU"
    yield ""
    reasons: dict[str, int] = defaultdict(int)
    for pair in pairs():
        found = cell(TORCH, *pair)
        for reason in found.why if found.kind == "unmet" else ():
            reasons[reason] += 1
    for reason, count in reasons.items():
        yield f"- {reason}: {count} pairs"
    yield ""


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
