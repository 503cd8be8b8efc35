"""Layer splits and memory budgets against brute force: every legal split, each simulated."""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.intake.jobs import read_job
from planner.rules import legal_mask
from planner.search.fit import OOM_LIMIT
from planner.search.one_size import search_size
from planner.specs.layout import Layout
from tests.conftest import job_values, one_fast

NEAR = 1.002
WIDE: dict[str, Any] = {
    "name": "wide", "hidden_size": 4096, "num_hidden_layers": 11, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
EXPERTS = {
    **WIDE, "name": "experts", "hidden_size": 2048, "num_attention_heads": 16, "num_experts": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 2,
}  # fmt: skip
# What is fixed leaves few classes, so that all their splits and budgets can be simulated.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "a heavy head": (WIDE, "torchtitan", {"num_gpus": 8},
        {"pp": 4, "tp": 1, "pp_schedule": "1F1B"}),
    "short of memory": (WIDE, "torchtitan", {"num_gpus": 8, "memory_fraction": 0.45},
        {"pp": 4, "tp": 1, "pp_schedule": "1F1B", "micro_batch_size": 1}),
    "two stages a rank": (WIDE, "torchtitan", {"num_gpus": 8, "memory_fraction": 0.5},
        {"pp": 2, "tp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "Megatron": (WIDE, "megatron", {"num_gpus": 4, "memory_fraction": 0.6},
        {"pp": 4, "tp": 1, "pp_schedule": "1F1B", "micro_batch_size": 1}),
    "dense layers first": (EXPERTS, "megatron", {"num_gpus": 4},
        {"pp": 4, "tp": 1, "pp_schedule": "1F1B"}),
}  # fmt: skip


def splits_of(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All splits whose inner stages hold a layer; the ends may hold none."""
    ends = layers + 2  # the outer stages get one layer more, taken off again
    cuts = combinations(range(1, ends), stages - 1)
    padded = [np.diff([0, *cut, ends]).tolist() for cut in cuts]
    return [(sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1) for sizes in padded]


def brute_force(pricer: Pricer, like: Layout, budgets: bool) -> float:
    """The fastest step of this layout under any split and any of the trainer's recomputations."""
    splits = splits_of(pricer.model.num_hidden_layers, like.pp * like.virtual_stages)
    modes = [*(f"memory-budget-{part / 50:g}" for part in range(1, 50) if budgets), "none", "full"]
    changes = [{"layers_per_stage": split, "ac": mode} for split, mode in product(splits, modes)]
    layouts = [like.model_copy(update=change) for change in changes]
    best = np.inf
    for start in range(0, len(layouts), 2048):
        batch = LayoutBatch.from_layouts(layouts[start : start + 2048])
        batch = batch.take(legal_mask(batch, pricer.rules_context))
        if not len(batch):
            continue
        prices = pricer.price(batch)
        oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        batch, fits = batch.take(oom <= OOM_LIMIT), oom <= OOM_LIMIT
        if fits.any():
            step = refine(pricer, batch, pricer.price(batch)).step_seconds
            best = min(best, float(step.min()))
    return best


@pytest.mark.parametrize("name", one_fast("Megatron", *sorted({*CASES} - {"Megatron"})))
def test_the_search_finds_the_best_split_and_budget(name: str) -> None:
    model, trainer, cluster, fix = CASES[name]
    search = {"prefer": "fastest", "fix": {**fix, "precision": "bf16"}}
    values = job_values(model, "h100-sxm-80gb", 8, 4096, 16, trainer=trainer, search=search)
    job = read_job({**values, "cluster": {**values["cluster"], **cluster}})
    found = search_size(job, job.cluster, lambda _: None)
    best, _, layout = found.candidates[0]
    pricer = found.pricer
    # every class that the search has looked at by its best member, and those of other microbatches
    plain = {"layers_per_stage": None, "ac": "full"}
    likes = {one.model_copy(update=plain) for _, _, one in found.candidates[:40]}
    likes = {*sorted(likes, key=str)[:6], layout.model_copy(update=plain)}
    budgets = trainer == "torchtitan"
    brute = min(brute_force(pricer, like, budgets) for like in likes)
    assert brute < np.inf
    assert best <= NEAR * brute, (best / brute, layout.short())


def test_all_splits_are_counted() -> None:
    """Ends may be empty: stars and bars over layers + 2 with every stage at least one."""
    assert len(splits_of(4, 3)) == 10
    assert len(set(splits_of(7, 4))) == len(splits_of(7, 4)) == 56
    assert all(sum(split) == 7 and min(split[1:-1]) >= 1 for split in splits_of(7, 4))
