"""A database that is locked, frozen, gone or of another version: one clear error, then recovery."""

import contextlib
import errno
import os
import queue
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, Engine, event, text, update

from planner.api.errors import UnavailableError, UnreadableError
from planner.api.jobs import leases
from planner.api.jobs import workers as module
from planner.api.jobs.probes import enqueue, probe_of_job
from planner.api.jobs.sweeps import schedule_due
from planner.api.jobs.workers import ProbeWorkers, TaskWorkers
from planner.api.settings import Settings
from planner.api.storage.engine import Limits
from planner.api.storage.job_records import JobEnd, Lease, ProbeRecord, TaskRecord
from planner.api.storage.migrate import _locked
from planner.api.storage.store import SqlStore
from planner.api.storage.tables import PlanRow, SweepRecord
from planner.api.storage.tasks import SqlTaskStore
from planner.api.wiring import Wiring, wire
from planner.errors import StoreError
from planner.specs.plan import Plan
from tests.conftest import EACH_DATABASE, END_OTHERS, engine_of, job_values
from tests.contract.test_measurement_and_probe_stores import SUBJECT, measurement
from tests.served import in_process, wiring_of
from tests.stand_ins.records import PLAN_JOB, claimed, task_record

SECONDS = 0.5  # that an engine of these tests waits
MOST_SECONDS = 100.0  # on however busy a machine, and far below waiting for ever
ON_POSTGRES = pytest.mark.parametrize("database", ["postgres"], indirect=True)


@pytest.fixture
def engine(migrated_url: str) -> Engine:
    return engine_of(migrated_url, Limits(seconds=SECONDS, connections=2))


@pytest.fixture
def wiring(migrated_url: str) -> Wiring:
    return wire(Settings(database_url=migrated_url))


@pytest.fixture
def held(wiring: Wiring) -> TaskRecord:
    """A task that this process works on."""
    wiring.tasks.add([task()])
    return claimed(wiring)


def probe(wiring: Wiring, *, max_attempts: int) -> ProbeRecord:
    """One that this process is to run."""
    job = job_values("debug-tiny", "cpu", 1, 64, 4, layout={"dp_shard": 1})
    asked = probe_of_job({"job": job}, allow_files=False)
    return enqueue(wiring, asked, max_attempts=max_attempts, ours=True)[0]


def gone(*_: object, **__: object) -> Any:
    raise UnavailableError("the database is gone", retry_after_seconds=1.0)


def gone_at_first(stored: Callable[..., Any]) -> Callable[..., Any]:
    """The call, but that the database is gone at its first three."""
    tries = iter(range(3))
    return lambda *given, **named: (stored if next(tries, None) is None else gone)(*given, **named)


def refused(answer: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["type"]) == (503, "database_unavailable")
    return body


def listed(client: TestClient, path: str = "/plans") -> set[str]:
    return {one["id"] for one in client.get(path).json()["items"]}


def task() -> TaskRecord:
    return task_record(created_at=datetime.now(UTC))


def is_refused_in_time(engine: Engine, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=words) as raised:
        SqlTaskStore(engine).add([task()])
    assert time.monotonic() - started < MOST_SECONDS
    assert "ask again in a few seconds" in str(raised.value)
    assert raised.value.retry_after_seconds > 0


@EACH_DATABASE
def test_a_locked_database_is_given_up_and_used_again(engine: Engine, migrated_url: str) -> None:
    other = engine_of(migrated_url)
    with other.connect().execution_options(planner_writes=True) as holder, holder.begin():
        if other.dialect.name == "postgresql":
            holder.execute(text("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE"))
        is_refused_in_time(engine, "lock")
    SqlTaskStore(engine).add([task()])


@EACH_DATABASE
def test_no_free_connection_is_given_up(engine: Engine) -> None:
    with engine.connect() as one, engine.connect() as two:
        if engine.dialect.name == "postgresql":
            one.execute(text("SELECT 1"))
            two.execute(text("SELECT 1"))
        is_refused_in_time(engine, "QueuePool limit")
    SqlTaskStore(engine).add([task()])


@ON_POSTGRES
def test_a_slow_statement_is_ended(engine: Engine) -> None:
    started = time.monotonic()
    with pytest.raises(Exception, match="statement timeout"), engine.connect() as connection:
        connection.execute(text("SELECT pg_sleep(600)"))
    assert time.monotonic() - started < MOST_SECONDS


@ON_POSTGRES
def test_a_migration_may_take_longer_than_a_statement(engine: Engine) -> None:
    with _locked(engine) as connection:
        connection.execute(text("SELECT pg_sleep(1.2)"))
    with engine.connect() as connection:
        assert connection.scalar(text("SHOW statement_timeout")) == "500ms"


