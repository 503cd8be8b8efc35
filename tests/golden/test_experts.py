"""Number one of well-known jobs is a layout that an engineer who runs such clusters would accept
(experts.yaml says why).
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.specs.plan import Plan
from tests.conftest import fixed_now

CASES = yaml.safe_load((Path(__file__).parent / "experts.yaml").read_text(encoding="utf-8"))
MOST_RISK = 0.01


def plan_of(job: dict[str, Any]) -> Plan:
    values = {**job, "search": {"top_k": 3, **job.get("search", {})}}
    return recommend(read_job(values), now=fixed_now)


def accepted(value: object, wanted: object) -> bool:
    if isinstance(wanted, dict):
        assert isinstance(value, int)
        return value <= wanted["at_most"]
    return value in wanted if isinstance(wanted, list) else value == wanted


def marks(case: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """The tier of a case; `misses` is why today's number one is not what an expert would run."""
    known = [pytest.mark.xfail(reason=case["misses"], strict=True)] if "misses" in case else []
    return [*known, *([pytest.mark.slow] if case.get("slow") else [])]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case["name"], marks=marks(case)) for case in CASES]
)
def test_number_one_is_what_an_expert_would_run(case: dict[str, Any]) -> None:
    """And where it rests on what nobody measured (`rests_on`), the plan says so."""
    plan = plan_of(case["job"])
    first = plan.ranked[0]
    refused = {
        name: getattr(first.layout, name)
        for name, wanted in case["accept"].items()
        if not accepted(getattr(first.layout, name), wanted)
    }
    assert not refused, f"{first.layout.short()}: {case['why']}"
    assert first.estimate.oom_probability <= MOST_RISK
    assert first.layout.short() == plan.headline[0]
    assert set(case.get("rests_on", [])) <= set(first.unmeasured)
    if first.unmeasured:
        assert all(words in plan.rests_on for words in first.unmeasured)
    else:
        assert plan.rests_on is plan.best_measured is None
    for exported in first.export.values():
        assert exported["blockers"] == []
