"""Plans that spent probes stand by what they measured, on landscapes played again exactly."""

from typing import Any

import numpy as np
import pytest

from planner.api.cli.output import as_text
from planner.api.render.plan import plan_view
from planner.intake.jobs import read_job
from planner.plan.explain import explain
from planner.plan.recommend import recommend
from planner.specs.layout import Layout
from planner.specs.measurement import Measured, Measurement
from planner.specs.plan import Plan
from planner.study.ask_tell import Event, Ranked
from planner.study.evaluations import Proposal
from planner.study.measured_search import Probing, with_measurement
from planner.study.records import Record
from planner.study.study import BROKEN
from planner.units import times_as_fast
from tests.conftest import fixed_now, job_values
from tests.e2e.probe_jobs import TINY

REQUEST: dict[str, Any] = {
    **job_values(TINY, "cpu", 2, 32, 8),
    "search": {"allow": {"precision": ["bf16"], "compile": [False]}, "top_k": 3},
    "probe": {"max_probes": 8, "max_gpu_seconds": 1e9},
}


def measurement(layout: Layout, name: str, **numbers: Any) -> Measurement:
    """A run of this layout itself."""
    job = read_job({**REQUEST, "layout": layout.model_dump(mode="json")})
    return Measurement(id=name, created_at="", job=job, measured=Measured(rung="probed", **numbers))


def planned(request: dict[str, Any] = REQUEST, **probing: Any) -> Plan:
    how = Probing(num_devices=2, **probing) if probing else None
    return recommend(read_job(request), now=fixed_now, probing=how)


class Pool:
    """Every layout takes the same, but for the noise of a machine that others use too."""

    def __init__(self, seed: int, *, noise_sd: float) -> None:
        self.seed, self.noise_sd = seed, noise_sd
        self.told: list[tuple[Layout, float]] = []
        self.events: list[Event] = []

    def measure(self, one: Proposal) -> Measurement:
        rng = np.random.default_rng([self.seed, len(self.told)])
        step = 0.04 * float(np.exp(self.noise_sd * rng.standard_normal()))
        self.told.append((one.layout, step))
        numbers = {"step_seconds": step, "gpu_seconds": 10.0, "steps": 10}
        return measurement(one.layout, f"m-{len(self.told)}", **numbers)

    def plan(self, max_probes: int = 8, **search: Any) -> Plan:
        probe = {**REQUEST["probe"], "max_probes": max_probes}
        request = {**REQUEST, "search": {**REQUEST["search"], **search}, "probe": probe}
        return planned(request, measure=self.measure, on_event=self.events.append)


Played = tuple[Pool, Plan]


@pytest.fixture(scope="module")
def played() -> Played:
    """As on a laptop that has other things to do."""
    pool = Pool(3, noise_sd=0.1)
    return pool, pool.plan()


def test_number_one_is_the_fastest_measured_and_its_step_is_its_measurement(played: Played) -> None:
    pool, plan = played
    layout, seconds = min(pool.told, key=lambda pair: pair[1])
    winner = plan.ranked[0]
    assert (winner.layout, winner.source) == (layout, "probed")
    assert winner.expected_step_seconds == pytest.approx(seconds)
    assert winner.measurement["step_seconds"] == winner.expected_step_seconds


def test_number_one_has_one_price_and_one_step_everywhere(played: Played) -> None:
    _, plan = played
    first, second = plan.ranked[:2]
    (option,) = plan.sizes
    assert (option.layout, option.cost) == (first.layout, first.run.cost)
    shown = first.shown
    assert (shown.step_seconds, shown.step_interval) == (first.expected_step_seconds, None)
    assert shown.predicted_step_seconds == first.estimate.step_seconds
    rate = (first.estimate.tokens_per_second_per_gpu or 0.0) * first.expected_speedup
    assert shown.tokens_per_second_per_gpu == pytest.approx(rate)
    lines = explain(plan, 2, 1)
    faster = times_as_fast((shown.step_seconds or 0) / (second.shown.step_seconds or 1))
    assert any(line.startswith(faster) for line in lines), lines


