"""How fast sweeps schedule probes, and whether every one of them is accounted for.

    python -m benchmarks.sweep_scheduler [--layouts 10000] [--nodes 64] [--workers 2] [--kill]
        [--database sqlite|postgres|both] [--seed 1]

Workers, each a process, run one sweep each on simulated nodes (`benchmarks.simulated_pool`):
a probe takes no time there, so the seconds are the scheduler's own. Steps are recordings made from
the model's predictions; faults come at rates of real clusters, one node hangs and one is slow. With
--kill one of the workers gets SIGKILL in the middle, and another is started. Exits 1 where a probe
was lost, counted twice, or had no room in the pool.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks.simulated_pool import FULL, LEDGER, Faults, SimulatedCluster
from planner.api.jobs.probes import probes_of
from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.jobs.workers import TaskWorkers
from planner.api.settings import Settings
from planner.api.storage.job_records import OPEN, TaskRecord
from planner.api.storage.migrate import upgrade
from planner.api.storage.tables import ProbeRecord
from planner.api.storage.tasks import gpu_seconds_of
from planner.api.storage.transactions import reading
from planner.api.wiring import Wiring, wire
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.probes import pools
from planner.rules import violations
from tests.conftest import ROOT, clean_environment, running_postgres

MODEL, CLUSTER = "llama3.2-1b", {"gpu": "h100-sxm-80gb", "num_gpus": 8}
SPREAD = 0.03  # of a recorded step about the predicted one
LOOK_SECONDS = 0.2
MOST_SECONDS = 3600.0
# shares of probes; judgement, of the order of what operators of large clusters report
RATES: dict[str, Any] = {
    "oom": 0.02, "hang": 0.004, "crash": 0.004, "lost_node": 0.002, "preempted": 0.02,
    "bad_nodes": ("node07",), "slow_nodes": ("node11",),
}  # fmt: skip
CHOICES = ((1, 2, 4, 8), (1, 2, 4), ("none", "full", "selective-op"), (False, True))


def register_simulated() -> None:
    """Lets this process open simulated pools by name."""
    if "simulated" not in pools.BACKENDS:
        pools.register("simulated:FILE.json", "benchmarks.simulated_pool:SimulatedPool")


@cache
def layouts() -> list[dict[str, Any]]:
    """Layouts that are legal for every job of the sweeps."""
    job = _job(64)
    made = [
        {"dp_shard": 8 // tp, "tp": tp, "micro_batch_size": mbs, "ac": ac, "compile": compiled}
        for tp, mbs, ac, compiled in itertools.product(*CHOICES)
    ]
    jobs = [read_job({**job, "layout": layout}) for layout in made]
    return [
        layout
        for layout, one in zip(made, jobs, strict=True)
        if one.layout and not violations(one.layout, one.model, one.cluster, one.training)
    ]


def _job(global_batch_size: int) -> dict[str, Any]:
    training = {"seq_len": 2048, "global_batch_size": global_batch_size}
    return {"model": MODEL, "cluster": CLUSTER, "training": training}


@dataclass(kw_only=True)
class Bench:
    """Sweeps on one database, and the cluster that their workers share."""

    folder: Path
    url: str
    nodes: int
    seed: int
    probe_seconds: float = 0.0
    sweeps: list[str] = field(default_factory=list)

    @property
    def pool(self) -> str:
        return f"simulated:{self.folder / 'cluster.json'}"

    def wiring(self) -> Wiring:
        register_simulated()
        return wire(Settings(database_url=self.url))

    def set_up(self, num_layouts: int, num_sweeps: int) -> Wiring:
        """Recordings, the cluster, and as many sweeps, each with a queued run."""
        anchors = layouts()[: max(1, num_layouts // num_sweeps)][:50]
        num_jobs = max(num_sweeps, round(num_layouts / len(anchors)))
        jobs = [_job(64 * (number + 1)) for number in range(num_jobs)]
        self._record(jobs, anchors)
        cluster = SimulatedCluster(
            folder=self.folder / "nodes",
            recordings=self.folder / "recordings.jsonl",
            nodes=self.nodes,
            probe_seconds=self.probe_seconds,
            seed=self.seed,
            faults=Faults(**RATES),
        )
        (self.folder / "cluster.json").write_text(cluster.model_dump_json())
        wiring = self.wiring()
        upgrade(wiring.engine)
        for number in range(num_sweeps):
            sweep = add_sweep(
                wiring,
                {
                    "name": f"sweep {number}",
                    "jobs": jobs[number::num_sweeps],
                    "measure": {"top_k": 0, "anchors": anchors},
                    "budget": {"max_probes": 100_000, "max_gpu_seconds": 1e9},
                    "pool": self.pool,
                    "retries": 2,
                },
                allow_files=True,
            )
            self.sweeps.append(sweep.id)
            run_now(wiring, sweep, ours=False)
        return wiring

    def _record(self, jobs: list[dict[str, Any]], anchors: list[dict[str, Any]]) -> None:
        drawn = random.Random(self.seed)
        with open(self.folder / "recordings.jsonl", "w", encoding="utf-8") as out:
            for job in jobs:
                one = read_job(job)
                own = [read_job({**job, "layout": layout}).layout for layout in anchors]
                batch = LayoutBatch.from_layouts([layout for layout in own if layout])
                priced = Pricer.build(one.model, one.cluster, one.training).step_seconds(batch)
                for layout, seconds in zip(anchors, priced.tolist(), strict=True):
                    step = seconds * drawn.lognormvariate(0.0, SPREAD)
                    row = {**job, "layout": layout, "measured": {"step_seconds": step}}
                    out.write(json.dumps(row) + "\n")

    def start(self) -> "subprocess.Popen[bytes]":
        """A worker in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.sweep_scheduler", "--worker", self.url]
        return subprocess.Popen(command, cwd=ROOT, env=clean_environment())

    def run(self, wiring: Wiring, num_workers: int, *, kill: bool) -> float:
        """Seconds until every run has ended."""
        begun, killed = time.monotonic(), False
        workers = [self.start() for _ in range(num_workers)]
        total = len(self.sweeps) * self._layouts_each(wiring)
        try:
            while any(run.state in OPEN for run in self.runs(wiring)):
                assert time.monotonic() - begun < MOST_SECONDS, "the sweeps do not end"
                time.sleep(LOOK_SECONDS)
                if kill and not killed and self.ended(wiring) > total / 3:
                    workers[0].send_signal(signal.SIGKILL)
                    workers[0].wait()
                    workers[0], killed = self.start(), True
            return time.monotonic() - begun
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    worker.terminate()
                worker.wait()

    def _layouts_each(self, wiring: Wiring) -> int:
        spec = wiring.sweeps.get(self.sweeps[0]).spec
        return len(spec["jobs"]) * len(spec["measure"]["anchors"])

    def runs(self, wiring: Wiring) -> list[TaskRecord]:
        """The run of each sweep."""
        return [wiring.tasks.list(limit=1, parent_id=sweep).items[0] for sweep in self.sweeps]

    def ended(self, wiring: Wiring) -> int:
        """Probes that have ended so far."""
        query = select(func.count()).where(ProbeRecord.finished_at.is_not(None))
        with reading(wiring.engine) as session:
            return int(session.scalar(query) or 0)

    def wrong(self, wiring: Wiring) -> list[str]:
        """What was lost, counted twice or has no account; empty where all is well."""
        ledger = [
            line.split() for line in (self.folder / "nodes" / LEDGER).read_text().splitlines()
        ]
        begun = Counter(line[2] for line in ledger if line[1] == "begins")
        wrong = [f"{name} ran {times} times" for name, times in begun.items() if times > 1]
        if any(line[1] == FULL for line in ledger):
            wrong.append("a probe was started without room in the pool")
        known = set[str]()
        for run in self.runs(wiring):
            wrong += _wrong_in(wiring, run, known)
        wrong += [f"{name} ran and nobody knows it" for name in begun if name not in known]
        return wrong


