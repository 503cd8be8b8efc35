"""Plans that spent probes stand by what they measured, on landscapes played again exactly."""

from collections.abc import Iterator, Sequence
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
from planner.study.measured_search import Probing, with_measurement
from planner.study.posterior import Record
from planner.study.study import BROKEN, Proposal
from planner.units import times_as_fast
from tests.conftest import fixed_ports

REQUEST: dict[str, Any] = {
    "model": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 256, "model_type": "llama", "name": "tiny",
    },
    "cluster": {"gpu": "cpu", "num_gpus": 2}, "training": {"seq_len": 32, "global_batch_size": 8},
    "search": {"allow": {"precision": ["bf16"], "compile": [False]}, "top_k": 3},
    "probe": {"max_probes": 8, "max_gpu_seconds": 1e9},
}  # fmt: skip


class Pool:
    """Every layout takes the same, but for the noise of a machine that others use too."""

    def __init__(self, seed: int, *, noise_sd: float) -> None:
        self.seed, self.noise_sd = seed, noise_sd
        self.told: list[tuple[Layout, float]] = []
        self.events: list[Event] = []

    def measure(self, asked: Sequence[Proposal]) -> Iterator[tuple[Proposal, Measurement]]:
        for one in asked:
            assert one.expected_seconds is not None
            rng = np.random.default_rng([self.seed, len(self.told)])
            step = 0.04 * float(np.exp(self.noise_sd * rng.standard_normal()))
            self.told.append((one.layout, step))
            job = read_job({**REQUEST, "layout": one.layout.model_dump(mode="json")})
            numbers = Measured(rung="probed", step_seconds=step, gpu_seconds=10.0, steps=10)
            name = f"m-{len(self.told)}"
            yield one, Measurement(id=name, created_at="", job=job, measured=numbers)

    def plan(self, max_probes: int = 8, **search: Any) -> Plan:
        probe = {**REQUEST["probe"], "max_probes": max_probes}
        job = read_job({**REQUEST, "search": {**REQUEST["search"], **search}, "probe": probe})
        probing = Probing(measure=self.measure, num_devices=2, on_event=self.events.append)
        return recommend(job, ports=fixed_ports(), probing=probing)


@pytest.fixture(scope="module")
def played() -> tuple[Pool, Plan]:
    """As on a laptop that has other things to do."""
    pool = Pool(3, noise_sd=0.1)
    return pool, pool.plan()


def test_number_one_is_the_fastest_measured_and_its_step_is_its_measurement(
    played: tuple[Pool, Plan],
) -> None:
    pool, plan = played
    fastest = min(pool.told, key=lambda pair: pair[1])
    winner = plan.ranked[0]
    assert winner.layout == fastest[0]
    assert winner.expected_step_seconds == pytest.approx(fastest[1])
    assert winner.measurement["step_seconds"] == winner.expected_step_seconds
    assert winner.source == "probed"


def test_number_one_has_one_price_and_one_step_everywhere(played: tuple[Pool, Plan]) -> None:
    _, plan = played
    first = plan.ranked[0]
    assert first.run is not None
    (option,) = plan.sizes
    assert (option.layout, option.cost) == (first.layout, first.run.cost)
    shown = first.shown
    assert shown.step_seconds == first.expected_step_seconds
    assert shown.step_interval is None
    assert shown.predicted_step_seconds == first.estimate.step_seconds
    assert shown.tokens_per_second_per_gpu == pytest.approx(
        (first.estimate.tokens_per_second_per_gpu or 0.0) * first.expected_speedup
    )
    second = plan.ranked[1]
    lines = explain(plan, 2, 1)
    assert any(
        line.startswith(times_as_fast((shown.step_seconds or 0) / (second.shown.step_seconds or 1)))
        for line in lines
    ), lines


