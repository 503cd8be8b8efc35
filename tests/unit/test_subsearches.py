"""A search with something fixed never finds anything faster; which budgets are tried."""

from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import planner
from benchmarks.free_against_fixed import fastest
from planner.calibration.intervals import oom_probability
from planner.calibration.mechanisms import points
from planner.columns import LayoutBatch
from planner.cost.cost_inputs import as_units_see
from planner.cost.layer.unit_work import unit_work
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.search import bounds, space_search
from planner.search import screen as screen_module
from planner.search.choice.preference import Weighed
from planner.search.fit import OOM_LIMIT, priced_and_fitting
from planner.search.screen import PARETO_SLACK, Goal
from planner.search.space.enumerate import Space, build_space
from planner.search.space_search import searched
from planner.search.variations import dials
from planner.search.variations.budgets import simple
from planner.search.variations.dials import DialSearch, Turned, turned
from planner.specs.layout import Layout, parse_ac
from tests.conftest import fixed_now, job_values, one_fast
from tests.pricing import priced_space, pricer_of

GPU = "h100-sxm-80gb"
LONG_HEAD = job_values("llama3.1-8b", GPU, 8, 8192, 128)
SHORT = {**LONG_HEAD["cluster"], "memory_fraction": 0.80}
JOBS: dict[str, dict[str, Any]] = {
    "8B, with a long head": LONG_HEAD,
    "8B, short of memory": {**LONG_HEAD, "cluster": SHORT},
    "70B, where everything is cut": job_values("llama3.1-70b", GPU, 64, 8192, 128),
    "experts": job_values("mixtral-8x7b", GPU, 16, 4096, 64),
    "Megatron": job_values("llama3.1-8b", GPU, 8, 8192, 128, trainer="megatron"),
    "Megatron, short of memory": {
        **job_values("llama3.1-8b", GPU, 8, 8192, 128, trainer="megatron"),
        "cluster": {**LONG_HEAD["cluster"], "memory_fraction": 0.93},
    },
    "1B, where launches count": job_values("llama3.2-1b", GPU, 16, 2048, 32),
}
FIXES: tuple[dict[str, Any], ...] = (
    {"pp": 1, "tp": 1}, {"pp": 2}, {"tp": 2}, {"compile": False}, {"micro_batch_size": 2},
    {"ac": "full"},
    {"precision": "bf16"},
)  # fmt: skip


def winner(name: str, fix: dict[str, Any]) -> Layout:
    job = read_job({**JOBS[name], "search": {"top_k": 1, "fix": fix, "prefer": "fastest"}})
    return recommend(job, now=fixed_now).ranked[0].layout


def prepared(name: str) -> tuple[Pricer, Space]:
    return priced_space(read_job(JOBS[name]))


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


def test_float8_all_gathers_that_cost_more_than_they_save_are_found_out() -> None:
    """Within a node casts take longer than half the bytes; enumeration lists the gathers alone."""
    job = {**job_values("deepseek-v2-lite", GPU, 4, 8192, 4), "search": {"prefer": "fastest"}}
    free, fixed = (fastest(job, fix) for fix in ({}, {"float8_all_gather": False}))
    assert free[0] <= fixed[0] * (1.0 + 1e-9)
    assert not free[1].float8_all_gather


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


@pytest.mark.parametrize(
    "name", one_fast("Megatron, short of memory", "8B, short of memory", "experts")
)
def test_budgets_sought_before_the_second_round_change_nothing_but_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they take lowers the limit of later rounds; what is near the best stays, as they do."""
    pricer, space = prepared(name)
    for module in (bounds, screen_module):
        monkeypatch.setattr(module, "BAND", 32)
    monkeypatch.setattr(space_search, "ROUND", 64)
    plain = searched(pricer, space, Goal(count=3))
    screened = plain.screened
    assert not plain.budgets
    search = searched(pricer, space, Goal(count=3, budgets=20))
    least = search.shortlist.ahead
    worth = float(screened.step_seconds[2])
    found = search.best_budgets(worth)
    search.worth = -np.inf
    late = search.best_budgets(worth)
    assert least < np.inf
    assert search.screened.num_priced <= screened.num_priced
    reach = 0.99 * PARETO_SLACK * min(float(screened.step_seconds[0]), least)
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
    nothing = [[kind.take(np.arange(0)) for kind in of_dial] for of_dial in search.budgets]
    search.budgets, search.worth = nothing, 0.9 * worth
    assert search.best_budgets(worth).layouts() == whole.layouts()
    search.budgets, search.worth = nothing, worth
    assert not len(search.best_budgets(worth))
    assert len(whole)


def test_simple_layouts_with_budgets_are_of_cells_with_few_mechanisms() -> None:
    search = searched(*prepared("8B, short of memory"), Goal(count=10, budgets=20))
    ((every, few),) = search.budgets
    of_every, of_few = (points(found.bases, search.pricer) for found in (every, few))
    (one,) = search.bases
    assert 0 < simple(one).sum() < len(one.cells)
    assert len(of_few) > 5
    assert of_few.max() < of_every.max()


KEEP = 3


def all_of(one: DialSearch, among: np.ndarray) -> Turned:
    """All of these cells that have a budget, none left out."""
    rounds = list(one.rounds())
    batch = LayoutBatch.concatenate([each.layouts.take(among[each.cell]) for each in rounds])
    return turned(one.pricer, batch, one.dial, one.worth)


@pytest.mark.parametrize("at_once", [2**13, 64])
@pytest.mark.parametrize("name", ["8B, short of memory", "experts"])
def test_the_fastest_are_sought_among_all(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all cells, a few at a time; then without the fastest eighth of cells."""
    monkeypatch.setattr(dials, "ROUND", 16 * at_once)
    search = searched(*prepared(name), Goal(count=10, budgets=KEEP))
    (one,) = search._bases(1.2 * float(search.screened.step_seconds[0]))  # not sought yet
    late = np.arange(len(one.cells)) >= len(one.cells) // 8
    slowest = []
    for among in (np.ones(len(late), dtype=np.bool_), late):
        found, wanted = one.fastest(KEEP, among), all_of(one, among).first(KEEP)
        assert len(found.bases) == KEEP
        assert np.array_equal(found.seconds, wanted.seconds)
        assert found.bases.layouts() == wanted.bases.layouts()
        assert np.array_equal(found.number, wanted.number)
        slowest.append(found.seconds[-1])
    assert slowest[1] > slowest[0]


