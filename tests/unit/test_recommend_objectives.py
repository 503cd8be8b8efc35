"""What each objective chooses, within one size and between several."""

from functools import cache
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from planner.api.render.plan import plan_view
from planner.calibration.classes import factor_of
from planner.calibration.intervals import time_spread
from planner.columns import LayoutBatch
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.search.choice.preference import spread_within_stack
from planner.specs.plan import Plan
from tests.conftest import fixed_now, job_values
from tests.pricing import pricer_of

FRAGILE = {"mtbf_gpu_hours": 40}
NARROW = {"allow": {"precision": ["bf16"]}, "fix": {"compile": True, "cp": 1, "pp": 1}}


@cache
def plan_of(objective: str, num_gpus: Any = "8..32", prefer: str = "simplest", **more: Any) -> Plan:
    search = {"top_k": 6, "objective": objective, "prefer": prefer, **NARROW}
    job = job_values("llama3-8b", "h100-sxm-80gb", num_gpus, 8192, 64, search=search)
    return recommend(read_job({**job, "cluster": job["cluster"] | more}), now=fixed_now)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    names = ("throughput", "time", "cost", "energy", "memory")
    return {objective: plan_of(objective) for objective in names}


@pytest.mark.slow
def test_sizes_hold_the_best_of_every_size(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        assert [option.num_gpus for option in plan.sizes] == [8, 16, 32]
        assert all(option.layout.num_gpus == option.num_gpus for option in plan.sizes)
        winner = plan.ranked[0]
        chosen = next(option for option in plan.sizes if option.num_gpus == winner.num_gpus)
        assert chosen.layout == winner.layout
        run = winner.run
        assert (chosen.cost, chosen.time_to_train_seconds) == (run.cost, run.time_to_train_seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "field", "sign"), [
    ("throughput", "tokens_per_second", -1),
    ("time", "time_to_train_seconds", 1),
    ("cost", "cost", 1),
    ("energy", "energy_joules", 1),
])  # fmt: skip
def test_the_winner_is_best_by_its_objective(
    plans: dict[str, Plan], objective: str, field: str, sign: int
) -> None:
    plan = plans[objective]
    values = {option.num_gpus: sign * getattr(option, field) for option in plan.sizes}
    assert plan.ranked[0].num_gpus == min(values, key=lambda num_gpus: values[num_gpus])
    # No plan of another objective does better by this one.
    best = min(sign * getattr(option, field) for other in plans.values() for option in other.sizes)
    assert min(values.values()) <= best * (1 + 1e-6 * (1 if best > 0 else -1))


@pytest.mark.slow
def test_memory_leaves_most_headroom(plans: dict[str, Plan]) -> None:
    needs = {name: plan.ranked[0].estimate.device_bytes or 0.0 for name, plan in plans.items()}
    assert min(needs, key=lambda name: needs[name]) == "memory"
    ranked = [entry.estimate.device_bytes or 0.0 for entry in plans["memory"].ranked]
    assert ranked == sorted(ranked)
    # Nothing that fits on the front of speed against headroom leaves more.
    plan = plan_of("memory", "8")
    winner = plan.ranked[0].estimate
    headroom = max(point.headroom_bytes for point in plan.pareto)
    assert (winner.usable_bytes or 0.0) - (winner.device_bytes or 0.0) >= headroom * (1 - 1e-9)


@pytest.mark.slow
def test_failures_can_make_fewer_gpus_the_faster_choice() -> None:
    # Every GPU fails each 2 hours: at 32 GPUs a failure each 4 minutes, a third of what a restart
    #     takes.
    fragile = plan_of("throughput", mtbf_gpu_hours=2)
    assert fragile.ranked[0].num_gpus < 32
    assert plan_of("throughput").ranked[0].num_gpus == 32
    assert any("interruption every" in line for line in fragile.warnings)


