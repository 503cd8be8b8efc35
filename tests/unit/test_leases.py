"""Leases: a claim is fenced, renewed and lost; a lost lease stops the work; who has crashed.

The database's clock decides; tests make what it holds older.
"""

import os
import platform
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from planner.api.jobs import leases, owners
from planner.api.jobs.leases import (
    LEASE_SECONDS,
    Claimed,
    abandoned,
    new_lease,
    take_abandoned,
    take_over,
)
from planner.api.jobs.owners import Process, has_crashed, owner, was_killed
from planner.api.jobs.workers import TaskWorkers
from planner.api.storage.job_records import JobEnd, Lease, TaskRecord
from planner.api.storage.queue import (
    FIRST_DELAY_SECONDS,
    LONGEST_DELAY_SECONDS,
    LOST_WORKERS,
    MOST_LOSSES,
    delay_seconds,
)
from planner.api.storage.store import SqlStore
from planner.api.storage.tasks import SqlTaskStore
from planner.errors import ConflictError, NotFoundError, StoreError
from planner.specs.plan import Plan
from tests.stand_ins.ageing import age
from tests.stand_ins.records import NOW, PLAN_JOB, task_record

NOBODY = 2**22 + 1  # above the highest process id that Linux gives out


@pytest.fixture
def queue(memory: Engine) -> SqlTaskStore:
    return SqlTaskStore(memory)


def claim(queue: SqlTaskStore, number: int = 1) -> Claimed[TaskRecord]:
    queue.add([task_record(number)])
    return Claimed(queue, queue.claim(new_lease()))


def seconds_of(record: TaskRecord) -> float:
    """From its heartbeat to its end."""
    return (record.lease_until - record.heartbeat_at).total_seconds()


# ---- the queue -----------------------------------------------------------------------------------


def test_a_job_that_is_ours_from_the_start_is_as_one_that_was_claimed(queue: SqlTaskStore) -> None:
    queue.add([task_record(1)])
    (ours,) = queue.add([task_record(2)], lease=new_lease())
    claimed = queue.claim(new_lease())
    assert seconds_of(claimed) == pytest.approx(LEASE_SECONDS, abs=0.01)
    alike = [
        (one.state, one.attempts, one.owner, one.fencing_token, round(seconds_of(one), 1))
        for one in (claimed, ours, queue.get("plan-2"))
    ]
    assert alike[0] == alike[1] == alike[2]
    assert queue.claim(new_lease()) is None


