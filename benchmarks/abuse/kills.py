"""Kills the service and its workers at random moments under load, and looks at what is left.

    python -m benchmarks.abuse.kills [--kills 100] [--seed 1] [--database sqlite|postgres|both]

Starts the real service and two workers on a new database, each a process. Clients ask for plans
under Idempotency-Keys until they are answered, for probes and for studies; one process after the
other gets SIGKILL and is started again, and after every few of these the database is away for a
while: SQLite's is locked, PostgreSQL's server is killed and started again. Then everything is let
come to rest, what was given up is queued again, and the table says what was lost, done twice or
does not fit together. Exits 1 where anything was. Probes run a stand-in program that writes a line
when it has run to completion.
"""

import argparse
import itertools
import json
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, select

from benchmarks.abuse.processes import become
from planner.api.jobs.queues import jobs_in, retry
from planner.api.settings import Settings
from planner.api.storage.backup import faults_in
from planner.api.storage.engine import make_engine, normalise_url
from planner.api.storage.migrate import upgrade
from planner.api.storage.tables import AuditRow, MeasurementRow, PlanRow
from planner.api.storage.transactions import reading
from planner.api.wiring import Wiring, wire
from tests import zygote
from tests.conftest import ROOT, clean_environment, control_postgres, running_postgres
from tests.stand_ins import light_python, worker

TINY: dict[str, Any] = {
    "model": "debug-tiny",
    "cluster": {"gpu": "cpu", "num_gpus": 1},
    "training": {"seq_len": 64, "global_batch_size": 4},
}
PAPER = {**TINY, "search": {"top_k": 1}}
PROBE = {**TINY, "layout": {"dp_shard": 1}, "notes": "sleep 0.2"}
STUDY = {**TINY, "probe": {"max_probes": 1, "max_gpu_seconds": 300.0}}
PROGRAM = """
import json, os, runpy, sys
task, log = sys.argv[1], {log!r}
runpy.run_path({worker!r}, run_name="__main__")
with open(task) as file:
    line = json.load(file)["id"] + "\\n"
handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(handle, line.encode())
"""
# that a process is given: some die while they start, most at work; the service starts slower
UP_SECONDS = {"service": (0.5, 20.0), "worker": (0.5, 8.0)}
CLIENTS = ("plan", "plan", "plan", "probe", "study")
REST_SECONDS = 600.0  # within which everything has to come to rest
MOST_OPEN_PROBES = 20
KILLS_AN_OUTAGE, AWAY_SECONDS = 5, (6.0, 12.0)
AGAIN_SECONDS, PAUSE_SECONDS = 0.2, 0.5  # before a client repeats a request, and asks the next
ROUNDS = 5  # of queueing again what was given up
Run = Callable[[argparse.Namespace, str, Callable[[float], None], Path], dict[str, object]]
SERVICE, WORKERS, COMPLETED = "service", ("worker 1", "worker 2"), "completed"


@dataclass
class Processes:
    """The service and its workers; each can be killed and started again."""

    environment: dict[str, str]
    ports: dict[str, int]  # of services; everything else is a worker
    log: Path
    roots: dict[str, Path] = field(default_factory=dict)  # checkouts other than this one
    running: dict[str, BaseProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Starts it, or starts it again."""
        command = ["worker", "--tasks", "1", "--probes", "2"]
        if name in self.ports:
            command = ["serve", "--port", str(self.ports[name])]
        root = str(self.roots.get(name, ROOT))
        environment = {**self.environment, "PYTHONPATH": root}
        self.running[name] = zygote.start(become, command, environment, root, str(self.log))

    def kill(self, name: str) -> bool:
        """SIGKILL; whether it was there."""
        process = self.running[name]
        was_there = process.is_alive()
        process.kill()
        process.join()
        return was_there

    def start_ended(self, names: Sequence[str]) -> None:
        """Starts again what has ended, as systemd does: a worker that found no database."""
        for name in names:
            if not self.running[name].is_alive():
                self.start(name)

    def stop(self) -> None:
        """Ends all that is left of it."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.join(30)
            process.kill()
            process.join()


@dataclass
class Asked:
    """What the clients were promised.

    plans: ids of answered plans by their key; studies, probes: accepted ids.
    """

    plans: dict[str, str] = field(default_factory=dict)
    studies: list[str] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)


def ask(address: str, kind: str, client: int, asked: Asked, stop: threading.Event) -> None:
    """One client, until it is told to stop: it repeats a request until that is answered."""
    path, body = {
        "plan": ("/plan", PAPER),
        "study": ("/plan", STUDY),
        "probe": ("/probes", {"job": PROBE, "time_limit_seconds": 60.0}),
    }[kind]
    http = httpx.Client(base_url=address, timeout=60.0)  # to make one takes 20 ms
    for number in itertools.count():
        if stop.is_set():
            return
        headers = {"idempotency-key": f"{client}-{number}"}
        while True:
            try:
                answer = http.post(path, json=body, headers=headers)
                if answer.status_code not in (408, 429, 502, 503):
                    break
            except httpx.TransportError:
                pass  # it was killed; the same request again
            time.sleep(AGAIN_SECONDS)
        if answer.status_code not in (200, 202):
            asked.wrong[f"{kind}: {answer.status_code} {answer.text[:80]}"] += 1
            time.sleep(0.5)
            continue
        found = answer.json()["id"]
        if kind == "plan":
            asked.plans[headers["idempotency-key"]] = found
        else:
            (asked.studies if kind == "study" else asked.probes).append(found)
        while not stop.wait(PAUSE_SECONDS) and kind != "plan" and _is_full(http, kind):
            pass


