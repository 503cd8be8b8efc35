"""How long the audit trail is kept, on SQLite and PostgreSQL."""

import pytest
from sqlalchemy import update

from planner.api.jobs import workers as module
from planner.api.jobs.workers import TaskWorkers
from planner.api.settings import Settings
from planner.api.storage import audit
from planner.api.storage.clock import database_time
from planner.api.storage.tables import AuditRow
from planner.api.storage.transactions import writing
from planner.api.wiring import Wiring, wire
from planner.units import DAY
from tests.conftest import EACH_DATABASE


@pytest.fixture
def wiring(migrated_url: str) -> Wiring:
    return wire(Settings(database_url=migrated_url, audit_days=30))


def note(wiring: Wiring, subject: str, days: float) -> None:
    """A line of so many days ago."""
    wiring.audit.add("ann", "plan.made", subject, "")
    old = update(AuditRow).where(AuditRow.subject == subject)
    with writing(wiring.engine) as session:
        session.execute(old.values(at=database_time(-days * DAY)))


def subjects(wiring: Wiring) -> list[str]:
    return [line.subject for line in wiring.audit.list().items]


@EACH_DATABASE
def test_old_lines_go_however_many(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 2)
    for number, days in enumerate((400, 90, 31, 30.1, 29.9, 0)):
        note(wiring, f"plan-{number}", days)
    assert wiring.audit.prune(30) == 4
    assert subjects(wiring) == ["plan-5", "plan-4"]
    assert wiring.audit.prune(30) == 0


def test_workers_prune_in_turn_and_seldom(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    note(wiring, "plan-1", 31)
    note(wiring, "plan-2", 29)
    workers = TaskWorkers(wiring, 0)
    assert workers._claim_next() is None
    assert subjects(wiring) == ["plan-2"]
    note(wiring, "plan-3", 31)
    workers._claim_next()
    assert subjects(wiring) == ["plan-3", "plan-2"], "not at every turn"
    monkeypatch.setattr(module, "PRUNE_SECONDS", 0.0)
    workers._claim_next()
    assert subjects(wiring) == ["plan-2"]
