"""A pipeline whose order cannot be simulated is left out, and ends nothing for the others."""

from typing import Any

import numpy as np
import pytest

from planner import estimate
from planner.cost.pipeline import simulate
from planner.cost.pipeline.lowering import Graph, lower
from planner.cost.pipeline.order_parts import RankColumns
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.trainers.transports import Transport
from tests.conftest import fixed_now, job_values
from tests.pricing import H100


def job(num_gpus: int = 4, batch: int = 8, model: Any = "llama3.2-1b", **more: Any) -> Any:
    given = {"trainer": "megatron", "overlap": {"pp": False}, **more}
    return job_values(model, H100, num_gpus, 2048, batch, **given)


@pytest.fixture
def four_ranks_wait_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(order: RankColumns, transport: Transport) -> Graph:
        if len(order) == 4:
            raise ValueError("the order deadlocks")
        return lower(order, transport)

    simulate.KEPT.clear()
    monkeypatch.setattr("planner.cost.pipeline.simulate.lower", refusing)
    yield
    simulate.KEPT.clear()


@pytest.mark.usefixtures("four_ranks_wait_for_good")
def test_a_plan_goes_on_without_it() -> None:
    plan = recommend(read_job(job(search={"allow": {"pp": [2, 4]}})), now=fixed_now)
    assert {entry.layout.pp for entry in plan.ranked} == {2}
    assert any("wait for each other" in text for text in plan.warnings)
    steps = [entry.estimate.step_seconds for entry in plan.ranked]
    assert np.isfinite(steps).all()


@pytest.mark.usefixtures("four_ranks_wait_for_good")
def test_its_estimate_is_an_answer() -> None:
    stuck, fine = (estimate(**job(layout={"pp": pp, "pp_schedule": "1F1B"})) for pp in (4, 2))
    assert not stuck.valid
    assert stuck.step_seconds is None
    assert [(one.field, one.value) for one in stuck.violations] == [("pp_schedule", "1F1B")]
    assert fine.valid
    assert fine.step_seconds


@pytest.mark.parametrize(
    ("pp", "v", "microbatches"), [(5, 2, 8), (5, 2, 5), (8, 2, 10), (8, 2, 20)]
)
def test_exposed_sends_of_interleaved_stages_are_priced(pp: int, v: int, microbatches: int) -> None:
    """Megatron-LM with --no-overlap-p2p-communication runs these."""
    model = {"base": "llama3.2-1b", "num_hidden_layers": 80}
    layout = {"pp": pp, "pp_schedule": "Interleaved1F1B", "virtual_stages": v}
    found = estimate(**job(pp, microbatches, model, layout=layout))
    assert found.valid
    assert found.step_seconds
