"""Whoever is killed at whatever moment: no process is left, and what the database says is true."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from planner.api.jobs.leases import LEASE_SECONDS
from planner.api.jobs.probe_recovery import recover
from planner.api.storage.job_records import ProbeRecord
from planner.api.wiring import Wiring
from planner.probes import guardian
from planner.probes.outcome import Begin
from planner.probes.protocol import ProbeTask
from tests.conftest import ROOT, clean_environment, needed
from tests.e2e.probe_jobs import until
from tests.stand_ins import worker
from tests.stand_ins.ageing import age
from tests.stand_ins.runners import JOB, light_wiring

KILLS, SEED, AT_ONCE = 50, 20261121, 4
REAL_TORCHRUN_EVERY = 10

LAUNCHERS = r"torchrun\.py|torch\.distributed\.run"
VICTIMS = ("runner", "launcher", "worker", "guardian")


@dataclass(frozen=True)
class Kill:
    """after_seconds: from when the victim was first seen."""

    number: int
    victim: str
    after_seconds: float
    light: bool

    def folder(self, parent: Path) -> Path:
        return parent / f"probes-{self.number}"


def kills() -> Iterator[Kill]:
    chance = random.Random(SEED)
    for number in range(KILLS):
        light, victim = number % REAL_TORCHRUN_EVERY != 0, VICTIMS[number % len(VICTIMS)]
        most = (1.1 if light else 4.0) if victim == "runner" else 0.4
        yield Kill(number, victim, chance.uniform(0.0, most), light)


def wiring(folder: Path, kill: Kill) -> Wiring:
    return light_wiring(folder, kill.folder(folder), light=kill.light)


class Runners:
    """Starts runners by forking one process that has everything loaded and no threads
    (`tests.stand_ins.runners`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.stand_ins.runners", str(folder)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=clean_environment(),
        )  # fmt: skip

    def start(self, kill: Kill) -> tuple[int, str]:
        """(pid of the runner, id of its probe)."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        asked = {"folder": str(kill.folder(self.folder)), "light": kill.light}
        with self._lock:
            stdin.write(f"{json.dumps(asked)}\n")
            stdin.flush()
            pid, probe_id = stdout.readline().split()
        return int(pid), probe_id


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def find(victim: str, runner_pid: int, token: str | None) -> int | None:
    """The process to kill, if it is there now."""
    if victim == "runner":
        return runner_pid
    if victim == "guardian":
        below = guardian.descendants(runner_pid)
        return next((pid for pid in below if "guardian.py" in command_of(pid)), None)
    commands = {pid: command_of(pid) for pid in (guardian.bearers(token) if token else ())}
    launchers = {pid for pid, command in commands.items() if re.search(LAUNCHERS, command)}
    ranks = {pid for pid, command in commands.items() if "planner.probes.inside" in command}
    # the lowest, for a child has its parent's command line until it becomes another program
    return min(launchers if victim == "launcher" else ranks - launchers, default=None)


def token_of(folder: Path, kill: Kill) -> str | None:
    try:
        return Begin.read(next(kill.folder(folder).glob("*/begin.json"))).token
    except (StopIteration, OSError, ValueError):
        return None


def is_there(pid: int) -> bool:
    return any(pid == found for found, _ in guardian.processes())


def one(runners: Runners, folder: Path, kill: Kill) -> tuple[Kill, str, bool]:
    """Runs a probe, kills, waits for quiet; (kill, id of the probe, whether anybody was hit)."""
    pid, probe_id = runners.start(kill)

    def victim() -> int | None:
        return find(kill.victim, pid, token_of(folder, kill))

    until(lambda: victim() is not None or not is_there(pid), (kill, "the victim never came"))
    time.sleep(kill.after_seconds)
    hit = victim() if is_there(pid) else None
    if hit is not None:
        try:
            os.kill(hit, signal.SIGKILL)
        except ProcessLookupError:
            hit = None
    until(lambda: not is_there(pid), (kill, "the runner goes on"))
    token = token_of(folder, kill)
    until(lambda: token is None or not guardian.bearers(token), (kill, "somebody is left"))
    return kill, probe_id, hit is not None


def check(kill: Kill, record: ProbeRecord, hit: bool, folder: Path) -> None:
    """Done only where a worker wrote its result; else the class of what was done to it."""
    says = (kill, record.state, record.failure, record.message)
    assert record.state in ("done", "failed"), says
    if record.state == "done":
        measurement = wiring(folder, kill).measurements.get(str(record.measurement_id))
        assert measurement.measured.step_seconds == worker.STEP_SECONDS, says
        return
    assert hit, says
    interrupted = kill.victim in ("runner", "guardian")
    assert record.failure == ("interrupted" if interrupted else "killed"), says
    assert kill.victim != "worker" or "was ended by signal 9" in str(record.message), says


@pytest.mark.slow
def test_fifty_random_kills_leave_nothing_and_a_true_record(tmp_path: Path) -> None:
    needed("torch")
    outside = wiring(tmp_path, Kill(0, "", 0.0, True))
    _ = outside.store  # made once, before everybody asks for it
    runners = Runners(tmp_path)
    with runners.process, ThreadPoolExecutor(AT_ONCE) as workers:
        ended = list(workers.map(lambda kill: one(runners, tmp_path, kill), kills()))
    age(outside.engine, 2 * LEASE_SECONDS)
    recover(outside)
    failed = []
    for kill, probe_id, hit in ended:
        record = outside.probes.get(probe_id)
        check(kill, record, hit, tmp_path)
        failed += [kill.victim] if record.state == "failed" else []
    # the moments were spread so that each kind of kill really hit
    assert set(failed) == set(VICTIMS), failed
    assert len(failed) >= KILLS // 3


def test_the_stand_in_would_leave_processes_behind(tmp_path: Path) -> None:
    """That the test above can fail: without a guardian, what the worker starts outlives it."""
    token = "a-token-of-this-test"
    task = ProbeTask(id="x", job={**JOB, "notes": "scatter 0"}, device="cpu")
    files = [tmp_path / "task.json", tmp_path / "result.json"]
    files[0].write_text(task.model_dump_json())
    command = [sys.executable, worker.__file__, *map(str, files)]
    environment = {**os.environ, guardian.TOKEN: token}
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)
    try:
        assert len(guardian.bearers(token)) == 2
    finally:
        assert guardian.kill_all(token) == []
