"""Sweeps that come due, with a clock of ours: once each, whatever happened meanwhile, on SQLite and
PostgreSQL.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from planner.api.jobs.leases import Observer, new_lease
from planner.api.jobs.schedule import next_due
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import add_sweep, change_sweep, run_now, schedule_due
from planner.api.render.sweep import report_lines
from planner.api.settings import Settings
from planner.api.storage.job_records import JobEnd, TaskRecord
from planner.api.storage.sweeps import SqlSweepStore
from planner.api.storage.tables import SweepRecord
from planner.api.wiring import Wiring, wire
from planner.errors import ConflictError, SpecError
from planner.intake.sweeps import read_sweep
from tests.conftest import EACH_DATABASE, side_by_side
from tests.stand_ins.records import claimed, probe_record

EVENING = datetime(2026, 3, 1, 20, 0, tzinfo=UTC)
TEN_SECONDS = timedelta(seconds=10)
NIGHT = datetime(2026, 3, 2, 2, 0, tzinfo=UTC)
SWEEP: dict[str, Any] = {
    "name": "nightly",
    "models": [{"base": "llama3.2-1b", "num_hidden_layers": 2, "vocab_size": 256,
            "hidden_size": 256}],
    "clusters": [{"gpu": "cpu", "num_gpus": 2}],
    "trainings": [{"seq_len": 128, "global_batch_size": 8}], "schedule": "0 2 * * *",
}  # fmt: skip


@dataclass
class Clock:
    """Says what it is told."""

    time: datetime

    def now(self) -> datetime:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The database's."""
    made = Clock(EVENING)
    monkeypatch.setattr(SqlSweepStore, "now", lambda _: made.time)
    return made


@pytest.fixture
def workers(migrated_url: str, clock: Clock) -> list[Wiring]:
    """Processes of their own, as far as the database can tell."""
    settings = Settings(database_url=migrated_url)
    ids = wire(settings).ids
    wrong = Clock(EVENING + timedelta(days=400))  # of the worker; nobody asks it
    return [Wiring(settings=settings, clock=wrong, ids=ids) for _ in range(4)]


@pytest.fixture
def wiring(workers: list[Wiring]) -> Wiring:
    return workers[0]


def stored(wiring: Wiring, **more: Any) -> SweepRecord:
    return add_sweep(wiring, {**SWEEP, **more}, allow_files=False)


def ours(wiring: Wiring, **more: Any) -> TaskRecord:
    """A run of such a sweep that is this process's own."""
    return run_now(wiring, stored(wiring, **more), ours=True)


def reported(wiring: Wiring, run: TaskRecord, observer: Observer | None = None) -> dict[str, Any]:
    return dict(run_sweep(wiring, run, observer or Observer()).result)


@EACH_DATABASE
def test_a_night_is_one_run_however_often_one_looks(wiring: Wiring, clock: Clock) -> None:
    sweep = stored(wiring)
    assert sweep.next_due_at == NIGHT
    assert schedule_due(wiring) == []
    clock.time = NIGHT + timedelta(minutes=1)
    (run,) = schedule_due(wiring)
    assert (run.parent_id, run.due_at, run.state) == (sweep.id, NIGHT, "queued")
    assert schedule_due(wiring) == []
    assert wiring.sweeps.get(sweep.id).next_due_at == NIGHT + timedelta(days=1)


@EACH_DATABASE
def test_workers_that_look_at_once_make_one_run(workers: list[Wiring], clock: Clock) -> None:
    stored(workers[0])
    clock.time = NIGHT
    assert sorted(map(len, at_once(workers, schedule_due))) == [0, 0, 0, 1]


def at_once(workers: list[Wiring], ask: Callable[[Wiring], Any]) -> list[Any]:
    """What all of them are answered that ask at the same time."""
    start, answers = threading.Barrier(len(workers)), list[Any]()

    def look(worker: Wiring) -> None:
        _ = worker.sweeps, worker.tasks
        start.wait()
        answers.append(ask(worker))

    side_by_side(look, *((worker,) for worker in workers))
    return answers


@pytest.mark.parametrize(("missed", "runs"), [("skip", 0), ("catch-up", 1)])
def test_missed_nights_once_or_never(wiring: Wiring, clock: Clock, missed: str, runs: int) -> None:
    sweep = stored(wiring, missed=missed)
    clock.time = NIGHT + timedelta(days=3, hours=5)
    assert [len(schedule_due(wiring)) for _ in range(2)] == [runs, 0]
    assert wiring.sweeps.get(sweep.id).next_due_at == NIGHT + timedelta(days=4)