def backend(connection: Connection) -> int:
    """The process of the server that answers it."""
    return connection.execute(text("SELECT pg_backend_pid()")).scalar_one()


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process stands still until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@ON_POSTGRES
def test_a_frozen_server_is_given_up(engine: Engine) -> None:
    with engine.connect() as connection:
        first = backend(connection)
    with frozen(first):
        started = time.monotonic()
        SqlTaskStore(engine).add([task()])  # the pool finds out, and connects anew
        assert time.monotonic() - started < MOST_SECONDS
        with engine.connect() as connection:
            second = backend(connection)  # in the middle of a transaction
            with frozen(second), pytest.raises(Exception, match="no answer within"):
                connection.execute(text("SELECT 1"))
    assert SqlTaskStore(engine).get("plan-1").state == "queued"


@ON_POSTGRES
def test_a_server_that_ends_connections_is_asked_again(engine: Engine, migrated_url: str) -> None:
    SqlTaskStore(engine).add([task()])
    with engine_of(migrated_url).connect() as connection:
        connection.execute(text(END_OTHERS)).all()
    assert SqlTaskStore(engine).get("plan-1").state == "queued"


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    with in_process(sqlite_url, probe_workers=0, database_timeout_seconds=SECONDS) as made:
        yield made


def test_a_file_that_is_gone_is_503_and_used_again_when_it_is_back(
    client: TestClient, tmp_path: Path, plan: Plan
) -> None:
    wiring_of(client).store.save_plan(plan, PLAN_JOB)
    here, away = tmp_path / "planner.db", tmp_path / "away"
    with wiring_of(client).engine.connect() as connection:
        connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    away.mkdir()
    for file in tmp_path.glob("planner.db*"):
        shutil.move(file, away / file.name)
    answer = client.get("/plans")
    refused(answer)
    assert int(answer.headers["retry-after"]) >= 1
    assert not here.exists(), "an empty database in its place would hide the loss"
    shutil.move(away / "planner.db", here)
    assert listed(client) == {plan.id}


def test_an_unreadable_plan_is_410_and_others_are_listed(client: TestClient, plan: Plan) -> None:
    for name in ("plan-a", "plan-b"):
        wiring_of(client).store.save_plan(plan.model_copy(update={"id": name}), PLAN_JOB)
    with wiring_of(client).engine.begin() as connection:
        connection.execute(update(PlanRow).where(PlanRow.id == "plan-a").values(body={"old": 1}))
    for path in ("/plans/plan-a", "/plans/plan-a/explain", "/plans/plan-a/charts/pareto"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["type"]) == (410, "unreadable"), path
        assert "use the version that stored it" in answer.json()["remedy"]
    assert client.get("/plans/plan-b").status_code == 200
    assert listed(client) == {"plan-a", "plan-b"}
    assert client.delete("/plans/plan-a").status_code == 200


def test_measurements_that_cannot_be_read_are_left_out(client: TestClient) -> None:
    store = wiring_of(client).measurements
    store.add([measurement(1), measurement(2)])
    with wiring_of(client).engine.begin() as connection:
        connection.execute(text("UPDATE measurements SET body = '{}' WHERE id = 'measurement-001'"))
    assert listed(client, "/measurements") == {"measurement-002"}
    assert client.get("/measurements/measurement-001").status_code == 410
    assert len(store.matching(measurement(1).key().job_hash, SUBJECT)[0]) == 1


def test_a_sweep_that_cannot_be_read_is_paused_and_stops_no_other(wiring: Wiring) -> None:
    at = {"created_at": datetime.now(UTC), "next_due_at": datetime(2026, 1, 1, tzinfo=UTC)}
    wiring.sweeps.add(SweepRecord(id="sweep-1", name="old", spec={"old": 1}, **at))
    assert schedule_due(wiring) == []
    assert wiring.sweeps.get("sweep-1").state == "paused"


def test_a_full_disk_is_503_and_what_is_there_stays(client: TestClient, plan: Plan) -> None:
    wiring = wiring_of(client)
    wiring.store.save_plan(plan, PLAN_JOB)

    def fill(dbapi_connection: sqlite3.Connection, _: object) -> None:
        (pages,) = dbapi_connection.execute("PRAGMA page_count").fetchone()
        dbapi_connection.execute(f"PRAGMA max_page_count = {pages}")

    event.listen(wiring.engine, "connect", fill)
    wiring.engine.dispose()
    job = job_values("debug-tiny", "cpu", 1, 64, 4, search={"top_k": 1})
    job["notes"] = "x" * 100_000
    assert "full" in refused(client.post("/plan", json=job))["message"]
    event.remove(wiring.engine, "connect", fill)
    wiring.engine.dispose()
    assert listed(client) == {plan.id}
    assert client.post("/plan", json=job).status_code == 200