def test_a_clock_ahead_takes_no_lease(queue: SqlTaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = claim(queue)
    monkeypatch.setattr("time.time", lambda: 4e9)
    monkeypatch.setattr("planner.api.wiring.SystemClock.now", lambda _: NOW + timedelta(days=365))
    assert abandoned(queue, check_processes=True) == []
    assert take_over(queue, claimed.record) is None


def other(**parts: Any) -> str:
    return str(replace(our_process(), **parts))


def crashed(**parts: Any) -> str:
    """The name of a process of this machine that is gone."""
    return other(pid=NOBODY, **parts)


def our_process() -> Process:
    return Process.parse(owner())


def test_the_lease_of_a_crashed_owner_is_taken_over_before_it_expires(queue: SqlTaskStore) -> None:
    (left,) = queue.add([task_record()], lease=Lease(owner=crashed(), seconds=LEASE_SECONDS))
    assert take_over(queue, left).fencing_token == 2
    assert take_over(queue, left) is None, "it has a new owner"


def test_a_renewed_lease_is_not_taken_over(memory: Engine, queue: SqlTaskStore) -> None:
    claimed = claim(queue)
    age(memory, LEASE_SECONDS + 1.0)
    (found,) = abandoned(queue, check_processes=False)
    claimed.renew()  # after whoever takes over looked
    assert take_over(queue, found) is None


def test_who_slept_too_long_or_lost_the_lease_stores_no_plan(
    memory: Engine, queue: SqlTaskStore, plan: Plan
) -> None:
    sleeper, store = claim(queue), SqlStore(memory)
    age(memory, LEASE_SECONDS + 1.0)
    named = plan.model_copy(update={"id": "plan-1"})
    end = JobEnd(state="done", plan=(named, PLAN_JOB))

    def is_refused(words: str) -> None:
        for write in (
            lambda: sleeper.finish(end),
            lambda: queue.add_event(sleeper.record, {}, NOW),
        ):
            with pytest.raises(ConflictError, match=words):
                write()
        with pytest.raises(NotFoundError):
            store.get_plan("plan-1")

    is_refused("was lost, it ended at")
    sleeper.renew()  # nobody took it over meanwhile
    assert not sleeper.lost
    age(memory, LEASE_SECONDS + 1.0)
    taken = take_over(queue, sleeper.record)
    is_refused("was lost")
    assert queue.finish(taken, end).state == "done"
    assert store.get_plan("plan-1") == named


# ---- attempts ------------------------------------------------------------------------------------


def test_a_job_that_takes_its_workers_down_waits_longer_each_time_and_then_has_failed(
    memory: Engine, queue: SqlTaskStore
) -> None:
    queue.add([task_record(1), task_record(2)])
    delays = []
    for attempt in (1, 2, 3):
        record = queue.claim(new_lease(), job_id="plan-1")
        assert record.attempts == attempt
        age(memory, LEASE_SECONDS + 1.0)
        taken = take_over(queue, record)
        ended = queue.retry(taken, JobEnd(state="failed", failure=LOST_WORKERS, message="lost"))
        if attempt < 3:
            assert (ended.state, ended.attempts) == ("queued", attempt)
            delays.append((ended.not_before - taken.heartbeat_at).total_seconds())
            other = queue.claim(new_lease())  # it starves nobody while it waits
            assert (other and other.id) == ("plan-2" if attempt == 1 else None)
    assert (ended.state, ended.failure, ended.attempts) == ("failed", LOST_WORKERS, 3)
    assert FIRST_DELAY_SECONDS / 2 - 0.1 < delays[0] <= FIRST_DELAY_SECONDS + 0.5 < delays[1] + 1.5
    assert queue.claim(new_lease(), job_id="plan-1") is None
    again = queue.requeue("plan-1", "alice")
    assert (again.state, again.attempts, again.failure) == ("queued", 0, None)
    with pytest.raises(ConflictError, match="only a failed one"):
        queue.requeue("plan-1", "alice")
    assert queue.claim(new_lease(), job_id="plan-1") is not None


def test_killed_workers_are_no_attempts_of_their_job_for_a_while(queue: SqlTaskStore) -> None:
    queue.add([task_record()])
    workers = TaskWorkers(SimpleNamespace(tasks=queue), 0)
    lost, losses = Lease(owner=crashed(), seconds=LEASE_SECONDS), 0
    while (record := queue.claim(lost, job_id="plan-1")) is not None:
        workers.end_abandoned()
        losses += 1
        left = queue.get("plan-1")
        assert left.attempts == max(losses - MOST_LOSSES + 1, 0)
        if losses <= 8:
            assert (left.not_before - record.heartbeat_at).total_seconds() > 0.5 * 2.0**losses - 0.1
    assert (losses, left.failure) == (MOST_LOSSES + 2, LOST_WORKERS)


def test_a_clock_that_is_put_back_lets_nothing_wait_longer_than_the_longest_delay(
    memory: Engine, queue: SqlTaskStore
) -> None:
    queue.retry(claim(queue).record, JobEnd(state="failed"))
    age(memory, -0.9 * LONGEST_DELAY_SECONDS)
    assert queue.claim(new_lease()) is None
    age(memory, -0.2 * LONGEST_DELAY_SECONDS)
    assert queue.claim(new_lease()) is not None


def test_delays_double_are_spread_and_end_somewhere() -> None:
    assert [delay_seconds(attempts, 1.0) for attempts in (1, 2, 3)] == [2.0, 4.0, 8.0]
    assert (delay_seconds(1, 0.0), delay_seconds(60, 1.0)) == (1.0, LONGEST_DELAY_SECONDS)


def test_a_cancelled_job_without_an_owner_ends(queue: SqlTaskStore) -> None:
    claimed = claim(queue)
    queue.cancel("plan-1")
    end = JobEnd(state="cancelled", message="cancelled after its owner had crashed")
    assert queue.retry(claimed.record, end).state == "cancelled"


# ---- renewing ------------------------------------------------------------------------------------


def test_a_heartbeat_stores_progress(memory: Engine, queue: SqlTaskStore) -> None:
    claimed = claim(queue)
    claimed.report("probe 1 of 3")
    age(memory, 5.0)
    claimed.renew()
    now = queue.get("plan-1")
    assert now.heartbeat_at >= claimed.record.heartbeat_at
    assert (now.progress, claimed.stop.is_set()) == ("probe 1 of 3", False)
    assert seconds_of(now) == pytest.approx(LEASE_SECONDS, abs=0.01)
    assert claimed.release().state == "queued"


def test_a_lost_lease_or_a_wish_to_cancel_stops_the_work_and_a_silent_database_does_not(
    memory: Engine, queue: SqlTaskStore
) -> None:
    lost, cancelled = claim(queue, 1), claim(queue, 2)
    failing: Any = Failing()
    silent: Claimed[TaskRecord] = Claimed(failing, task_record())
    age(memory, LEASE_SECONDS + 1.0)
    take_over(queue, lost.record)
    assert queue.cancel("plan-2").state == "running"
    for claimed, stops in (
        (lost, (True, True, False)),
        (cancelled, (True, False, True)),
        (silent, (False, False, False)),
    ):
        claimed.renew()
        assert (claimed.stop.is_set(), claimed.lost, claimed.cancelled) == stops
    assert failing.calls == [1]


@dataclass
class Failing:
    """A queue whose database does not answer."""

    calls: list[int] = field(default_factory=list)

    def heartbeat(self, *_: object, **__: object) -> bool:
        self.calls.append(1)
        raise StoreError("the database is down")


def test_the_lease_is_renewed_while_the_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LEASE_SECONDS >= 5 * leases.HEARTBEAT_SECONDS, "it outlasts several"
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.0)
    renewed, failing = threading.Event(), Failing()
    monkeypatch.setattr(failing, "heartbeat", lambda *_, **__: bool(renewed.set()))
    queue: Any = failing
    with Claimed(queue, task_record()):
        assert renewed.wait(60.0)
    renewed.clear()
    assert not [one for one in threading.enumerate() if one.name == "lease of plan-1"]
    assert not renewed.is_set()