def _is_full(http: httpx.Client, kind: str) -> bool:
    """Whether enough of this kind waits for the workers."""
    try:
        jobs = http.get("/queue", params={"limit": 200}).json()
    except (httpx.TransportError, ValueError):
        return True
    waiting = sum(isinstance(job, dict) and job["kind"] == kind for job in jobs)
    return waiting >= (MOST_OPEN_PROBES if kind == "probe" else 2)


def processes_on(url: str, folder: Path, services: Sequence[str]) -> Processes:
    """The processes of a database that is migrated, none started. Completed probes are logged."""
    engine = make_engine(normalise_url(url))
    upgrade(engine)
    engine.dispose()
    program = folder / "program.py"
    program.write_text(PROGRAM.format(log=str(folder / COMPLETED), worker=worker.__file__))
    ports = {}
    for name in services:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports[name] = free.getsockname()[1]
    surroundings = {
        "PLANNER_DATABASE_URL": url,
        "PLANNER_PROBE_WORKERS": "0",
        "PLANNER_TASK_WORKERS": "0",
        "PLANNER_PLANNING_PROCESSES": "1",
        "PLANNER_PROBE_FOLDER": str(folder / "probes"),
        "PLANNER_LEASE_FOLDER": str(folder / "leases"),
        "PLANNER_PROBE_PROGRAM": str(program),
        "PLANNER_PROBE_PYTHON": str(light_python.install(folder)),
    }
    return Processes({**clean_environment(), **surroundings}, ports, folder.parent / "log")


def run(
    given: argparse.Namespace, url: str, away: Callable[[float], None], folder: Path
) -> dict[str, object]:
    """Load and kills on one database; what came of it."""
    processes = processes_on(url, folder, (SERVICE,))
    asked, stop, chance = Asked(), threading.Event(), random.Random(given.seed)
    address, names = f"http://127.0.0.1:{processes.ports[SERVICE]}", (SERVICE, *WORKERS)
    clients = [
        threading.Thread(target=ask, args=(address, kind, number, asked, stop), daemon=True)
        for number, kind in enumerate(CLIENTS)
    ]
    hits: Counter[str] = Counter()
    outages = 0
    started = time.monotonic()
    try:
        for name in names:
            processes.start(name)
        for client in clients:
            client.start()
        wait_for_first(asked)
        ends = {name: _end_of(name, chance) for name in names}
        while sum(hits.values()) < given.kills:
            name = min(ends, key=ends.__getitem__)
            time.sleep(max(0.0, ends[name] - time.monotonic()))
            ends[name] = _end_of(name, chance)
            hits[name.split(" ")[0]] += processes.kill(name)
            processes.start(name)
            if sum(hits.values()) >= KILLS_AN_OUTAGE * (outages + 1):
                away(chance.uniform(*AWAY_SECONDS))
                outages += 1
                processes.start_ended(names)
                ends = {name: _end_of(name, chance) for name in names}
        stop.set()
        for client in clients:
            client.join(REST_SECONDS)
        wiring = wire(Settings(database_url=url))
        given_up = come_to_rest(wiring)
        return {
            **{f"kills of a {name}": number for name, number in sorted(hits.items())},
            "outages of the database": outages,
            "seconds": round(time.monotonic() - started),
            **what_came(wiring, asked, folder / COMPLETED),
            "jobs given up, and queued again by hand": given_up.total(),
            **{f"of these {kind}": number for kind, number in sorted(given_up.items())},
        }
    finally:
        stop.set()
        processes.stop()


def _end_of(name: str, chance: random.Random) -> float:
    """When a process that starts now is killed."""
    return time.monotonic() + chance.uniform(*UP_SECONDS[name.split(" ")[0]])


def come_to_rest(wiring: Wiring) -> Counter[str]:
    """Waits until nothing is open; what was given up is queued again, as a person would.

    Returns how many were, by kind and failure. Raises TimeoutError that names what stays open.
    """
    given_up: Counter[str] = Counter()
    deadline = time.monotonic() + REST_SECONDS
    for _ in range(ROUNDS):
        while left := jobs_in(wiring, failed=False):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rest within {REST_SECONDS:.0f} s: {left}")
            time.sleep(0.5)
        failed = jobs_in(wiring, failed=True)
        if not failed:
            break
        for job in failed:
            retry(wiring, job.id)
        given_up.update(f"{job.kind}: {job.failure}" for job in failed)
    return given_up


