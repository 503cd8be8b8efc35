"""A study measures first what number 1 on paper, or the fastest on paper, rests on unmeasured."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.specs.layout import Layout
from planner.specs.measurement import Measured, Measurement
from planner.specs.plan import Plan
from planner.study.isolating import isolating
from planner.study.measured_search import Probing
from planner.study.study import Proposal
from planner.trainers.registry import resolve_layout
from tests.conftest import fixed_ports

REQUEST: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"seq_len": 8192, "global_batch_size": 64},
    "search": {
        "fix": {"tp": 1, "cp": 1, "pp": 1, "precision": "bf16", "dp_replicate": 1, "compile": True},
        "top_k": 3,
    },
    "probe": {"max_probes": 6, "max_gpu_seconds": 1e9},
}
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
    return float(pricer().price(batch_of(one)).step_seconds[0])


class Pool:
    """Runs as predicted, but for memory budgets, which take `factor` times as long."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[Proposal] = []

    def measure(self, asked: Sequence[Proposal]) -> Iterator[tuple[Proposal, Measurement]]:
        for one in asked:
            self.asked.append(one)
            step = seconds(one.layout)
            step *= self.factor if one.layout.ac.startswith("memory-budget") else 1.0
            job = read_job({**REQUEST, "layout": one.layout.model_dump(mode="json")})
            numbers = Measured(rung="probed", step_seconds=step, gpu_seconds=10.0, steps=10)
            name = f"m-{len(self.asked)}"
            yield one, Measurement(id=name, created_at="", job=job, measured=numbers)

    def plan(self, max_probes: int = 6, **search: Any) -> Plan:
        values = {
            **REQUEST,
            "search": {**REQUEST["search"], **search},
            "probe": {**REQUEST["probe"], "max_probes": max_probes},
        }
        return recommend(
            read_job(values),
            ports=fixed_ports(),
            calibration=CALIBRATION,
            probing=Probing(measure=self.measure, num_devices=8),
        )


def batch_of(one: Layout) -> Any:
    from planner.columns import LayoutBatch

    return LayoutBatch.from_layouts([one])


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
    taught = replace(
        pricer(),
        calibration=replace(
            CALIBRATION, seen=CALIBRATION.seen | {("torchtitan", "hopper", BUDGETS)}
        ),
    )
    assert isolating(taught, full, budget) is None


def test_what_needs_more_changes_is_measured_as_the_fastest_on_paper_has_it() -> None:
    first = layout(ac="none", micro_batch_size=1)  # budgets cannot beat it at its own sizes
    paper = layout(ac="memory-budget-0.5", micro_batch_size=2)
    assert (
        seconds(paper) < seconds(first) < seconds(paper.model_copy(update={"micro_batch_size": 1}))
    )
    found = isolating(pricer(), first, paper)
    assert found.layout == paper
    assert found.reason.startswith("the fastest on paper: measures memory-budget recomputation")


@pytest.mark.parametrize(
    "factor", [0.97, 1.25], ids=["as good as it looks", "slower than it looks"]
)
def test_the_probe_after_the_check_measures_it_and_then_it_is_measured(factor: float) -> None:
    pool = Pool(factor)
    plan = pool.plan(max_probes=4)
    check, second = pool.asked[:2]
    assert check.reason.startswith("number 1 on paper: ")
    assert not check.layout.ac.startswith("memory-budget")
    assert second.layout.ac.startswith("memory-budget")
    assert "measures memory-budget recomputation, which no run" in second.reason
    assert plan.ranked[0].layout.ac.startswith("memory-budget") == (factor < 1.0)
    assert plan.rests_on is None
    assert not any("memory-budget recomputation" in one.unmeasured for one in plan.ranked)


def test_any_sampler_measures_it_second() -> None:
    pool = Pool(1.1)
    pool.plan(max_probes=2, sampler="random")
    assert "measures memory-budget recomputation" in pool.asked[1].reason


def test_number_1_that_rests_on_it_measures_it_as_the_first_probe() -> None:
    pool = Pool(1.25)
    plan = pool.plan(max_probes=3, prefer="fastest")
    assert pool.asked[0].layout.ac.startswith("memory-budget")
    assert pool.asked[0].reason.startswith(
        "number 1 on paper, which measures memory-budget recomputation"
    )
    assert not plan.ranked[0].layout.ac.startswith("memory-budget"), "found out"


def test_without_a_probe_that_pays_for_it_nothing_is_said_to_be_measured() -> None:
    pool = Pool(1.0)
    plan = pool.plan(max_probes=1)
    assert len(pool.asked) == 1
    marked = [one for one in plan.ranked if one.layout.ac.startswith("memory-budget")]
    assert marked
    assert all("memory-budget recomputation" in one.unmeasured for one in marked)
    assert np.isfinite(plan.ranked[0].expected_step_seconds or np.inf)