@pytest.mark.parametrize("missed", ["skip", "catch-up"])
def test_a_moment_just_come_is_kept_whatever_was_missed_before_it(
    wiring: Wiring, clock: Clock, missed: str
) -> None:
    sweep = stored(wiring, missed=missed)
    tonight = NIGHT + timedelta(days=3)
    clock.time = tonight + timedelta(minutes=30)  # not missed either
    (run,) = schedule_due(wiring)
    assert run.due_at == tonight
    assert wiring.sweeps.get(sweep.id).next_due_at == tonight + timedelta(days=1)


@EACH_DATABASE
def test_a_run_of_ours_is_for_no_worker(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, add = stored(wiring), wiring.tasks.add
    taken: list[TaskRecord | None] = []

    def add_and_look(tasks: Sequence[TaskRecord], **how: Any) -> list[TaskRecord]:
        made = add(tasks, **how)
        taken.append(claimed(wiring))
        return made

    monkeypatch.setattr(wiring.tasks, "add", add_and_look)
    held = run_now(wiring, sweep, ours=True)
    assert taken == [None]
    assert wiring.tasks.heartbeat(held, new_lease()) is False


def test_a_run_that_goes_on_counts_all_that_it_has_spent(wiring: Wiring) -> None:
    anchors = {"top_k": 0, "anchors": [{"dp_shard": 2}, {"dp_shard": 2, "ac": "full"}]}
    run = ours(wiring, budget={"max_probes": 201}, measure=anchors)
    ended = {"state": "failed", "started_at": EVENING, "finished_at": EVENING + TEN_SECONDS}
    same = {"num_gpus": 2, "plan_id": run.id, "request": {"time_limit_seconds": 60.0}, **ended}
    causes = ["interrupted", *["crash"] * 201]
    crashed = [
        probe_record(number, layout=f"layout {number}", failure=cause, **same)
        for number, cause in enumerate(causes)
    ]
    wiring.probes.add(crashed)
    report = reported(wiring, run)
    assert (report["probes"], report["gpu_seconds"]) == (201, 202 * 20.0)
    assert {line["message"] for line in report["jobs"][0]["layouts"]} == {"the budget is spent"}


def test_a_job_that_fits_nowhere_is_a_failure_of_the_run(wiring: Wiring) -> None:
    report = reported(wiring, ours(wiring, models=["llama3-70b"]))
    assert report["headline"].endswith("0 new winners, 1 failure")
    (line,) = (line for line in report_lines(report) if line.startswith("llama3-70b"))
    assert "smallest needs" in line


def test_an_anchor_may_have_any_size_that_a_job_may_choose() -> None:
    values = {
        **SWEEP,
        "clusters": [{"gpu": "cpu", "num_gpus": [2, 4]}],
        "measure": {"top_k": 0, "anchors": [{"dp_shard": 2}, {"tp": 2}]},
    }
    assert len(read_sweep(values, allow_files=False).jobs) == 1
    values["measure"] = {"anchors": [{"dp_shard": 3}]}
    with pytest.raises(SpecError, match="takes 3 GPUs; the sweep's jobs have 2, 4"):
        read_sweep(values, allow_files=False)


def test_an_anchor_of_another_size_is_passed_over_where_it_does_not_fit(wiring: Wiring) -> None:
    clusters = [{"gpu": "cpu", "num_gpus": number} for number in (1, 2)]
    run = ours(wiring, clusters=clusters, measure={"top_k": 0, "anchors": [{"dp_shard": 2}]})
    observer = Observer()
    observer.stop.set()
    small, right = (job["layouts"][0] for job in reported(wiring, run, observer)["jobs"])
    assert (small["status"], right["message"]) == ("skipped", "stopped")
    assert small["message"] == "takes 2 GPUs, the job has 1"


@EACH_DATABASE
def test_paused_comes_not_due_and_cancelled_never_again(wiring: Wiring, clock: Clock) -> None:
    sweep = stored(wiring)
    waiting = run_now(wiring, sweep, ours=False)
    change_sweep(wiring, sweep.id, "paused")
    assert wiring.tasks.get(waiting.id).state == "cancelled"
    clock.time = NIGHT
    assert schedule_due(wiring) == []
    wiring.sweeps.change(sweep.id, "active", next_due(SWEEP["schedule"], clock.time))
    clock.time = NIGHT + timedelta(days=1)
    (run,) = schedule_due(wiring)
    change_sweep(wiring, sweep.id, "cancelled")
    assert wiring.tasks.get(run.id).state == "cancelled"
    clock.time = NIGHT + timedelta(days=2)
    assert schedule_due(wiring) == []


@EACH_DATABASE
def test_cancelling_a_sweep_ends_every_run_of_it(wiring: Wiring) -> None:
    """Of hundreds that wait not one is left for a worker; who runs one is asked to stop."""
    sweep = stored(wiring)
    first = run_now(wiring, sweep, ours=False)
    waiting = [
        replace(first, id=f"{first.id}-{number}", due_at=EVENING + timedelta(minutes=number + 1))
        for number in range(450)
    ]
    wiring.tasks.add(waiting)
    held = claimed(wiring)
    change_sweep(wiring, sweep.id, "cancelled")
    assert wiring.tasks.heartbeat(held, new_lease()) is True, "asked to stop"
    assert wiring.tasks.list(state="queued").items == []
    assert claimed(wiring) is None


def test_a_run_asked_for_while_its_sweep_is_cancelled_is_refused(wiring: Wiring) -> None:
    sweep = stored(wiring)
    change_sweep(wiring, sweep.id, "cancelled")
    with pytest.raises(ConflictError, match="was cancelled"):
        run_now(wiring, sweep, ours=False)  # as it was read before
    assert wiring.tasks.list().items == []


@EACH_DATABASE
@pytest.mark.parametrize(
    ("overlap", "states"),
    [("skip", ["running"]), ("queue", ["running", "queued"]), ("replace", ["running", "queued"])],
)
def test_a_night_that_comes_while_the_last_one_runs(
    wiring: Wiring, clock: Clock, overlap: str, states: list[str]
) -> None:
    sweep = stored(wiring, overlap=overlap)
    clock.time = NIGHT
    schedule_due(wiring)
    held = claimed(wiring)
    clock.time = NIGHT + timedelta(days=1)
    schedule_due(wiring)
    assert states_of(wiring, sweep) == states
    assert wiring.sweeps.get(sweep.id).next_due_at == NIGHT + timedelta(days=2)
    assert wiring.tasks.heartbeat(held, new_lease()) is (overlap == "replace")
    assert claimed(wiring) is None, "one run of a sweep at a time"
    wiring.tasks.finish(held, JobEnd(state="done"))
    assert (claimed(wiring) is None) is (overlap == "skip")
    clock.time = NIGHT + timedelta(days=2)
    schedule_due(wiring)
    assert states_of(wiring, sweep).count("queued") == 1


@EACH_DATABASE
def test_runs_of_one_sweep_are_never_claimed_at_once(workers: list[Wiring], clock: Clock) -> None:
    sweep = stored(workers[0], overlap="queue")
    for night in range(4):
        clock.time = NIGHT + timedelta(days=night)
        assert len(schedule_due(workers[0])) == 1
    for left in range(4, 0, -1):
        (held,) = filter(None, at_once(workers, claimed))
        assert states_of(workers[0], sweep).count("queued") == left - 1
        workers[0].tasks.finish(held, JobEnd(state="done"))


def states_of(wiring: Wiring, sweep: SweepRecord) -> list[str]:
    """Of its runs, the oldest first."""
    runs = wiring.tasks.list(parent_id=sweep.id).items
    return [run.state for run in reversed(runs)]


@EACH_DATABASE
def test_the_higher_priority_is_claimed_first(wiring: Wiring) -> None:
    names = [run_now(wiring, stored(wiring, priority=p), ours=False).id for p in (0, -1, 5)]
    taken = [claimed(wiring) for _ in names]
    assert [task.id for task in taken if task] == [names[2], names[0], names[1]]


def test_a_night_of_another_zone(wiring: Wiring) -> None:
    sweep = stored(wiring, time_zone="America/New_York")
    assert sweep.next_due_at == datetime(2026, 3, 2, 7, 0, tzinfo=UTC)


@pytest.mark.parametrize(("wrong", "words"), [
    ({"schedule": "61 2 * * *"}, "cron"), ({"schedule": "0 2 31 2 *"}, "cron"),
    ({"schedule": "nightly"}, "cron"), ({"time_zone": "Mars/Olympus"}, "time_zone"),
    ({"budget": {"hours": "late"}}, "budget"), ({"measure": {"top_k": 0}}, "measures nothing"),
    ({"measure": {"anchors": [{"dp_shard": 2}, {"tpx": 2}]}}, "anchors.1.tpx"),
    ({"measure": {"anchors": [{"dp_shard": 3}]}}, "takes 3 GPUs; the sweep's jobs have 2"),
])  # fmt: skip
def test_what_never_comes_or_cannot_be_measured_is_refused_when_it_is_stored(
    wiring: Wiring, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        stored(wiring, **wrong)
    assert wiring.sweeps.list().items == []


@EACH_DATABASE
def test_the_databases_clock_is_about_right(migrated_url: str) -> None:
    now = wire(Settings(database_url=migrated_url)).sweeps.now()
    assert abs(now - datetime.now(UTC)) < timedelta(minutes=5)
