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
from planner.search import bounds, cell_queue
from planner.search import screen as screen_module
from planner.search.fit import OOM_LIMIT
from planner.search.screen import PARETO_SLACK, Goal
from planner.search.space.enumerate import Space, build_space
from planner.search.space_search import KnownBudgets, searched
from planner.search.variations import budgets
from planner.search.variations.budgets import Budgeted, LargestBudgets, StepLimits, largest_budgets
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout, parse_ac
from tests.conftest import fixed_ports, job_values, one_fast

GPU = "h100-sxm-80gb"
LONG_HEAD = job_values("llama3.1-8b", GPU, 8, 8192, 128)
JOBS: dict[str, dict[str, Any]] = {
    "8B, with a long head": LONG_HEAD,
    "8B, short of memory": {
        **LONG_HEAD,
        "cluster": {**LONG_HEAD["cluster"], "memory_fraction": 0.80},
    },
    "70B, where everything is cut": job_values("llama3.1-70b", GPU, 64, 8192, 128),
    "experts": job_values("mixtral-8x7b", GPU, 16, 4096, 64),
    "Megatron": job_values("llama3.1-8b", GPU, 8, 8192, 128, trainer="megatron"),
    "1B, where launches count": job_values("llama3.2-1b", GPU, 16, 2048, 32),
}
FIXES: tuple[dict[str, Any], ...] = (
    {"pp": 1, "tp": 1}, {"pp": 2}, {"tp": 2}, {"compile": False}, {"micro_batch_size": 2},
    {"ac": "full"},
    {"precision": "bf16"},
)  # fmt: skip


def winner(name: str, fix: dict[str, Any]) -> Layout:
    job = read_job({**JOBS[name], "search": {"top_k": 1, "fix": fix, "prefer": "fastest"}})
    return recommend(job, ports=fixed_ports()).ranked[0].layout


def prepared(name: str) -> tuple[Pricer, Space]:
    job = read_job(JOBS[name])
    pricer = Pricer.build(job.model, job.cluster, job.training)
    return pricer, build_space(pricer.rules_context, SearchSpec())


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
    layout = winner("8B, short of memory", {"pp": 1})
    kind, budget = parse_ac(layout.ac)
    assert (layout.dp_shard, layout.zero_stage, kind) == (8, 2, "memory-budget")
    assert budget > 0.5


def test_an_uneven_split_wins_where_the_head_is_long() -> None:
    """Llama 3.1's head weighs two layers: an even split leaves three ranks of four waiting."""
    sizes = winner("Megatron", {"pp": 4}).layers_per_stage
    assert sizes[-1] < sizes[0]


def test_the_budget_is_the_largest_that_fits() -> None:
    """Bisection against every budget, for the fastest layouts found."""
    pricer, space = prepared("8B, short of memory")
    search = searched(pricer, space, Goal(count=10, budgets=20))
    found = search.best_budgets(float(search.screened.step_seconds[9]))
    assert 5 < len(found) <= 4 * 20  # as many simple ones, each with its safe budget too
    for row in range(5):
        layout = found.row(row)
        modes = [{"ac": f"memory-budget-{hundredths / 100:g}"} for hundredths in range(101)]
        rest = LayoutBatch.from_layouts([layout.model_copy(update=mode) for mode in modes])
        prices, own = pricer.price(rest), pricer.price(found.take(slice(row, row + 1)))
        risk = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        fits = risk <= OOM_LIMIT
        assert np.flatnonzero(fits)[-1] == round(100 * parse_ac(layout.ac)[1])
        assert prices.step_seconds[fits].min() == pytest.approx(own.step_seconds[0])


@pytest.mark.parametrize("name", one_fast("Megatron", "8B, short of memory", "experts"))
def test_budgets_sought_before_the_second_round_change_nothing_but_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they take lowers the limit of later rounds; what is near the best stays, as they do."""
    pricer, space = prepared(name)
    for module in (bounds, cell_queue):
        monkeypatch.setattr(module, "BAND", 32)
    monkeypatch.setattr(screen_module, "ROUND", 64)
    plain = searched(pricer, space, Goal(count=3))
    screened = plain.screened
    assert plain.budgets is None
    search = searched(pricer, space, Goal(count=3, budgets=20))
    known = search.budgets
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
    search = searched(*prepared("experts"), Goal(count=10, budgets=20))
    worth = float(search.screened.step_seconds[9])
    whole = search.best_budgets(worth)
    found = search._fastest_budgets(worth)
    kinds = [[kind.take(np.arange(0)) for kind in of_dial] for of_dial in found]
    search.budgets = KnownBudgets(worth=0.9 * worth, kinds=kinds)
    assert search.best_budgets(worth).layouts() == whole.layouts()
    search.budgets = KnownBudgets(worth=worth, kinds=kinds)
    assert not len(search.best_budgets(worth))
    assert len(whole)


KEEP = 3


def asked(name: str) -> Budgeted:
    """The layouts of a job that can be within a fifth of the best with a budget, not sought yet."""
    search = searched(*prepared(name), Goal(count=10, budgets=KEEP))
    (one,) = search._bases(1.2 * float(search.screened.step_seconds[0]))
    return one


def all_of(one: Budgeted) -> LargestBudgets:
    """All of them that have a budget, none left out."""
    rounds = list(one._rounds())
    batch = LayoutBatch.concatenate([each.batch for each in rounds])
    simple = np.concatenate([each.simple for each in rounds])
    limits = StepLimits(every=one.worth, simple=one.worth)
    return largest_budgets(one.pricer, batch, simple, limits, len(batch) + 1, one.dial)


@pytest.mark.parametrize("at_once", [2**13, 64])
@pytest.mark.parametrize("name", ["8B, short of memory", "experts"])
def test_the_fastest_are_sought_among_all(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds together, a few at a time; all but the fastest eighth of cells are simple here."""
    monkeypatch.setattr(budgets, "CHUNK", at_once)
    monkeypatch.setattr(budgets, "ROUND", 16 * at_once)
    one = asked(name)
    one.simple = np.arange(len(one.cells)) >= len(one.cells) // 8
    every = all_of(one)
    fastest, simple = one.fastest(KEEP)
    few = every.take(every.simple)
    for found, wanted in ((fastest, every.first(KEEP)), (simple, few.first(KEEP))):
        assert len(found.layouts) == KEEP
        assert np.array_equal(found.seconds, wanted.seconds)
        assert found.layouts.layouts() == wanted.layouts.layouts()
        assert np.array_equal(found.hundredths, wanted.hundredths)
    assert simple.seconds[-1] > fastest.seconds[-1]
    assert simple.simple.all()


def test_a_simple_layout_may_be_among_either() -> None:
    limits = StepLimits(every=4.0, simple=9.0)
    assert limits.of(np.array([True, False])).tolist() == [9.0, 4.0]
    seconds, simple = np.array([1.0, 5.0, 3.0, 2.0]), np.array([True, True, False, False])
    assert limits.lowered(seconds, simple, 2) == StepLimits(every=2.0, simple=5.0)
    assert limits.lowered(seconds, simple, 4) == limits, "fewer are known, or none is faster"