def what_came(wiring: Wiring, asked: Asked, log: Path) -> dict[str, object]:
    """What is in the database beside what was promised. Keys that end in ! have to be 0."""
    completed = Counter(log.read_text().split()) if log.exists() else Counter()
    with reading(wiring.store.engine) as session:
        plans = set(session.scalars(select(PlanRow.id)))
        made = session.scalars(select(AuditRow.subject).where(AuditRow.action == "plan.made")).all()
        ends = Counter(
            session.scalars(
                select(AuditRow.subject).where(
                    AuditRow.action == "probe.ended", AuditRow.detail.startswith("done")
                )
            )
        )
        measurements = session.scalar(select(func.count()).select_from(MeasurementRow)) or 0
    done = {name for name in asked.probes if wiring.probes.get(name).state == "done"}
    own = [name for name in completed if name.startswith("probe-")]
    twice = [name for name in own if completed[name] > 1]
    all_done = _all_done(wiring)
    return {
        "plans answered": len(asked.plans),
        "studies accepted": len(asked.studies),
        "probes accepted": len(asked.probes),
        "plans answered and lost!": len(set(asked.plans.values()) - plans),
        "plans made twice for one request!": len(made) - len(set(asked.plans.values())),
        "studies accepted and without a plan!": len(set(asked.studies) - plans),
        "probes accepted and not done!": len(set(asked.probes) - done),
        "probes run to completion twice!": len(twice),
        **({"the first of those": _story(wiring, twice[0])} if twice else {}),
        "probes ended twice!": sum(number > 1 for number in ends.values()),
        "probes done without a measurement!": all_done - measurements,
        "faults in the database!": len(faults_in(wiring.store.engine)),
        "requests refused or failed!": sum(asked.wrong.values()),
        **({"the first of them": next(iter(asked.wrong))} if asked.wrong else {}),
    }


def _story(wiring: Wiring, subject: str) -> str:
    """What the audit trail says of a job, and what the job says itself."""
    query = select(AuditRow).where(AuditRow.subject == subject).order_by(AuditRow.at)
    with reading(wiring.store.engine) as session:
        events = [f"{row.at:%H:%M:%S} {row.action} {row.detail}" for row in session.scalars(query)]
    job = wiring.probes.get(subject)
    return "; ".join([subject, *events, f"{job.state}, {job.attempts} attempts, {job.message}"])


def _all_done(wiring: Wiring) -> int:
    """Probes that measured a layout."""
    number, cursor = 0, None
    while True:
        page = wiring.probes.list(cursor, 200, state="done")
        number += sum(not record.request.get("kernels") for record in page.items)
        cursor = page.next_cursor
        if cursor is None:
            return number


def wait_for_first(asked: Asked) -> None:
    """Until one of each kind was answered. Raises TimeoutError."""
    deadline = time.monotonic() + REST_SECONDS
    while not (asked.plans and asked.probes and asked.studies):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no first answers within {REST_SECONDS:.0f} s")
        time.sleep(0.5)


@contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[str, Callable[[float], None]]]:
    """The URL of a new database, and what takes it away for so many seconds.

    SQLite takes nothing then; PostgreSQL's server is killed, and started again.
    """
    if kind == "sqlite":

        def lock(seconds: float) -> None:
            with closing(sqlite3.connect(folder / "planner.db", isolation_level=None)) as holder:
                holder.execute("PRAGMA busy_timeout = 60000")
                holder.execute("BEGIN IMMEDIATE")
                time.sleep(seconds)

        yield f"sqlite:///{folder / 'planner.db'}", lock
        return
    import psycopg

    with contextmanager(running_postgres)() as server:
        admin = f"postgresql://planner@/postgres?{server}"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("CREATE DATABASE kills")

        def restart(seconds: float) -> None:
            control_postgres(Path(server.removeprefix("host=")), "-m", "immediate", "stop")
            time.sleep(seconds)
            control_postgres(Path(server.removeprefix("host=")), "start")

        yield f"postgresql://planner@/kills?{server}", restart


def on_each_database(parser: argparse.ArgumentParser, run: Run) -> int:
    """Runs and prints what came of it; 1 where a number whose key ends in ! is not 0."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    wrong = False
    for kind in ("sqlite", "postgres") if given.database == "both" else (given.database,):
        with tempfile.TemporaryDirectory(prefix="planner-abuse-") as name:
            folder = Path(name) / "disk"
            folder.mkdir()
            with database(kind, folder) as (url, away):
                try:
                    found = run(given, url, away, folder)
                except TimeoutError:
                    sys.stderr.write((folder.parent / "log").read_text()[-4000:])
                    raise
        wrong |= any(number for key, number in found.items() if key.endswith("!"))
        if given.json:
            sys.stdout.write(json.dumps({"database": kind, **found}) + "\n")
        else:
            width = max(map(len, found))
            lines = [f"{key.rstrip('!'):<{width}}  {value}" for key, value in found.items()]
            sys.stdout.write("\n".join([kind, *lines, ""]) + "\n")
        sys.stdout.flush()
    return int(wrong)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    return on_each_database(parser, run)


if __name__ == "__main__":
    sys.exit(main())
