"""A study measures first what number 1 on paper, or the fastest on paper, rests on unmeasured."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.specs.layout import Layout
from planner.specs.measurement import Measured, Measurement
from planner.specs.plan import Plan, RankedLayout
from planner.study.evaluations import Proposal
from planner.study.isolating import isolating
from planner.study.measured_search import Probing
from planner.trainers.registry import resolve_layout
from tests.conftest import UNMEASURED_JOB, fixed_now

SEARCH = {**UNMEASURED_JOB["search"], "top_k": 3, "prefer": "simplest"}
REQUEST = {**UNMEASURED_JOB, "search": SEARCH}
JOB = read_job(REQUEST)
BUDGETS = "ac memory-budget"
# As if nobody had measured budgets, and somebody the rest, whatever the public rows hold.
CALIBRATION = replace(
    shipped_calibration(),
    seen=frozenset(one for one in shipped_calibration().seen if one[2] != BUDGETS),
)


def layout(**values: object) -> Layout:
    given = {"dp_shard": 8, "compile": True, "micro_batch_size": 2, **values}
    return resolve_layout(given, trainer="torchtitan", num_gpus=8)


def pricer() -> Pricer:
    return Pricer.build(JOB.model, JOB.cluster, JOB.training, CALIBRATION)


def seconds(one: Layout) -> float:
    return float(pricer().price(LayoutBatch.from_layouts([one])).step_seconds[0])


class Pool:
    """Runs as predicted, but for memory budgets, which take `factor` times as long."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[Proposal] = []

    def measure(self, one: Proposal) -> Measurement:
        self.asked.append(one)
        step = seconds(one.layout) * (self.factor if has_budget(one) else 1.0)
        job = read_job({**REQUEST, "layout": one.layout.model_dump(mode="json")})
        numbers = Measured(rung="probed", step_seconds=step, gpu_seconds=10.0, steps=10)
        name = f"m-{len(self.asked)}"
        return Measurement(id=name, created_at="", job=job, measured=numbers)

    def plan(self, max_probes: int = 6, **search: Any) -> Plan:
        probe = {"max_probes": max_probes, "max_gpu_seconds": 1e9}
        job = read_job({**REQUEST, "search": {**SEARCH, **search}, "probe": probe})
        probing = Probing(measure=self.measure, num_devices=8)
        return recommend(job, now=fixed_now, calibration=CALIBRATION, probing=probing)


def has_budget(one: Proposal | RankedLayout) -> bool:
    return one.layout.ac.startswith("memory-budget")


def test_the_pair_differs_in_as_little_as_the_mechanism_needs() -> None:
    first = layout(ac="full")
    paper = layout(ac="memory-budget-0.45", micro_batch_size=1)
    assert seconds(paper) < seconds(first)
    found = isolating(pricer(), first, paper)
    assert found.layout == first.model_copy(update={"ac": "memory-budget-0.45"})
    assert found.reason == (
        "number 1 but for ac memory-budget-0.45: measures memory-budget recomputation, "
        "which no run behind the calibration used"
    )


def test_nothing_to_isolate_where_all_is_measured_or_number_1_measures_it_itself() -> None:
    full, budget = layout(ac="full"), layout(ac="memory-budget-0.04")
    assert isolating(pricer(), full, layout(ac="full", zero_stage=2)) is None
    assert isolating(pricer(), budget, layout(ac="memory-budget-0.05")) is None
    seen = CALIBRATION.seen | {("torchtitan", "hopper", BUDGETS)}
    taught = replace(pricer(), calibration=replace(CALIBRATION, seen=seen))
    assert isolating(taught, full, budget) is None


def test_what_needs_more_changes_is_measured_as_the_fastest_on_paper_has_it() -> None:
    first = layout(ac="none", micro_batch_size=1)  # budgets cannot beat it at its own sizes
    paper = layout(ac="memory-budget-0.5", micro_batch_size=2)
    smaller = paper.model_copy(update={"micro_batch_size": 1})
    assert seconds(paper) < seconds(first) < seconds(smaller)
    found = isolating(pricer(), first, paper)
    assert found.layout == paper
    assert found.reason.startswith("the fastest on paper: measures memory-budget recomputation")


@pytest.mark.parametrize("factor", [0.97, 1.25])  # as good as it looks, or slower
def test_the_probe_after_the_check_measures_it_and_then_it_is_measured(factor: float) -> None:
    pool = Pool(factor)
    plan = pool.plan(max_probes=4)
    check, second = pool.asked[:2]
    assert check.reason.startswith("number 1 on paper: ")
    assert (has_budget(check), has_budget(second)) == (False, True)
    assert "measures memory-budget recomputation, which no run" in second.reason
    assert has_budget(plan.ranked[0]) == (factor < 1.0)
    assert plan.rests_on is None
    assert not any("memory-budget recomputation" in one.unmeasured for one in plan.ranked)


def test_any_sampler_measures_it_second() -> None:
    pool = Pool(1.1)
    pool.plan(max_probes=2, sampler="random")
    assert "measures memory-budget recomputation" in pool.asked[1].reason


def test_number_1_that_rests_on_it_measures_it_as_the_first_probe() -> None:
    pool = Pool(1.25)
    plan = pool.plan(max_probes=3, prefer="fastest")
    words = "number 1 on paper, which measures memory-budget recomputation"
    assert has_budget(pool.asked[0])
    assert pool.asked[0].reason.startswith(words)
    assert not has_budget(plan.ranked[0]), "found out"


def test_without_a_probe_that_pays_for_it_nothing_is_said_to_be_measured() -> None:
    pool = Pool(1.0)
    plan = pool.plan(max_probes=1)
    assert len(pool.asked) == 1
    marked = [one.unmeasured for one in plan.ranked if has_budget(one)]
    assert marked
    assert all("memory-budget recomputation" in unmeasured for unmeasured in marked)
    assert np.isfinite(plan.ranked[0].expected_step_seconds or np.inf)
