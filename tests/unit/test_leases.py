"""Leases: a claim is fenced, renewed and lost; a lost lease stops the work; who has crashed."""

import os
import platform
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from api.jobs import leases
from api.jobs.leases import (
    LEASE_SECONDS,
    Claimed,
    abandoned,
    claimed_by,
    has_crashed,
    is_abandoned,
    new_lease,
    take_over,
)
from api.storage.engine import make_engine, normalise_url
from api.storage.records import TaskEnd, TaskFilter, TaskRecord
from api.storage.store import SqlStore
from api.storage.tables import Base
from api.storage.tasks import SqlTaskStore
from planner.errors import ConflictError, NotFoundError, StoreError
from planner.specs.plan import Plan
from tests.stand_ins.plan_labels import plan_labels

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOBODY = 2**22 + 1  # above the highest process id that Linux gives out


@dataclass
class Clock:
    time: datetime = NOW

    def now(self) -> datetime:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(normalise_url("sqlite://"))
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def queue(engine: Engine) -> SqlTaskStore:
    return SqlTaskStore(engine)


def task(number: int = 1, **fields: Any) -> TaskRecord:
    record = TaskRecord(
        id=f"plan-{number}", kind="study", created_at=NOW + timedelta(seconds=number), request={}
    )
    return replace(record, **fields)


def claim(queue: SqlTaskStore, clock: Clock, **fields: Any) -> Claimed[TaskRecord, TaskEnd]:
    queue.add([task(**fields)])
    record = queue.claim(new_lease(clock))
    assert record is not None
    return Claimed(queue, record, clock)


# ---- the queue -----------------------------------------------------------------------------------


def test_the_oldest_is_claimed_first_and_only_once(queue: SqlTaskStore, clock: Clock) -> None:
    queue.add([task(3), task(1), task(2)])
    claimed = [queue.claim(new_lease(clock)) for _ in range(4)]
    assert [one and one.id for one in claimed] == ["plan-1", "plan-2", "plan-3", None]
    first = claimed[0]
    assert first is not None
    assert (first.state, first.fencing_token, first.attempts) == ("running", 1, 1)
    assert first.lease_until == NOW + timedelta(seconds=LEASE_SECONDS)


def test_a_job_that_is_ours_from_the_start_is_as_one_that_was_claimed(
    queue: SqlTaskStore, clock: Clock
) -> None:
    queue.add([task(1), claimed_by(task(2), new_lease(clock))])
    claimed, ours = queue.claim(new_lease(clock)), queue.get("plan-2")
    assert claimed is not None
    assert replace(claimed, id="", created_at=NOW) == replace(ours, id="", created_at=NOW)
    assert queue.claim(new_lease(clock)) is None


def test_a_lease_expires_after_its_seconds_and_a_heartbeat_renews_it(
    queue: SqlTaskStore, clock: Clock
) -> None:
    claimed = claim(queue, clock)
    clock.wait(LEASE_SECONDS)
    assert queue.expired(clock.now()) == ()
    claimed.renew()
    clock.wait(LEASE_SECONDS)
    assert queue.expired(clock.now()) == ()
    clock.wait(0.001)
    assert [one.id for one in queue.expired(clock.now())] == ["plan-1"]


def test_only_an_expired_lease_is_taken_over_and_once(queue: SqlTaskStore, clock: Clock) -> None:
    claimed = claim(queue, clock)
    assert queue.take_over(claimed.record.id, new_lease(clock)) is None
    clock.wait(LEASE_SECONDS + 1.0)
    taken = queue.take_over(claimed.record.id, new_lease(clock))
    assert taken is not None
    assert (taken.fencing_token, taken.attempts) == (2, 1)
    assert queue.take_over(claimed.record.id, new_lease(clock)) is None


def test_the_lease_of_a_crashed_owner_is_taken_over_before_it_expires(
    queue: SqlTaskStore, clock: Clock
) -> None:
    claimed = claim(queue, clock)
    taken = take_over(queue, clock, claimed.record)
    assert taken is not None
    assert taken.fencing_token == 2
    assert take_over(queue, clock, claimed.record) is None, "its new owner's lease lasts longer"


def test_a_renewed_lease_is_not_taken_over(queue: SqlTaskStore, clock: Clock) -> None:
    claimed = claim(queue, clock)
    clock.wait(1.0)
    claimed.renew()  # after whoever takes over looked
    assert take_over(queue, clock, claimed.record) is None


def test_who_lost_the_lease_writes_nothing(queue: SqlTaskStore, clock: Clock) -> None:
    loser = claim(queue, clock)
    taken = take_over(queue, clock, loser.record)
    writes = (
        lambda: loser.finish(TaskEnd(state="done")),
        loser.release,
        lambda: queue.heartbeat(loser.record, new_lease(clock)),
        lambda: queue.add_event(loser.record, {}, NOW),
    )
    for write in writes:
        with pytest.raises(ConflictError, match="was lost"):
            write()
    assert queue.get("plan-1") == taken
    assert queue.events("plan-1") == ()


def test_an_ended_job_is_not_written_again(queue: SqlTaskStore, clock: Clock) -> None:
    claimed = claim(queue, clock)
    claimed.finish(TaskEnd(state="done"))
    with pytest.raises(ConflictError, match="is done"):
        claimed.finish(TaskEnd(state="failed"))
    assert queue.get("plan-1").state == "done"


