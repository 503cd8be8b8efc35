"""Sentences of a plan as a colleague would say them."""

from typing import Any

import pytest

from planner.api.cli.output import as_text
from planner.api.render.estimate import key_figures
from planner.api.render.plan import plan_view, ranked_table
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.plan.explain import step_sentence
from planner.plan.recommend import recommend
from planner.search.choice.ranking import _gain
from planner.specs.estimate import Estimate
from planner.specs.estimate_parts import bottleneck
from planner.specs.layout import in_words
from planner.specs.plan_comparisons import SensitivityStep
from tests.conftest import fixed_now, job_values

H100 = "h100-sxm-80gb"


def of_time(step: float, compute: float, **exposed: float) -> Estimate:
    others = ("bubble_seconds", "recompute_seconds", "optimizer_seconds", "other_seconds")
    time: dict[str, Any] = {**dict.fromkeys(others, 0.0), "compute_seconds": compute}
    time["exposed_communication_seconds"] = exposed
    made = {"model_version": "t", "calibration_id": "t", "valid": True, "violations": []}
    return Estimate.model_validate({**made, "step_seconds": step, "time": time})


FSDP = "FSDP gathers and scatters"


@pytest.mark.parametrize(("estimate", "words"), [
    (of_time(10.0, 9.1, fsdp=0.7, tp=0.2), f"compute-bound (91%); the largest loss is {FSDP}, 7%"),
    (of_time(10.0, 4.0, fsdp=6.0), f"bound by {FSDP} (60%); compute is 40%"),
    (of_time(1.0, 1.0), "compute-bound"),
])  # fmt: skip
def test_the_bottleneck_is_the_largest_part(estimate: Estimate, words: str) -> None:
    assert bottleneck(estimate) == words
    some = bottleneck(of_time(1.0, 0.4, ep=0.3, tp=0.3))
    assert some.startswith("compute is the largest part (40%); the largest loss is ")


@pytest.mark.parametrize(("field", "old", "new", "words"), [
    ("float8_all_gather", True, False, "without float8 all-gather"),
    ("compile", False, True, "with torch.compile"), ("tp", 1, 2, "tp 2 instead of 1"),
    ("layers_per_stage", None, (2,) * 3 + (1,), "layers by stage 2x3,1 instead of the trainer"),
    ("micro_batch_size", 4, 2, "micro batch size 2 instead of 4"),
    ("cp_method", "ulysses", "alltoall", "cp method alltoall (ring) instead of ulysses"),
])  # fmt: skip
def test_changes_in_words(field: str, old: Any, new: Any, words: str) -> None:
    step = SensitivityStep.model_construct(
        field=field, old=old, new=new, step_ratio=1.0, device_bytes=2.0**30, fits=True, refused=None
    )
    assert step_sentence(step).startswith(words)
    assert in_words(field, new) in step_sentence(step)


@pytest.mark.parametrize(("objective", "values", "priced", "words"), [
    ("cost", (20_000.0, 15_000.0), True, "25.0% cheaper ($15,000 against $20,000)"),
    ("cost", (200.0, 150.0), False, "25.0% cheaper (150 GPU-hours against 200 GPU-hours)"),
    ("energy", (2.0, 1.0), True, "50.0% less energy"),
    ("throughput", (2.0, 1.0), True, "2.00 times as fast"),
])  # fmt: skip
def test_a_gain_names_what_it_is_in(
    objective: Any, values: tuple[float, float], priced: bool, words: str
) -> None:
    assert _gain(objective, *values, priced=priced) == words


def test_the_objective_cost_shows_prices() -> None:
    """A table of prices, and number 2 against number 1 in money."""
    cheap = {"objective": "cost", "top_k": 2, "fix": {"tp": 1, "cp": 1, "pp": 1}}
    values = job_values("llama3-8b", H100, 8, 8192, 64, search=cheap, layout={"ac": "full"})
    plan = recommend(read_job(values), now=fixed_now)
    table = as_text(ranked_table(plan, 110), 110)
    assert "price" in table.splitlines()[0]
    first, second = (f"${one.run.cost:,.0f}" for one in plan.ranked if one.run is not None)
    assert first in table
    assert second in table
    # one blank line before the table, though a section on today's layout stands above it
    assert plan.versus_current is not None
    screen = [line.strip() for line in as_text(plan_view(plan, 110, letters=True), 110).split("\n")]
    assert ["", ""] not in [screen[at : at + 2] for at in range(len(screen) - 2)]
    assert plan.headline[1].split(": ")[0].endswith(("% dearer", "% cheaper"))
    assert f"{second} against {first}" in plan.headline[1]


def test_the_screen_says_what_the_allocator_gives_back() -> None:
    """P(out of memory) is of what it cannot give back: both figures stand on one line."""
    layout = {"micro_batch_size": 2, "ac": "full"}
    estimate = estimate_job(read_job(job_values("llama3-8b", H100, 8, 8192, 64, layout=layout)))
    assert 0.0 < estimate.reclaimable_bytes < estimate.device_bytes
    text = as_text(key_figures(estimate, 140), 140)
    given, held = estimate.reclaimable_bytes / 2**30, estimate.device_bytes / 2**30
    assert f"of {held:.1f} GiB the allocator gives {given:.1f} GiB back" in text