def test_layouts_of_different_sizes_are_compared_by_speed_and_price(
    played: tuple[Pool, Plan],
) -> None:
    _, plan = played
    first, second = plan.ranked[:2]
    assert first.run is not None
    half = second.model_copy(update={"num_gpus": first.num_gpus // 2, "run": first.run})
    lines = explain(plan.model_copy(update={"ranked": [first, half]}), 2, 1)
    (line,) = [line for line in lines if "in all" in line]
    assert line.startswith("1 GPU against 2 GPUs: ")
    assert not any(line.endswith(" a step") for line in lines), "a step says nothing of sizes"


def test_what_was_measured_is_listed_beyond_top_k_in_the_order_of_its_times(
    played: tuple[Pool, Plan],
) -> None:
    pool, plan = played
    asked = {layout for layout, _ in pool.told}
    assert len(asked) > 3, "more than top_k"
    assert {entry.layout for entry in plan.ranked} >= asked
    times = [entry.measurement["step_seconds"] for entry in plan.ranked if entry.measurement]
    assert times == sorted(times)
    assert [entry.rank for entry in plan.ranked] == list(range(1, len(plan.ranked) + 1))


def test_best_never_goes_up_and_ends_at_the_headline(played: tuple[Pool, Plan]) -> None:
    pool, plan = played
    best = [event.best_seconds for event in pool.events if event.best_seconds is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == plan.ranked[0].expected_step_seconds
    assert pool.events[-1].best_layout == plan.ranked[0].layout


def test_the_screen_says_one_step(played: tuple[Pool, Plan]) -> None:
    _, plan = played
    text = as_text(plan_view(plan, 200, letters=True), 200)
    runs = plan.ranked[0].measurement or {}
    assert f"Measured: {1e3 * runs['step_seconds']:.3g} ms a step" in text


@pytest.mark.parametrize(
    ("seconds", "hint"),
    [
        (0.018, "expected 1.11 times as fast as number 1, and not measured: probe it next"),
        (0.01995, None),
    ],
)
def test_an_unmeasured_layout_that_may_be_faster_says_so(
    played: tuple[Pool, Plan], seconds: float, hint: str | None
) -> None:
    _, plan = played
    record = Record(
        row=0, status="ok", log_seconds=float(np.log(0.02)), variance=1e-4, runs=2, margin=None,
        message="",
    )  # fmt: skip
    best, other = (
        Ranked(
            row=row,
            layout=plan.ranked[row].layout,
            expected_seconds=step,
            sd=0.01,
            risk=0.0,
            record=known,
        )
        for row, step, known in ((0, 0.02, record), (1, seconds, None))
    )
    paper = plan.ranked[1].model_copy(update={"reasons": ["as priced"], "measurement": None})
    entry = with_measurement(paper, other, best)
    assert entry.reasons == [*([hint] if hint else []), "as priced"]
    assert (entry.expected_step_seconds, entry.measurement) == (seconds, None)
    mine = with_measurement(paper, best, best)
    assert mine.reasons == ["as priced"]
    assert (mine.measurement["step_seconds"], mine.measurement["runs"]) == (pytest.approx(0.02), 2)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_measured_in_few_probes_an_answer_is_a_measured_one(seed: int) -> None:
    pool = Pool(seed, noise_sd=0.3)
    winner, *others = pool.plan(max_probes=3, top_k=20).ranked
    assert winner.expected_step_seconds == pytest.approx(min(step for _, step in pool.told))
    slower = [entry for entry in others if entry.measurement]
    seconds = [entry.expected_step_seconds or 0.0 for entry in slower]
    assert all(one >= winner.expected_step_seconds for one in seconds)


def on_paper() -> Plan:
    return recommend(read_job(REQUEST), ports=fixed_ports())


def test_number_one_on_paper_is_measured_first(played: tuple[Pool, Plan]) -> None:
    pool, _ = played
    assert pool.told[0][0] == on_paper().ranked[0].layout


def test_where_no_probe_can_run_the_plan_on_paper_stands() -> None:
    def broken(asked: Sequence[Proposal]) -> Iterator[tuple[Proposal, Measurement]]:
        for one in asked:
            job = read_job({**REQUEST, "layout": one.layout.model_dump(mode="json")})
            numbers = Measured(status="failed", rung="probed", failure=BROKEN, message="no driver")
            yield one, Measurement(id="m", created_at="", job=job, measured=numbers)

    ports = fixed_ports()
    plan = recommend(read_job(REQUEST), ports=ports, probing=Probing(measure=broken, num_devices=2))
    assert [entry.layout for entry in plan.ranked] == [entry.layout for entry in on_paper().ranked]
    assert {entry.expected_step_seconds for entry in plan.ranked} == {None}
    assert (plan.probing["probes"], plan.probing["broken"]) == (0, "no driver")