FREE = ("moe_dispatcher", "pp_schedule", "virtual_stages", "zero_stage", "compile", "async_tp")


def large_job(model: str, num_gpus: int, gpu: str = "h100-sxm-80gb", **training: object) -> Pricer:
    return pricer_of(read_job(job_values(model, gpu, num_gpus, 4096, 1024, **training)))


def test_the_measured_beside_the_best_fit_and_come_from_their_cells() -> None:
    pricer = large_job("mixtral-8x7b", 64)
    space = build_space(pricer.rules_context)
    search = searched(pricer, space, Goal(count=10))
    screened, found = search.screened, search.measured(8)
    assert 0 < len(found) <= 8
    assert not Weighed.of(found, pricer).unmeasured.any()
    seconds, fits = priced_and_fitting(pricer, found)
    assert fits.all()
    assert (np.diff(seconds) >= 0.0).all()
    cells = {cell_of(screened.batch, row) for row in range(len(screened.batch))}
    assert {cell_of(found, row) for row in range(len(found))} <= cells
    # none of what the screen kept is measured, fits and is faster
    kept, their_fits = priced_and_fitting(pricer, screened.batch)
    of_kept = ~Weighed.of(screened.batch, pricer).unmeasured.any(axis=0) & their_fits
    assert of_kept.any()
    assert seconds[0] <= kept[of_kept].min() * (1.0 + 1e-12)


def cell_of(batch: Any, row: int) -> tuple[object, ...]:
    return tuple(column[row] for name, column in batch.columns() if name not in FREE)


LARGE = [
    ("deepseek-v3", "h800-sxm-80gb", 2048, 4096, 15360),
    ("kimi-k2", "h100-sxm-80gb", 1024, 4096, 8192),
]


@pytest.mark.slow
@pytest.mark.parametrize("given", LARGE, ids=str)
def test_what_no_run_supports_is_named_and_does_not_lead(given: tuple[Any, ...]) -> None:
    plan = planner.recommend(**job_values(*given))
    fastest = min(plan.ranked, key=lambda one: one.estimate.step_seconds or np.inf)
    assert any("deepep" in one for one in fastest.unmeasured)
    assert plan.ranked[0].layout.moe_dispatcher == "alltoall"
    assert not any("deepep" in one for one in plan.ranked[0].unmeasured)


def test_units_of_pipelines_differ_only_where_experts_leave_their_precision() -> None:
    """What is priced once for several numbers of stages costs the same for each of them."""
    pricer = large_job("deepseek-v3", 256)
    cells = build_space(pricer.rules_context).cells
    rows = np.random.default_rng(5).permutation(len(cells))[:300]
    batch = cells.take(rows)
    assert len({int(pp > 1) for pp in batch.pp}) == 2
    assert len({*product(batch.precision.tolist(), (batch.cp > 1).tolist())}) > 4
    alike = as_units_see(pricer, batch)
    assert (alike.pp < np.minimum(batch.pp, 2)).any()
    own, shared = (unit_work(pricer.context(one), pricer.model) for one in (batch, alike))
    for field in fields(own):
        np.testing.assert_array_equal(getattr(own, field.name), getattr(shared, field.name))
    wrong = replace(batch, pp=np.ones(len(batch), dtype=np.int64))
    forgotten = unit_work(pricer.context(wrong), pricer.model)
    assert not np.array_equal(own.again_all, forgotten.again_all)
