"""Sweeps that come due, with a clock of ours: once each, whatever happened meanwhile, on SQLite and PostgreSQL."""

import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from api.settings import Settings
from api.sweeping import add_sweep, cancel_sweep, next_due, schedule_due
from api.wiring import Wiring, wire
from planner.errors import SpecError
from planner.ports import SweepRecord

EVENING = datetime(2026, 3, 1, 20, 0, tzinfo=UTC)
NIGHT = datetime(2026, 3, 2, 2, 0, tzinfo=UTC)
SWEEP: dict[str, Any] = {
    "name": "nightly", "models": ["llama3.2-1b"], "clusters": [{"gpu": "cpu", "num_gpus": 2}],
    "trainings": [{"seq_len": 128, "global_batch_size": 8}], "schedule": "0 2 * * *",
}  # fmt: skip


@dataclass
class Clock:
    """Says what it is told."""

    time: datetime

    def now(self) -> datetime:
        return self.time


def wired(url: str, clock: Clock) -> Wiring:
    ids = wire(Settings(database_url=url)).ids
    return Wiring(settings=Settings(database_url=url), clock=clock, ids=ids)


@pytest.fixture
def clock() -> Clock:
    return Clock(EVENING)


@pytest.fixture
def wiring(sqlite_url: str, clock: Clock) -> Wiring:
    return wired(sqlite_url, clock)


def stored(wiring: Wiring, **more: Any) -> SweepRecord:
    return add_sweep(wiring, {**SWEEP, **more}, allow_files=False)


def test_a_night_is_one_run_however_often_one_looks(wiring: Wiring, clock: Clock) -> None:
    sweep = stored(wiring)
    assert sweep.next_due_at == NIGHT
    assert schedule_due(wiring) == []
    clock.time = NIGHT + timedelta(minutes=1)
    (run,) = schedule_due(wiring)
    assert (run.parent_id, run.due_at, run.state) == (sweep.id, NIGHT, "queued")
    assert schedule_due(wiring) == []
    assert wiring.sweeps.get(sweep.id).next_due_at == NIGHT + timedelta(days=1)


def test_workers_that_look_at_once_make_one_run(sqlite_url: str, clock: Clock) -> None:
    workers = [wired(sqlite_url, clock) for _ in range(4)]
    stored(workers[0])
    clock.time = NIGHT
    made: list[int] = []
    start = threading.Barrier(len(workers))

    def look(worker: Wiring) -> None:
        _ = worker.sweeps
        start.wait()
        made.append(len(schedule_due(worker)))

    threads = [threading.Thread(target=look, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 0, 0, 1]


@pytest.mark.parametrize(("missed", "runs"), [("skip", 0), ("catch-up", 1)])
def test_nights_missed_are_skipped_or_made_up_once(wiring: Wiring, clock: Clock, missed: str, runs: int) -> None:
    sweep = stored(wiring, missed=missed)
    clock.time = NIGHT + timedelta(days=3, hours=5)
    assert len(schedule_due(wiring)) == runs
    assert schedule_due(wiring) == []
    assert wiring.sweeps.get(sweep.id).next_due_at == NIGHT + timedelta(days=4)


def test_half_an_hour_late_is_not_missed(wiring: Wiring, clock: Clock) -> None:
    stored(wiring)
    clock.time = NIGHT + timedelta(minutes=30)
    assert len(schedule_due(wiring)) == 1


def test_paused_comes_not_due_and_cancelled_never_again(wiring: Wiring, clock: Clock) -> None:
    sweep = stored(wiring)
    wiring.sweeps.change(sweep.id, "paused", None)
    clock.time = NIGHT
    assert schedule_due(wiring) == []
    wiring.sweeps.change(sweep.id, "active", next_due(SWEEP["schedule"], clock.time))
    clock.time = NIGHT + timedelta(days=1)
    (run,) = schedule_due(wiring)
    cancel_sweep(wiring, sweep.id)
    assert wiring.tasks.get(run.id).state == "cancelled"
    clock.time = NIGHT + timedelta(days=2)
    assert schedule_due(wiring) == []


def test_a_schedule_that_never_comes_is_refused(wiring: Wiring, tmp_path: Path) -> None:
    for words in ("61 2 * * *", "0 2 31 2 *", "nightly"):
        with pytest.raises(SpecError, match="cron"):
            stored(wiring, schedule=words)