def _wrong_in(wiring: Wiring, run: TaskRecord, known: set[str]) -> Iterator[str]:
    """What does not fit together in one run. known: gets the ids of its probes."""
    if run.state != "done" or run.result is None:
        yield f"{run.id} is {run.state}: {run.message}"
        return
    records = probes_of(wiring, run.id)
    known.update(record.id for record in records)
    report, spec = run.result, run.request
    yield from (f"{record.id} is {record.state}" for record in records if record.state in OPEN)
    counted = [record for record in records if record.failure != "interrupted"]
    lines = [line for job in report["jobs"] for line in job["layouts"]]
    wanted = len(spec["jobs"]) * len(spec["measure"]["anchors"])
    if len(lines) != wanted:
        yield f"{run.id} reports {len(lines)} of {wanted} layouts"
    yield from (
        f"{line['layout']} is skipped: {line['message']}"
        for line in lines
        if line["status"] == "skipped"
    )
    for what, one, other in (
        ("probes", report["probes"], len(counted)),
        ("attempts", sum(line["attempts"] for line in lines), len(counted)),
        ("GPU-seconds", report["gpu_seconds"], round(sum(map(gpu_seconds_of, records)), 1)),
        ("failures", sum(report["failures"].values()), sum(_is_bad(line) for line in lines)),
    ):
        if one != other:
            yield f"{run.id} reports {one} {what}, the database has {other}"
    measured = [record.measurement_id for record in records if record.measurement_id]
    if len(set(measured)) != len(measured):
        yield f"{run.id}: a measurement belongs to two probes"
    reported = [line["measurement_id"] for line in lines if line.get("measurement_id")]
    if len(set(reported)) != len(reported) or not set(reported) <= set(measured):
        yield f"{run.id}: a reported measurement is another layout's"