def test_layouts_of_different_sizes_are_compared_by_speed_and_price(played: Played) -> None:
    _, plan = played
    first, second = plan.ranked[:2]
    half = second.model_copy(update={"num_gpus": first.num_gpus // 2, "run": first.run})
    lines = explain(plan.model_copy(update={"ranked": [first, half]}), 2, 1)
    (line,) = [line for line in lines if "in all" in line]
    assert line.startswith("1 GPU against 2 GPUs: ")
    assert not any(line.endswith(" a step") for line in lines), "a step says nothing of sizes"


def test_what_was_measured_is_listed_beyond_top_k_in_the_order_of_its_times(played: Played) -> None:
    pool, plan = played
    asked = {layout for layout, _ in pool.told}
    assert len(asked) > 3, "more than top_k"
    assert {entry.layout for entry in plan.ranked} >= asked
    times = [entry.measurement["step_seconds"] for entry in plan.ranked if entry.measurement]
    assert times == sorted(times)
    assert [entry.rank for entry in plan.ranked] == list(range(1, len(plan.ranked) + 1))


def test_best_never_goes_up_and_ends_at_the_headline(played: Played) -> None:
    pool, plan = played
    best = [event.best_seconds for event in pool.events if event.best_seconds is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == plan.ranked[0].expected_step_seconds
    assert pool.events[-1].best_layout == plan.ranked[0].layout


def test_the_screen_says_one_step(played: Played) -> None:
    _, plan = played
    text = as_text(plan_view(plan, 200, letters=True), 200)
    runs = plan.ranked[0].measurement or {}
    assert f"Measured: {1e3 * runs['step_seconds']:.3g} ms a step" in text


NEXT = "expected 1.11 times as fast as number 1, and not measured: probe it next"


@pytest.mark.parametrize(("seconds", "hints"), [(0.018, [NEXT]), (0.01995, [])])
def test_an_unmeasured_layout_that_may_be_faster_says_so(
    played: Played, seconds: float, hints: list[str]
) -> None:
    ranked = played[1].ranked
    known = {"status": "ok", "log_seconds": float(np.log(0.02)), "variance": 1e-4, "runs": 2}
    record = Record(row=0, margin=None, message="", **known)
    best, other = (
        Ranked(row=row, layout=ranked[row].layout, expected_seconds=step, record=found)
        for row, step, found in ((0, 0.02, record), (1, seconds, None))
    )
    paper = ranked[1].model_copy(update={"reasons": ["as priced"], "measurement": None})
    entry, mine = (with_measurement(paper, one, best) for one in (other, best))
    assert entry.reasons == [*hints, "as priced"]
    assert (entry.expected_step_seconds, entry.measurement) == (seconds, None)
    assert mine.reasons == ["as priced"]
    assert (mine.measurement["step_seconds"], mine.measurement["runs"]) == (pytest.approx(0.02), 2)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_measured_in_few_probes_an_answer_is_a_measured_one(seed: int) -> None:
    pool = Pool(seed, noise_sd=0.3)
    winner, *others = pool.plan(max_probes=3, top_k=20).ranked
    assert winner.expected_step_seconds == pytest.approx(min(step for _, step in pool.told))
    measured = [entry.expected_step_seconds or 0.0 for entry in others if entry.measurement]
    assert all(seconds >= winner.expected_step_seconds for seconds in measured)


def test_number_one_on_paper_is_measured_first(played: Played) -> None:
    pool, _ = played
    assert pool.told[0][0] == planned().ranked[0].layout


def test_where_no_probe_can_run_the_plan_on_paper_stands() -> None:
    def broken(one: Proposal) -> Measurement:
        failed = {"status": "failed", "failure": BROKEN, "message": "no driver"}
        return measurement(one.layout, "m", **failed)

    plan = planned(measure=broken)
    assert [entry.layout for entry in plan.ranked] == [entry.layout for entry in planned().ranked]
    assert {entry.expected_step_seconds for entry in plan.ranked} == {None}
    assert (plan.probing["probes"], plan.probing["broken"]) == (0, "no driver")


def test_what_the_program_cannot_run_is_counted_and_not_asked() -> None:
    first, pool = planned().ranked[0].layout, Pool(0, noise_sd=0.0)
    reasons = {first.ac: "its recomputation"}
    plan = planned(measure=pool.measure, refuses=lambda layout: reasons.get(layout.ac))
    assert first.ac not in {layout.ac for layout, _ in pool.told} != set()
    (refused,) = (plan.probing or {})["refused"]
    assert (refused["reason"], refused["layouts"] > 0) == ("its recomputation", True)