@pytest.mark.parametrize(
    ("number", "left"), [(errno.ENOSPC, ("queued", None)), (errno.EPERM, ("failed", "bug"))]
)
def test_what_a_full_disk_stopped_is_tried_again(
    wiring: Wiring, held: TaskRecord, number: int, left: tuple[str, str | None]
) -> None:
    TaskWorkers(wiring, 0)._give_up(held, OSError(number, os.strerror(number), "/probes/x"))
    now = wiring.tasks.get(held.id)
    assert (now.state, now.failure) == left
    if left[0] == "queued":
        assert now.not_before is not None
        assert "No space left on device: /probes/x" in str(now.message)


def test_a_probe_that_finds_no_room_for_its_files_is_tried_again(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real = probe(wiring, max_attempts=2), Path.mkdir

    def mkdir(path: Path, *given: Any, **named: Any) -> None:
        if path.name.startswith("probe-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *given, **named)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    ProbeWorkers(wiring, 0)._run(held)
    now = wiring.probes.get(held.id)
    assert (now.state, now.attempts) == ("queued", 1)
    assert now.message == "No space left on device: no file named"


def test_a_worker_goes_on_after_what_it_cannot_read(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    workers, calls = TaskWorkers(wiring, 1), queue.Queue[None]()

    def broken() -> None:
        calls.put(None)
        raise KeyError("a row of another version")

    monkeypatch.setattr(workers, "_claim_next", broken)
    workers.start()
    try:
        for _ in range(2):
            calls.get(timeout=60.0)
    finally:
        workers.stop()


def test_a_table_that_is_not_there_is_no_matter_of_time(sqlite_url: str) -> None:
    with pytest.raises(StoreError, match="no such table") as raised:
        SqlStore(engine_of(sqlite_url)).get_plan("plan-1")
    assert "PLANNER_DATABASE_URL" in str(raised.value)
    assert not isinstance(raised.value, UnavailableError | UnreadableError)


@pytest.mark.parametrize("full", [False, True])
def test_a_job_that_lost_its_database_goes_back_when_it_is_there_again(
    wiring: Wiring, held: TaskRecord, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Also one that found a full disk, which the database could not be told."""
    workers = TaskWorkers(wiring, 0)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(workers, "_work", no_room if full else gone)
        for name in ("release", "retry"):
            patch.setattr(wiring.tasks, name, gone)
        workers._run(held)
        with pytest.raises(UnavailableError):
            workers._release_the_given_up()
    assert wiring.tasks.get(held.id).state == "running"
    for _ in range(2):  # once is enough
        workers._release_the_given_up()
        now = wiring.tasks.get(held.id)
        assert (now.state, now.attempts) == ("queued", 0)


@EACH_DATABASE
def test_an_end_is_stored_when_the_database_is_back(
    wiring: Wiring, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease expires meanwhile, and who else saw the outage takes nothing over."""
    monkeypatch.setattr(leases, "AGAIN_SECONDS", 0.05)
    mine, other = wiring.tasks, wire(Settings(database_url=migrated_url)).tasks
    mine.add([task()])
    record = mine.claim(Lease(owner="another host:1", seconds=0.01))
    with monkeypatch.context() as patch:
        patch.setattr(other, "expired", gone)
        with pytest.raises(UnavailableError):
            leases.abandoned(other, check_processes=False)
    time.sleep(0.05)
    assert len(other.expired()) == 1
    assert leases.abandoned(other, check_processes=False) == []
    monkeypatch.setattr(mine, "finish", gone_at_first(mine.finish))
    end = JobEnd(state="failed", failure="bug", message="kept in hand")
    assert leases.Claimed(mine, record).finish(end).message == "kept in hand"
    told = leases.Claimed(mine, record)
    told.stop.set()
    monkeypatch.setattr(mine, "finish", gone)
    with pytest.raises(UnavailableError):
        told.finish(end)


def test_a_probe_starts_once_its_folder_is_stored(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who takes over after a crash would not find the result, and run the probe again."""
    monkeypatch.setattr(leases, "AGAIN_SECONDS", 0.05)
    record, probes = probe(wiring, max_attempts=1), wiring.probes
    monkeypatch.setattr(probes, "heartbeat", gone_at_first(probes.heartbeat))
    leases.Claimed(probes, record).store(folder="here:/probes/one")
    assert probes.get(record.id).folder == "here:/probes/one"
