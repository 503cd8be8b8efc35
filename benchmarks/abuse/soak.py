"""Everything at once on one database, for long: does it stay whole, and does nothing grow?

    python -m benchmarks.abuse.soak [--minutes 120] [--database sqlite|postgres] [--other FOLDER]

Two services, two versions where `--other` names another checkout, and three workers share a new
database. Clients ask for plans, probes, studies, estimates and runs of a sweep whose webhook is
answered a byte a second. One service and one worker live on; the others get SIGKILL in turn. Every
few seconds comes the next of: the database is away, the disk is full (as root), the clock jumps ten
minutes forward, and back. Prints what came of it, counted by SQL of its own too, and medians of the
middle and the last third of the time: memory, sockets and files of those that live on, files and
rows a job. Exits 1 where anything is wrong or grows.
"""

import argparse
import itertools
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event

import httpx
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.abuse import kills
from benchmarks.abuse.faults import Clock, fill, receive, small_disk
from benchmarks.abuse.load import ESTIMATE
from planner.api.settings import Settings
from planner.api.storage.tables import Base
from planner.api.wiring import wire
from planner.units import MIB
from tests import zygote

SERVICES, LIVING = ("service 1", "service 2"), ("service 2", "worker 3")
KILLED = ("service 1", "worker 1", "worker 2")
KILL_SECONDS, FAULT_SECONDS, SAMPLE_SECONDS = (2.0, 6.0), 8.0, 1.5
JUMP_SECONDS = 600
# of the disk: three clients that pause keep at most 19 MiB of plans and answers a minute
DISK_BYTES, DISK_BYTES_A_MINUTE = 256 * MIB, 32 * MIB
SWEEP = {"name": "soak", "jobs": [kills.TINY], "steps": 3, "measure": {"top_k": 1},
         "budget": {"max_probes": 2, "max_gpu_seconds": 600}}  # fmt: skip
JOBS = "(SELECT state, attempts FROM probes UNION ALL SELECT state, attempts FROM tasks) AS jobs"
INVARIANTS = {  # each counts what may not be
    "jobs still open": f"{JOBS} WHERE state IN ('queued', 'running')",
    "jobs done twice": "(SELECT 1 FROM audit_events WHERE action IN ('probe.ended', 'task.ended') "
    "AND detail LIKE 'done%' GROUP BY subject HAVING count(*) > 1) AS twice",
    "measurements of two probes": "(SELECT 1 FROM probes WHERE measurement_id IS NOT NULL "
    "GROUP BY measurement_id HAVING count(*) > 1) AS shared",
    "layouts probed without a measurement": "probes WHERE state = 'done' AND measurement_id IS NULL"
    " AND layout NOT LIKE '% kernels' AND layout NOT LIKE '% collectives'",
    "studies done without a plan": "tasks WHERE kind = 'study' AND state = 'done' AND id NOT IN "
    "(SELECT id FROM plans)",
    "layouts of no plan": "plan_layouts WHERE plan_id NOT IN (SELECT id FROM plans)",
}
# how much more the last third of the time may have than the middle one, beside an eighth
SLACK = {"MB": 30.0, "sockets": 5.0, "open files": 7.5, "files a job": 1.5, "rows a job": 1.5}


def read(address: str, hook: str, stop: Event, seen: Counter[str]) -> None:
    """Reads, prices and runs the sweep again and again; counts answers that are of no use."""
    sweep = None
    with httpx.Client(base_url=address, timeout=60.0) as client:
        for number in itertools.count():
            path, body = ("/plans", "/readyz", "/probes", "/estimate")[number % 4], None
            if number % 40 == 0:
                path = "/sweeps" if sweep is None else f"/sweeps/{sweep}/run"
                body = {**SWEEP, "webhook": hook} if sweep is None else None
            elif path == "/estimate":
                body = ESTIMATE
            posts = body is not None or path.endswith("/run")
            with suppress(httpx.TransportError):
                answer = client.request("POST" if posts else "GET", path, json=body)
                if path == "/sweeps" and answer.is_success:
                    sweep = answer.json()["id"]
                elif not answer.is_success and answer.status_code not in (409, 429, 503):
                    seen[f"{path}: {answer.status_code} {answer.text[:80]}"] += 1
            if stop.wait(0.5):
                return


def sample(running: kills.Processes, folder: Path, engine: Engine, jobs: int) -> dict[str, float]:
    """What is held now."""
    found: dict[str, float] = {}
    for name in LIVING:
        process = Path(f"/proc/{running.running[name].pid}")
        status = (process / "status").read_text()
        handles = []
        for one in (process / "fd").iterdir():
            with suppress(OSError):
                handles.append(os.readlink(one))
        sockets = sum(one.startswith("socket:") for one in handles)
        found[f"MB of {name}"] = int(status.partition("VmRSS:")[2].split()[0]) / 1000.0
        found |= {f"sockets of {name}": sockets, f"open files of {name}": len(handles) - sockets}
    files = sum(len(names) for _, _, names in os.walk(folder / "probes"))
    with engine.connect() as connection:
        tables = (f"SELECT count(*) FROM {table}" for table in Base.metadata.tables)
        rows = sum(connection.scalar(text(query)) or 0 for query in tables)
    return {**found, "files a job": files / jobs, "rows a job": rows / jobs}