def _is_bad(line: dict[str, Any]) -> bool:
    return line["status"] in ("failed", "oom")


def work(url: str) -> None:
    """A worker: runs sweeps from this database until it is told to end."""
    register_simulated()
    workers = TaskWorkers(wire(Settings(database_url=url)), 1)
    workers.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)  # what runs was ended, or is taken over


@contextmanager
def databases(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a new database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'planner.db'}"
        return
    import psycopg

    servers = running_postgres()
    query, name = next(servers), f"sweeps_{uuid.uuid4().hex[:8]}"
    try:
        admin = f"postgresql://planner@/postgres?{query}"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        yield f"postgresql://planner@/{name}?{query}"
    finally:
        servers.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layouts", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--worker", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker)
        return 0
    bad = 0
    for kind in ("sqlite", "postgres") if given.database == "both" else (given.database,):
        with tempfile.TemporaryDirectory() as name, databases(kind, Path(name)) as url:
            bench = Bench(folder=Path(name), url=url, nodes=given.nodes, seed=given.seed)
            wiring = bench.set_up(given.layouts, given.workers)
            seconds = bench.run(wiring, given.workers, kill=given.kill)
            bad += report(kind, bench, wiring, seconds)
            wiring.engine.dispose()
    return int(bad > 0)


def report(kind: str, bench: Bench, wiring: Wiring, seconds: float) -> int:
    """Prints what came of it; returns how much is wrong."""
    reports = [run.result or {} for run in bench.runs(wiring)]
    statuses = Counter(
        line["status"] for one in reports for job in one["jobs"] for line in job["layouts"]
    )
    probes = bench.ended(wiring)
    wrong = bench.wrong(wiring)
    print(f"{kind}: {sum(statuses.values())} layouts on {bench.nodes} nodes, ", end="")
    print(", ".join(f"{number} {status}" for status, number in statuses.most_common()))
    print(f"  {probes} probes in {seconds:.1f} s: {probes / seconds:.0f} a second; ", end="")
    print(f"{sum(one['retried'] for one in reports)} ran again, ", end="")
    print(f"{max(one['most_at_once'] for one in reports)} at once")
    for host in wiring.quarantine.active():
        print(f"  {host.host} out: {host.evidence[0]}")
    print(f"  {len(wrong)} not accounted for", *wrong[:10], sep="\n    ")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
