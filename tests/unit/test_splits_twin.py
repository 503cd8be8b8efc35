"""Layer splits and memory budgets: against every legal split, each simulated; their moves."""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import oom_probability
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.intake.jobs import read_job
from planner.rules import legal_mask
from planner.schedules import SCHEDULES
from planner.search.fit import OOM_LIMIT
from planner.search.one_size import search_size
from planner.search.variations import split_moves
from planner.search.variations.split_moves import balanced, holders_of, possible, sloped
from planner.search.variations.splits import Climb
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


ONE_EACH = ((0,), (1,), (2,))
LOOPED = holders_of(SCHEDULES["Interleaved1F1B"], 3, 2)
V_SHAPED = holders_of(SCHEDULES["ZBVZeroBubble"], 3, 2)


def test_stages_of_each_rank() -> None:
    assert LOOPED == ((0, 3), (1, 4), (2, 5))
    assert V_SHAPED == ((0, 5), (1, 4), (2, 3))


def test_a_slope_is_layers_more_on_each_rank() -> None:
    assert sloped((4, 4, 4), 1.0, ONE_EACH) == (3, 4, 5)
    assert sloped((4, 4, 4), 2.0, ONE_EACH) == (2, 4, 6)
    assert sloped((2, 2, 2, 2, 2, 2), 2.0, LOOPED) == (0, 2, 3, 2, 2, 3)
    assert sloped((1, 1, 1), 2.0, ONE_EACH) == (1, 1, 1)  # no stage gives its last layer and more


def test_layers_go_from_the_busiest_to_the_idlest() -> None:
    # a layer takes a second; the head alone takes three
    assert balanced((4, 4, 4), ONE_EACH, np.array([4.0, 4.0, 7.0])) == (5, 5, 2)
    assert balanced((4, 4, 4), ONE_EACH, np.array([4.0, 4.0, 4.5])) == (4, 4, 4)
    # the inner stages keep a layer each
    assert balanced((5, 1, 5), ONE_EACH, np.array([5.0, 9.0, 5.0])) == (5, 1, 5)


def test_moves_are_off_the_busiest_and_the_fullest_rank() -> None:
    split = (2, 3, 2, 9, 2, 2)
    pairs = split_moves.helpful_pairs(split, LOOPED, (0, 1), {1, 2})
    assert pairs == [*((3, to, layers) for to in (4, 2) for layers in (1, 2, 4)), (1, 2, 1)]
    assert split_moves.moved(split, 3, 4, 2) == (2, 3, 2, 7, 4, 2)


def test_inner_stages_keep_a_layer() -> None:
    assert possible((0, 1, 0))
    assert not possible((1, 0, 1))
    assert not possible((-1, 2, 2))
    assert split_moves.even(7, 3) == (3, 2, 2)
    assert len(split_moves.all_pairs((1,) * 12)) == 12 * 11
    assert len(split_moves.all_pairs((2, 3, 1, *(2,) * 12))) == 4 * 3


GPU, PLAIN = "h100-sxm-80gb", {"pp": 4, "tp": 1, "pp_schedule": "1F1B"}
JOBS: dict[str, dict[str, Any]] = {
    "one stage a rank": job_values("llama3-8b", GPU, 8, 4096, 32, search={"fix": PLAIN}),
    "all schedules": job_values(
        "llama3-70b", GPU, 64, 4096, 128, search={"fix": {"pp": 8, "tp": 1}}
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_not_faster_is_left_out_of_a_climb_and_misses_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[int] = []
    faster = Climb._faster

    def counted(self: Climb, batch: LayoutBatch, value: FloatColumn) -> IntColumn:
        rows = faster(self, batch, value)
        left_out.append(len(batch) - len(rows))
        return rows

    def everything(self: Climb, batch: LayoutBatch, value: FloatColumn) -> IntColumn:
        return np.arange(len(batch))

    found = []
    for way in (counted, everything):
        monkeypatch.setattr(Climb, "_faster", way)
        job = read_job(JOBS[name])
        found.append(search_size(job, job.cluster, lambda _: None).candidates)
    assert sum(left_out) > 100
    assert found[0] == found[1]