def growth(samples: list[dict[str, float]]) -> dict[str, object]:
    """How each quantity went, and how many grew."""
    third, lines, grown = max(len(samples) // 3, 1), dict[str, object](), 0
    for name in samples[0]:
        parts = samples[third : 2 * third] or samples, samples[-third:]
        middle, last = (statistics.median(one[name] for one in part) for part in parts)
        slack = next(number for kind, number in SLACK.items() if name.startswith(kind))
        grown += last > 1.125 * middle + slack
        lines[name] = f"{middle:.1f} -> {last:.1f}"
    return {**lines, "quantities that grew!": grown}


def callers(
    processes: kills.Processes, hook: str, asked: kills.Asked, seen: Counter[str], stop: Event
) -> list[threading.Thread]:
    """Clients of both services: those of `kills`, and readers."""
    addresses = [f"http://127.0.0.1:{port}" for port in processes.ports.values()]
    clients = [
        threading.Thread(target=kills.ask, args=(addresses[index % 2], kind, index, asked, stop))
        for index, kind in enumerate(kills.CLIENTS)
    ]
    readers = [threading.Thread(target=read, args=(one, hook, stop, seen)) for one in addresses]
    return [*clients, *readers]


def disturb(
    processes: kills.Processes,
    faults: Mapping[str, Callable[[], object]],
    chance: random.Random,
    until: float,
    look: Callable[[], dict[str, float]],
) -> tuple[Counter[str], list[dict[str, float]]]:
    """Kills and faults until then, beside each other; how many of each, and what was seen."""
    came, samples = Counter[str](), []
    turns, fault = itertools.cycle(faults), threading.Thread()
    kill_at = fault_at = time.monotonic() + FAULT_SECONDS  # who starts needs the database
    while (now := time.monotonic()) < until:
        if now > kill_at:
            name, kill_at = chance.choice(KILLED), now + chance.uniform(*KILL_SECONDS)
            came["kills"] += processes.kill(name)
            processes.start(name)
        if now > fault_at and not fault.is_alive():
            kind, fault_at = next(turns), now + FAULT_SECONDS
            fault = threading.Thread(target=faults[kind])
            fault.start()
            came[kind] += 1
        time.sleep(SAMPLE_SECONDS)
        with suppress(SQLAlchemyError):  # the database is away
            samples.append(look())
    if fault.ident is not None:
        fault.join()
    return came, samples


def counts(engine: Engine) -> dict[str, object]:
    """What may not be, counted."""
    with engine.connect() as connection:
        return {
            f"{name}!": connection.scalar(text(f"SELECT count(*) FROM {what}"))
            for name, what in INVARIANTS.items()
        }


def soak(
    given: argparse.Namespace, url: str, away: Callable[[float], None], folder: Path
) -> dict[str, object]:
    """Load and faults on one database; what came of it."""
    clock, chance, stop = Clock(folder.parent), random.Random(given.seed), Event()
    asked, seen = kills.Asked(), Counter[str]()
    size = DISK_BYTES + round(given.minutes * DISK_BYTES_A_MINUTE)
    with socket.create_server(("127.0.0.1", 0)) as listener, small_disk(folder, size) as small:
        place = "{}:{}".format(*listener.getsockname())
        processes = kills.processes_on(url, folder, SERVICES)
        processes.environment |= {**clock.environment, "PLANNER_WEBHOOK_HOSTS": place}
        zygote.restart(clock.environment)
        if given.other is not None:
            processes.roots |= dict.fromkeys(("service 1", "worker 1"), given.other.resolve())
        threads = callers(processes, f"http://{place}", asked, seen, stop)
        threads += [threading.Thread(target=receive, args=(listener, stop))]
        faults = {
            "outages of the database": lambda: away(chance.uniform(*kills.AWAY_SECONDS)),
            "clocks put forward": lambda: clock.jump(JUMP_SECONDS),
            "full disks": lambda: fill(folder),
            "clocks put back": lambda: clock.jump(0),
        }
        if not small:
            del faults["full disks"]
        wiring, started = wire(Settings(database_url=url)), time.monotonic()

        def look() -> dict[str, float]:
            jobs = len(asked.plans) + len(asked.probes) + len(asked.studies)
            return sample(processes, folder, wiring.engine, max(jobs, 1))

        try:
            for name in (*LIVING, *KILLED):
                processes.start(name)
            for thread in threads:
                thread.daemon = True  # a client asks until it is answered
                thread.start()
            until = started + 60.0 * given.minutes
            came, samples = disturb(processes, faults, chance, until, look)
            clock.jump(0)
            stop.set()
            processes.start_ended(KILLED)
            for thread in threads:
                thread.join(kills.REST_SECONDS)
            given_up = kills.come_to_rest(wiring)
            died = sum(not processes.running[name].is_alive() for name in LIVING)
            return {
                "minutes": round((time.monotonic() - started) / 60.0, 1),
                **came,
                **kills.what_came(wiring, asked, folder / kills.COMPLETED),
                **counts(wiring.engine),
                "reads refused or failed!": seen.total(),
                **({"the first of these": next(iter(seen))} if seen else {}),
                "processes that should have lived on!": died,
                **growth(samples),
                **{f"given up: {kind}": number for kind, number in sorted(given_up.items())},
            }
        finally:
            stop.set()
            processes.stop()
            wiring.engine.dispose()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--other", type=Path, help="another version's checkout")
    return kills.on_each_database(parser, soak)


if __name__ == "__main__":
    sys.exit(main())
