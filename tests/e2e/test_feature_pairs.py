"""Every pair of features that plain torch has trains the same model as one rank without them.

Real torchrun, gloo, 1, 2, 4 and 8 processes; all runs share one job, and a run has as many features
at once as share a tolerance. The third loss holds only if two updates do. Pairs that the rules
refuse as silently wrong are shown to be so. docs/feature-pairs.md is the table.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from benchmarks.feature_pairs import (
    GLOBAL_BATCH,
    PLAIN,
    TORCH,
    Feature,
    Job,
    cell,
    features,
    joined,
    pairs,
    rules_broken,
)
from tests.conftest import needed
from tests.e2e.probe_jobs import MODELS, task
from tests.e2e.test_probe_program_losses import run, trained

needed("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
# The compiler's front end and autograd, without the seconds that C++ takes for every layer.
BACKEND = "aot_eager_decomp_partition"
KV_HEADS = 4  # ulysses within TP
FP16_CPU = {"base": "cpu", "name": "cpu-fp16", "peak_flops": dict.fromkeys(
    ("fp32", "bf16", "fp16"), "0.2 TFLOP/s")}  # fmt: skip
ROUNDED = ("precision", "param_dtype", "reduce_dtype", "master_dtype")
PAIRS = {pair: joined(*pair) for pair in pairs() if cell(TORCH, *pair).kind == "runs"}
# They take the place of code that other pairs are about: a run with one shows its own pairs alone.
APART = {
    "compile": "compiler", "AC memory budget": "compiler", "optimizer in backward": "hooks",
    "fp16": "scaler", "16-bit compute": "16 bits", "16-bit reduction": "16 bits",
    "16-bit masters": "16 bits",
}  # fmt: skip


def apart(*chosen: Feature) -> set[str]:
    """Parts of the program that these features replace."""
    return {APART[feature.name] for feature in chosen if feature.name in APART}


def alike(chosen: tuple[Feature, ...], tolerance: float) -> set[tuple[Feature, Feature]]:
    """Pairs among these features that a run with this tolerance shows."""
    return {
        pair
        for pair in combinations(chosen, 2)
        if (job := PAIRS.get(pair))
        and job.tolerance == tolerance
        and apart(*pair) == apart(*chosen)
    }


def runs() -> dict[str, Job]:
    """Jobs that have every running pair among their features, few of them: each pair not yet run,
    the widest first, takes what other features go with it, show a new pair and need no more ranks.
    """
    left = dict(sorted(PAIRS.items(), key=lambda item: -item[1].ranks if item[1] else 0))
    found: dict[str, Job] = {}
    while left:
        chosen, job = next(iter(left.items()))
        assert job is not None
        for other in features():
            wider = tuple(sorted({*chosen, other}, key=features().index))
            more = joined(*wider) if apart(*wider) == apart(*chosen) else None
            if (
                more is not None
                and (more.ranks, more.tolerance) == (job.ranks, job.tolerance)
                and all(pair in PAIRS for pair in combinations(wider, 2))
                and (alike(wider, job.tolerance) - alike(chosen, job.tolerance)) & left.keys()
                and not rules_broken(TORCH, more)
            ):
                chosen, job = wider, more
        for pair in alike(chosen, job.tolerance):
            left.pop(pair, None)
        found[" x ".join(feature.name for feature in chosen)] = job
    return found


RUNNING = runs()
NAMED = {feature.name: feature for feature in features()}
IN_BACKWARD = {"optimizer_in_backward": True}
Results = Mapping[str, Any]


def legal(*names: str, **training: Any) -> Job:
    job = joined(*(NAMED[name] for name in names))
    assert job is not None
    return replace(job, training=training)


# What the rules refuse though nothing would raise: the job as far as it is legal, and the rest.
BROKEN: Mapping[str, tuple[Job, dict[str, Any]]] = {
    "DDP x optimizer in backward": (legal("DDP", max_grad_norm=None), IN_BACKWARD),
    "gradient accumulation x optimizer in backward": (
        legal("FSDP ZeRO-3", "gradient accumulation", max_grad_norm=None), IN_BACKWARD),
    "FSDP ZeRO-3 x ZBVZeroBubble": (legal("FSDP ZeRO-2", "ZBVZeroBubble"), {"zero_stage": 3}),
}  # fmt: skip


def task_of(job: Job) -> dict[str, Any]:
    size = {"num_hidden_layers": job.layers, "num_key_value_heads": KV_HEADS}
    model = {**MODELS["moe" if job.moe else "llama"], **size}
    training = {"global_batch_size": GLOBAL_BATCH, **job.training}
    made = task(dict(job.layout), num_gpus=job.ranks, model=model, training=training)
    made["job"]["cluster"]["gpu"] = FP16_CPU
    return made


def alone(job: Job) -> tuple[str, dict[str, Any]]:
    """Name and task of the plain run: one rank, one microbatch, the pair's dtypes."""
    layout = {name: job.layout[name] for name in ROUNDED if name in job.layout}
    plain = replace(job, layout={**PLAIN, **layout, "micro_batch_size": GLOBAL_BATCH})
    name = json.dumps([job.moe, job.layers, dict(job.training), layout], sort_keys=True)
    return f"alone {name}", task_of(plain)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Losses by name."""
    tasks = {name: task_of(job) for name, job in RUNNING.items()}
    tasks |= dict(map(alone, [*RUNNING.values(), *(job for job, _ in BROKEN.values())]))
    for name, (job, despite) in BROKEN.items():
        tasks[f"despite {name}"] = {**task_of(job), "despite": despite}
    return run(tasks, tmp_path_factory.mktemp("pairs"), BACKEND)


@pytest.mark.parametrize("name", RUNNING)
def test_features_train_as_one_rank_does(name: str, results: Results) -> None:
    job = RUNNING[name]
    found, expected = trained(results, name), results[alone(job)[0]]
    for value, tolerance in (("losses", job.tolerance), ("norms", 10 * job.tolerance)):
        assert found[value] == pytest.approx(expected[value], rel=tolerance)
    assert len(set(expected["losses"])) == len(expected["losses"])


@pytest.mark.parametrize("name", BROKEN)
def test_a_refused_pair_would_train_another_model(name: str, results: Results) -> None:
    job, _ = BROKEN[name]
    found, expected = trained(results, f"despite {name}"), results[alone(job)[0]]
    pairs = zip(found["losses"], expected["losses"], strict=True)
    assert found["apart"] or max(abs(a / b - 1) for a, b in pairs) > 10 * job.tolerance
