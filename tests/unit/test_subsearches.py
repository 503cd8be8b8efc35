"""A search with something fixed never finds anything faster; which budgets are tried."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from benchmarks.free_against_fixed import fastest
from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.rules import Context
from planner.search import bounds, cell_queue
from planner.search import screen as screen_module
from planner.search.fit import OOM_LIMIT
from planner.search.screen import PARETO_SLACK, Goal
from planner.search.space.enumerate import build_space
from planner.search.space_search import KnownBudgets, searched
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout, parse_ac
from planner.specs.plan import RankedLayout
from tests.conftest import fixed_ports, one_fast

JOBS: dict[str, dict[str, Any]] = {
    "8B, with a long head": {"model": "llama3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {"seq_len": 8192, "global_batch_size": 128}},
    "8B, short of memory": {"model": "llama3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8, "memory_fraction": 0.80},
        "training": {"seq_len": 8192, "global_batch_size": 128}},
    "70B, where everything is cut": {"model": "llama3.1-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"seq_len": 8192, "global_batch_size": 128}},
    "experts": {"model": "mixtral-8x7b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"seq_len": 4096, "global_batch_size": 64}},
    "Megatron": {"model": "llama3.1-8b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {"seq_len": 8192, "global_batch_size": 128, "trainer": "megatron"}},
    "1B, where launches count": {"model": "llama3.2-1b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"seq_len": 2048, "global_batch_size": 32}},
}  # fmt: skip
FIXES: tuple[dict[str, Any], ...] = (
    {"pp": 1, "tp": 1}, {"pp": 2}, {"tp": 2}, {"compile": False}, {"micro_batch_size": 2},
    {"ac": "full"},
    {"precision": "bf16"},
)  # fmt: skip


def winner(name: str, fix: dict[str, Any]) -> RankedLayout:
    job = read_job({**JOBS[name], "search": {"top_k": 1, "fix": fix, "prefer": "fastest"}})
    return recommend(job, ports=fixed_ports()).ranked[0]


@pytest.mark.parametrize("name", one_fast(*reversed(JOBS)))
def test_nothing_fixed_is_at_least_as_good_as_anything_fixed(name: str) -> None:
    job = {**JOBS[name], "search": {"top_k": 1, "prefer": "fastest"}}
    best, _ = fastest(job, {})
    found = {}
    for fix in FIXES:
        with suppress(SpecError):  # with this fixed nothing is legal
            found[str(fix)], _ = fastest(job, fix) or (np.inf, None)
    assert found
    slower = {fix: seconds for fix, seconds in found.items() if not seconds >= best * (1 - 1e-9)}
    assert slower == {}, best


def test_the_split_of_every_pipeline_is_polished() -> None:
    """49 layers over pipelines of other numbers of stages: closed forms put the best one behind."""
    job = {"model": {"base": "llama3.2-3b", "num_hidden_layers": 49},
           "cluster": {"gpu": "a100-pcie-80gb", "num_gpus": 24},
           "training": {"seq_len": 4096, "global_batch_size": 60, "trainer": "megatron"},
           "search": {"prefer": "fastest"}}  # fmt: skip
    free, fixed = (fastest(job, fix) for fix in ({}, {"pp": 4, "virtual_stages": 3}))
    assert free[0] <= 1.002 * fixed[0]


def test_a_budget_wins_where_no_recomputation_just_does_not_fit() -> None:
    """8B on 8 under ZeRO-2 with less memory: a budget near 1 costs almost nothing."""
    layout = winner("8B, short of memory", {"pp": 1}).layout
    assert (layout.dp_shard, layout.zero_stage, parse_ac(layout.ac)[0]) == (8, 2, "memory-budget")
    assert parse_ac(layout.ac)[1] > 0.5


def test_an_uneven_split_wins_where_the_head_is_long() -> None:
    """Llama 3.1's head weighs two layers: an even split leaves three ranks of four waiting."""
    sizes = winner("Megatron", {"pp": 4}).layout.layers_per_stage
    assert sizes[-1] < sizes[0]


def test_the_budget_is_the_largest_that_fits() -> None:
    """Bisection against every budget, for the fastest layouts found."""
    job = read_job(JOBS["8B, short of memory"])
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    pricer, space = (
        Pricer.build(job.model, job.cluster, job.training),
        build_space(context, SearchSpec()),
    )
    search = searched(pricer, space, Goal(count=10, budgets=20))
    found = search.best_budgets(float(search.screened.step_seconds[9]))
    assert 5 < len(found) <= 4 * 20  # as many simple ones, each with its safe budget too
    for row in range(5):
        layout = found.row(row)
        budgets = [_with_budget(layout, hundredths) for hundredths in range(101)]
        rest = LayoutBatch.from_layouts(budgets)
        prices = pricer.price(rest)
        risk = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        fits = risk <= OOM_LIMIT
        assert np.flatnonzero(fits)[-1] == round(100 * parse_ac(layout.ac)[1])
        assert prices.step_seconds[fits].min() == pytest.approx(
            float(pricer.price(found.take(slice(row, row + 1))).step_seconds[0])
        )


@pytest.mark.parametrize("name", one_fast("Megatron", "8B, short of memory", "experts"))
def test_budgets_sought_before_the_second_round_change_nothing_but_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they take lowers the limit of later rounds; what is near the best stays, and so do they.

    Without `Goal.budgets` none is sought early.
    """
    job = read_job(JOBS[name])
    pricer = Pricer.build(job.model, job.cluster, job.training)
    space = build_space(pricer.rules_context, SearchSpec())
    for module in (bounds, cell_queue):
        monkeypatch.setattr(module, "BAND", 32)
    monkeypatch.setattr(screen_module, "ROUND", 64)
    plain = searched(pricer, space, Goal(count=3))
    screened = plain.screened
    assert plain.budgets is None
    search = searched(pricer, space, Goal(count=3, budgets=20))
    known = search.budgets
    assert known is not None
    worth = float(screened.step_seconds[2])
    found = search.best_budgets(worth)
    search.budgets = None
    late = search.best_budgets(worth)
    assert known.least < np.inf
    assert search.screened.num_priced <= screened.num_priced
    reach = 0.99 * PARETO_SLACK * min(float(screened.step_seconds[0]), known.least)
    near = [
        one.step_seconds[(one.step_seconds <= reach) & (one.oom <= OOM_LIMIT)]
        for one in (screened, search.screened)
    ]
    assert len(near[0]) > 3
    assert np.array_equal(*near)
    assert len(found) > 0
    assert {*found.layouts()} == {*late.layouts()}


def test_budgets_sought_for_less_are_sought_again() -> None:
    job = read_job(JOBS["experts"])
    pricer = Pricer.build(job.model, job.cluster, job.training)
    space = build_space(pricer.rules_context, SearchSpec())
    search = searched(pricer, space, Goal(count=10, budgets=20))
    worth = float(search.screened.step_seconds[9])
    whole = search.best_budgets(worth)
    found = search._fastest_budgets(worth)
    kinds = [[kind.take(np.arange(0)) for kind in of_dial] for of_dial in found]
    search.budgets = KnownBudgets(worth=0.9 * worth, kinds=kinds)
    assert search.best_budgets(worth).layouts() == whole.layouts()
    search.budgets = KnownBudgets(worth=worth, kinds=kinds)
    assert not len(search.best_budgets(worth))
    assert len(whole)


def _with_budget(layout: Layout, hundredths: int) -> Layout:
    return layout.model_copy(update={"ac": f"memory-budget-{hundredths / 100:g}"})
