"""Who runs a study that is asked for twice."""

import pytest

from planner.api.jobs.leases import Observer
from planner.api.jobs.studies import ask_study, run_study
from planner.api.settings import Settings
from planner.api.wiring import Wiring, wire
from planner.specs.plan import Plan
from tests.conftest import JOB

ASKED = {**JOB, "probe": {"max_probes": 1}}


@pytest.fixture
def wiring(monkeypatch: pytest.MonkeyPatch) -> Wiring:
    monkeypatch.setattr("planner.api.jobs.studies.check_pool", lambda *_, **__: None)
    return wire(Settings(database_url="sqlite://"))


def test_a_second_request_leaves_the_first_in_the_queue(wiring: Wiring) -> None:
    studies = [ask_study(wiring, ASKED, allow_files=False, ours=False) for _ in range(2)]
    assert len({study.id for study in studies}) == 2
    assert [wiring.tasks.get(study.id).state for study in studies] == ["queued", "queued"]


def test_a_command_goes_on_with_the_study_that_waits(wiring: Wiring) -> None:
    waiting = ask_study(wiring, ASKED, allow_files=False, ours=False)
    ours = ask_study(wiring, ASKED, allow_files=False, ours=True)
    assert (ours.id, ours.state, ours.fencing_token) == (waiting.id, "running", 1)
    other = ask_study(wiring, {**ASKED, "search": {"top_k": 1}}, allow_files=False, ours=True)
    assert other.id != waiting.id


def test_a_command_leaves_a_study_alone_that_somebody_works_on(wiring: Wiring) -> None:
    first = ask_study(wiring, ASKED, allow_files=False, ours=True)
    second = ask_study(wiring, ASKED, allow_files=False, ours=True)
    assert first.id != second.id
    assert {first.fencing_token, second.fencing_token} == {1}


def test_a_cancellation_between_two_heartbeats_is_no_less_one(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    study = ask_study(wiring, ASKED, allow_files=False, ours=True)

    def cancelled_while_it_plans(_: object) -> Plan:
        wiring.tasks.cancel(study.id)
        return plan.model_copy(update={"id": study.id})

    monkeypatch.setattr("planner.api.jobs.leases.HEARTBEAT_SECONDS", 1000.0)
    monkeypatch.setattr("planner.api.jobs.studies._plan", cancelled_while_it_plans)
    assert run_study(wiring, study, Observer()) is not None
    assert wiring.tasks.get(study.id).state == "cancelled"
    (line,) = wiring.store.list().items
    assert (line.id, line.status) == (study.id, "cancelled")