def test_one_size_ranks_by_expected_step_time() -> None:
    """By the mean of a log-normal, behind the fastest and the best measured. What nobody measured
    widens own errors between layouts, and all in an estimate (`intervals.interval_sd`).
    """
    plan = plan_of("throughput", "8", prefer="fastest")
    job = read_job(plan.job)
    pricer = pricer_of(job)
    batch = LayoutBatch.from_layouts([entry.layout for entry in plan.ranked])
    sd = time_spread(pricer, batch, pricer.price(batch)).sd
    assert np.ptp(sd) > 0.01
    steps = np.array([entry.estimate.step_seconds or 0.0 for entry in plan.ranked])
    ahead = {1, plan.best_measured.rank} if plan.best_measured else {1}
    behind = [place for place, entry in enumerate(plan.ranked) if entry.rank not in ahead]
    among_each_other = spread_within_stack(pricer, batch).sd
    expected = (steps * np.exp(among_each_other**2 / 2))[behind]
    assert len(expected) >= 4
    assert expected == pytest.approx(np.sort(expected), rel=2e-3)
    asked = (pricer.calibration, job.model, job.cluster.gpu.family)
    for entry, own in zip(plan.ranked, sd, strict=True):  # factors of intervals alone
        factor = factor_of(*asked, unmeasured=bool(entry.unmeasured))
        assert entry.estimate.time_sd >= factor * own
    assert steps[0] == min(steps)
    assert len(plan.sizes) == 1
    assert plan.sizes[0].on_front


@pytest.mark.slow
def test_layouts_of_different_sizes_are_no_near_copies(plans: dict[str, Plan]) -> None:
    ranked = [(entry.num_gpus, entry.layout) for entry in plans["cost"].ranked]
    last = plans["cost"].ranked[-1].run
    assert len(set(ranked)) == len(ranked)
    for option in plans["cost"].sizes:
        assert option.cost > last.cost or (option.num_gpus, option.layout) in ranked


def test_sizes_that_hold_nothing_are_named() -> None:
    plan = plan_of("time", (1, 8))
    assert [option.num_gpus for option in plan.sizes] == [8]
    assert "no layout fits on 1 GPU" in plan.warnings


@pytest.mark.slow
def test_failures_make_small_jobs_cheap_and_large_ones_fast() -> None:
    plans = (plan_of(objective, **FRAGILE) for objective in ("time", "cost", "energy"))
    assert [plan.ranked[0].num_gpus for plan in plans] == [32, 8, 8]


@pytest.mark.slow
def test_free_gpus_are_counted_in_hours() -> None:
    plan = plan_of("cost", price_per_gpu_hour=0, **FRAGILE)
    assert all(option.cost == 0 for option in plan.sizes)
    assert plan.ranked[0].num_gpus == 8
    assert [option.on_front for option in plan.sizes] == [True, True, True]


@pytest.mark.slow
def test_plan_says_how_sure_and_what_comes_next(plans: dict[str, Plan]) -> None:
    for objective, plan in plans.items():
        assert (plan.regret is None) == (objective == "memory")
        assert plan.ranked[0].reasons[1].startswith("without ")
    sure = plans["throughput"].regret
    assert 0.0 < sure.expected_share < sure.share_95 < 1.0


@pytest.mark.slow
def test_number_two_of_another_size_is_compared_by_the_whole_run(plans: dict[str, Plan]) -> None:
    plan = plans["cost"]
    first, second = plan.ranked[:2]
    assert first.num_gpus != second.num_gpus
    assert f"on {second.num_gpus} GPUs instead of {first.num_gpus}" in plan.headline[1]
    assert "trains for" in plan.headline[2]
    assert not any("a step" in line for line in plan.headline)


@pytest.mark.slow
def test_screen_shows_the_whole_run_and_the_sizes(plans: dict[str, Plan]) -> None:
    console = Console(width=110, record=True, file=StringIO())
    console.print(plan_view(plans["cost"], 110, letters=True))
    text = " ".join(console.export_text().split())
    run = plans["cost"].ranked[0].run
    figures = (f"goodput {run.goodput:.2%}", f"price ${run.cost:,.0f}")
    words = ("The whole run: 1T tokens", "How many GPUs", "sure that number 1 is the")
    every = f"async, every {run.checkpoint.interval_steps:,} steps"
    assert [one for one in (*figures, *words, every) if one not in text] == []