# ---- owners that crashed -------------------------------------------------------------------------


def test_we_are_a_process_of_this_machine_with_a_name_of_our_own() -> None:
    process = our_process()
    assert (process.host, process.pid) == (platform.node(), os.getpid())
    assert all((process.boot, process.namespace.isdigit(), process.start.isdigit()))
    assert owner() == owner()
    assert not has_crashed(owner())


def test_a_process_of_this_machine_that_is_not_there_has_crashed() -> None:
    assert has_crashed(crashed())
    assert has_crashed(other(start="1")), "another process has its number now"


def test_a_process_that_is_gone_was_killed_unless_memory_ran_out_since_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = our_process().oom_kills
    assert kills.isdigit()
    assert was_killed(crashed())
    assert not was_killed(owner()), "it lives"
    assert not was_killed(crashed(boot="4026539999")), "with all of its machine, perhaps"
    older = crashed().rpartition(":")[0]
    assert (has_crashed(older), was_killed(older)) == (True, False)
    monkeypatch.setattr(owners, "_oom_kills", lambda: str(int(kills) + 1))
    assert not was_killed(crashed())


@pytest.mark.parametrize("name", [
    f"{platform.node()}:{NOBODY}:1", f"{platform.node()}:x:1:2:3:4", "", None,
    crashed(boot="4026539999"), crashed(namespace="4026539999"),
], ids=[
    "of an older version", "no number", "empty", "none", "other machine", "other container"
])  # fmt: skip
def test_whoever_we_cannot_tell_about_counts_as_alive(name: str | None) -> None:
    assert has_crashed(name) is False


def test_without_a_process_table_nobody_counts_as_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = crashed()
    monkeypatch.setattr(owners, "_read", lambda _: "")
    owners._this.cache_clear()
    try:
        assert has_crashed(gone) is False
    finally:
        monkeypatch.undo()
        owners._this.cache_clear()


def test_a_process_that_ended_and_was_not_waited_for_has_crashed() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert has_crashed(other(pid=pid))
    finally:
        os.waitpid(pid, 0)


def test_abandoned_are_the_expired_and_the_crashed(memory: Engine, queue: SqlTaskStore) -> None:
    expired = claim(queue, number=1)
    age(memory, LEASE_SECONDS + 1.0)
    queue.add([task_record(2)], lease=Lease(owner=crashed(), seconds=LEASE_SECONDS))
    queue.add([task_record(3)], lease=new_lease())
    queue.add([task_record(4)])

    def found(*, check_processes: bool) -> list[str]:
        return [one.id for one in abandoned(queue, check_processes=check_processes)]

    assert found(check_processes=False) == [expired.record.id]
    assert found(check_processes=True) == [expired.record.id, "plan-2"]
    taken = [take_abandoned(queue) for _ in range(3)]
    assert [one and one.id for one in taken] == ["plan-2", expired.record.id, None]
