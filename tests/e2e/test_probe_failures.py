"""Every class of failure provoked for real, under the real torchrun: its class, its rank, its first
cause; and nobody is left.
"""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from planner.probes import guardian
from planner.probes.launch import Launcher, LaunchSettings, Watch, free_port
from planner.probes.protocol import (
    Failed,
    FailureKind,
    MeasuredRun,
    Outcome,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
)
from tests.conftest import needed
from tests.e2e.probe_jobs import nobody_bears, node_tokens, working
from tests.e2e.test_probe_kills import command_of
from tests.stand_ins import worker
from tests.stand_ins.runners import JOB

needed("torch")
AT_ONCE = 3
LIMIT = 90.0


def run(
    folder: Path, notes: str, *, limit: float = LIMIT, watch: Watch | None = None, **settings: Any
) -> ProbeResult:
    launcher = Launcher(LaunchSettings(folder=folder, worker=worker.__file__, **settings))
    name = f"probe-{notes.replace(' ', '-') or 'ok'}"
    job = {**JOB, "notes": notes}
    asked = ProbeTask(id=name, job=job, device="cpu", time_limit_seconds=limit)
    result = launcher.run(asked, watch=watch)
    assert nobody_bears(node_tokens(folder, f"{name}*")), notes
    return result


def failed(outcome: Outcome) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


# notes for the stand-in -> (class, rank, words of the message)
FAILURES = {
    "die": (FailureKind.KILLED, 1, "signal 9 (SIGKILL)"),
    "victims": (FailureKind.CRASH, 1, "KeyError: 'rope'"),
    "nan": (FailureKind.NON_FINITE_LOSS, None, "the loss of step 3 is nan"),
    "quiet-nan": (FailureKind.NON_FINITE_LOSS, 0, "the loss of step 0 is nan"),
    "missing": (FailureKind.IMPORT, None, "No module named 'a_package_that_nobody_has'"),
    "refuse": (FailureKind.INVALID_LAYOUT, None, "does not divide 8 heads; use 2 or 4"),
    "leave 7": (FailureKind.CRASH, None, "7"),
    "hang 3": (FailureKind.HANG, 1, "rank 0 waited in vain"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All of them, a few at a time: most of each is torchrun's own import of torch."""
    folder = tmp_path_factory.mktemp("failures")
    asked = [*FAILURES, "oom", "allocate 1000000000000000", "late 3"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda notes: run(folder, notes).outcome, asked)
        return dict(zip(asked, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("notes", FAILURES)
def test_class_rank_and_first_cause(outcomes: dict[str, Outcome], notes: str) -> None:
    kind, rank, words = FAILURES[notes]
    outcome = failed(outcomes[notes])
    assert outcome.kind == kind, outcome
    assert rank is None or outcome.rank == rank, outcome
    assert words in outcome.message


@pytest.mark.slow
def test_a_hang_names_the_missing_rank_and_where_it_was(outcomes: dict[str, Outcome]) -> None:
    outcome = failed(outcomes["hang 3"])
    assert "rank 1 was in hang (worker.py:" in outcome.message
    assert "time.sleep" in str(outcome.traceback) or "in hang" in str(outcome.traceback)


@pytest.mark.slow
def test_out_of_memory_of_a_gpu_and_of_a_host(outcomes: dict[str, Outcome]) -> None:
    gpu, host = outcomes["oom"], outcomes["allocate 1000000000000000"]
    assert isinstance(gpu, OutOfMemory)
    assert isinstance(host, OutOfMemory)
    assert (gpu.rank, gpu.attempted_bytes, gpu.allocated_bytes) == (1, 2**31, round(70.5 * 2**30))
    assert (host.rank, host.attempted_bytes) == (1, 4 * 10**15)


@pytest.mark.slow
def test_a_crash_after_the_result_does_not_take_it_back(outcomes: dict[str, Outcome]) -> None:
    assert isinstance(outcomes["late 3"], MeasuredRun)


@pytest.mark.slow
def test_the_time_limit_holds_and_says_where_each_rank_was(tmp_path: Path) -> None:
    """Long enough for both ranks to start on a busy machine, which also ends them late."""
    result = run(tmp_path, "sleep 600", limit=40.0)
    outcome = failed(result.outcome)
    assert outcome.kind == FailureKind.TIMEOUT
    for rank in (0, 1):
        assert f"rank {rank} was in sleep (worker.py:" in outcome.message
    assert 40.0 <= result.wall_seconds < 300.0


def test_a_stop_ends_it(tmp_path: Path) -> None:
    stop = threading.Event()
    watch = Watch(stop=stop, progress=lambda message: stop.set() if "step 1" in message else None)
    outcome = failed(run(tmp_path, "sleep 600", watch=watch).outcome)
    assert (outcome.kind, outcome.message) == (FailureKind.INTERRUPTED, "stopped on request")


@pytest.mark.slow
def test_a_clash_of_ports_is_tried_again(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        clash = taken.getsockname()[1]
        ports = [clash]

        def port() -> int:
            return int(ports.pop()) if ports else free_port()

        assert isinstance(run(tmp_path, "", port=port).outcome, MeasuredRun)
        assert ports == []
        outcome = failed(run(tmp_path, "", port=lambda: clash, port_tries=1).outcome)
    assert (outcome.kind, "EADDRINUSE" in outcome.message) == (FailureKind.PORT, True)


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    outcome = failed(run(tmp_path, "", python="/nowhere/python").outcome)
    assert (outcome.kind, "/nowhere/python" in outcome.message) == (FailureKind.IMPORT, True)


@pytest.mark.slow
def test_a_killed_guardian_is_told(tmp_path: Path) -> None:
    def kill(folder: Path) -> None:
        working(folder.parent)
        for pid in guardian.descendants(os.getpid()):
            command = command_of(pid)
            if "guardian.py" in command and str(tmp_path) in command:
                os.kill(pid, signal.SIGKILL)

    def begin(folder: Path) -> None:
        threading.Thread(target=kill, args=(folder,), daemon=True).start()

    outcome = failed(run(tmp_path, "scatter 600", watch=Watch(folder=begin)).outcome)
    assert outcome.kind == FailureKind.INTERRUPTED
    assert "watched over it was killed" in outcome.message
