"""The same question asked twice of one process."""

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from planner.api.service import answer_on_paper, ask_on_paper, keep_plan
from planner.api.settings import Settings
from planner.api.wiring import MOST_ANSWERED, Wiring
from planner.cost.pipeline.recently_used import RecentlyUsed
from planner.specs.plan import Plan
from tests.conftest import Fixed, job_values

JOB: dict[str, Any] = job_values(
    "llama3.2-1b", "h100-sxm-80gb", 2, 2048, 8, search={"fix": {"tp": 1, "cp": 1, "pp": 1}}
)


class Changing(Fixed):
    """A clock that goes on as ids do."""

    def now(self) -> datetime:
        self.count += 1
        return datetime(2026, 1, 1, 0, 0, self.count % 60, tzinfo=UTC)


@pytest.fixture
def wiring(sqlite_url: str) -> Wiring:
    return Wiring(settings=Settings(database_url=sqlite_url), clock=Changing(), ids=Changing())


def made(wiring: Wiring, values: dict[str, Any]) -> Plan:
    question = ask_on_paper(wiring, values, allow_files=False)
    plan = answer_on_paper(wiring, question)
    keep_plan(wiring, question, plan)
    return plan


def _rest(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json", exclude={"id", "created_at", "job", "searched"})


def test_a_second_answer_takes_no_search(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(wiring, JOB)
    again = AssertionError("searched again")
    monkeypatch.setattr("planner.api.service.recommend", Mock(side_effect=again))
    second = made(wiring, {**JOB, "id": "again"})
    assert second.id != first.id
    assert second.created_at != first.created_at
    assert second.job["id"] == "again"
    assert _rest(second) == _rest(first)
    assert wiring.store.get_plan(second.id).id == second.id
    with pytest.raises(AssertionError, match="searched again"):
        made(wiring, {**JOB, "search": {"fix": {"tp": 2}}})


def test_the_oldest_questions_are_forgotten(wiring: Wiring) -> None:
    plan, known = made(wiring, JOB), RecentlyUsed[tuple[str, str], Plan](MOST_ANSWERED)
    for number in range(MOST_ANSWERED + 1):
        known.put((str(number), ""), plan)
    assert known.get(("0", "")) is None
    assert known.get((str(MOST_ANSWERED), "")) is plan