@pytest.mark.parametrize(("counts", "attempts"), [(True, 1), (False, 0)])
def test_a_released_job_waits_without_an_owner(
    queue: SqlTaskStore, clock: Clock, counts: bool, attempts: int
) -> None:
    claimed = claim(queue, clock)
    released = queue.release(claimed.record, counts=counts)
    assert (released.state, released.owner, released.lease_until) == ("queued", None, None)
    assert released.attempts == attempts
    again = queue.claim(new_lease(clock))
    assert again is not None
    assert again.fencing_token == 2


def test_a_plan_is_stored_with_the_end_of_its_study_or_not_at_all(
    engine: Engine, queue: SqlTaskStore, clock: Clock, plan: Plan
) -> None:
    loser = claim(queue, clock)
    taken = take_over(queue, clock, loser.record)
    assert taken is not None
    named = plan.model_copy(update={"id": "plan-1"})
    end = TaskEnd(state="done", plan=(named, plan_labels("m", "g")))
    with pytest.raises(ConflictError, match="was lost"):
        loser.finish(end)
    with pytest.raises(NotFoundError):
        SqlStore(engine).get_plan("plan-1")
    assert queue.finish(taken, end, NOW).state == "done"
    assert SqlStore(engine).get_plan("plan-1") == named


# ---- renewing ------------------------------------------------------------------------------------


def test_a_heartbeat_stores_progress(queue: SqlTaskStore, clock: Clock) -> None:
    claimed = claim(queue, clock)
    claimed.report("probe 1 of 3")
    clock.wait(5.0)
    claimed.renew()
    now = queue.get("plan-1")
    assert (now.progress, now.heartbeat_at) == ("probe 1 of 3", NOW + timedelta(seconds=5.0))
    assert not claimed.stop.is_set()


def test_a_lost_lease_stops_the_work(queue: SqlTaskStore, clock: Clock) -> None:
    claimed = claim(queue, clock)
    take_over(queue, clock, claimed.record)
    claimed.renew()
    assert (claimed.stop.is_set(), claimed.lost, claimed.cancelled) == (True, True, False)


def test_a_wish_to_cancel_stops_the_work(queue: SqlTaskStore, clock: Clock) -> None:
    claimed = claim(queue, clock)
    assert queue.cancel("plan-1", NOW).state == "running"
    claimed.renew()
    assert (claimed.stop.is_set(), claimed.lost, claimed.cancelled) == (True, False, True)


@dataclass
class Failing:
    """A queue whose database does not answer."""

    calls: list[int] = field(default_factory=list)

    def heartbeat(self, *_: object, **__: object) -> bool:
        self.calls.append(1)
        raise StoreError("the database is down")


def test_a_database_that_does_not_answer_stops_nothing(clock: Clock) -> None:
    failing: Any = Failing()
    claimed: Claimed[TaskRecord, TaskEnd] = Claimed(failing, task(), clock)
    claimed.renew()
    assert (failing.calls, claimed.stop.is_set(), claimed.lost) == ([1], False, False)


def test_the_lease_is_renewed_while_the_work_runs_and_not_after(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.0)
    renewed, failing = threading.Event(), Failing()
    monkeypatch.setattr(failing, "heartbeat", lambda *_, **__: bool(renewed.set()))
    queue: Any = failing
    with Claimed(queue, task(), clock):
        assert renewed.wait(60.0)
    renewed.clear()
    assert not [one for one in threading.enumerate() if one.name == "lease of plan-1"]
    assert not renewed.is_set()


def test_a_lease_outlasts_several_heartbeats() -> None:
    assert LEASE_SECONDS >= 5 * leases.HEARTBEAT_SECONDS


# ---- owners that crashed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "crashed"),
    [
        (f"{platform.node()}:{NOBODY}:1", True),
        (f"{platform.node()}:{os.getpid()}:1", False),
        (f"elsewhere-{platform.node()}:{NOBODY}:1", False),
        (f"{platform.node()}:x:1", False),
        ("", False),
        (None, False),
    ],
    ids=["gone", "this one", "another host", "no number", "empty", "none"],
)
def test_a_process_of_this_host_that_is_not_there_has_crashed(
    owner: str | None, crashed: bool
) -> None:
    assert has_crashed(owner) is crashed


def test_a_process_of_another_user_has_not_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert has_crashed(f"{platform.node()}:1:1") is False


def test_abandoned_are_the_expired_and_where_asked_the_crashed(
    queue: SqlTaskStore, clock: Clock
) -> None:
    crashed = f"{platform.node()}:{NOBODY}:1"
    expired = claim(queue, clock, number=1)
    clock.wait(LEASE_SECONDS + 1.0)
    lease = new_lease(clock)
    queue.add(
        [claimed_by(task(2), replace(lease, owner=crashed)), claimed_by(task(3), lease), task(4)]
    )

    def found(*, check_processes: bool) -> list[str]:
        return [one.id for one in abandoned(queue, clock, check_processes=check_processes)]

    assert found(check_processes=False) == [expired.record.id]
    assert found(check_processes=True) == [expired.record.id, "plan-2"]
    running = queue.list(TaskFilter(state="running")).items
    assert sorted(one.id for one in running if is_abandoned(one, clock.now())) == [
        expired.record.id,
        "plan-2",
    ]
