"""Probes through a real Slurm of two nodes on this machine, started for the test."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError
from planner.probes import guardian
from planner.probes.launch import LaunchSettings, Watch
from planner.probes.outcome import Begin
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_node import master_port, node_token
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, ProbeResult, ProbeTask
from tests.conftest import Cli
from tests.slurm_cluster import PATH
from tests.stand_ins import light_python, worker
from tests.stand_ins.runners import JOB

LIMIT_SECONDS = 180.0  # for what has to happen, on however busy a machine
TWO_NODES = {
    **JOB,
    "cluster": {"gpu": "cpu", "num_gpus": 4, "gpus_per_node": 2},
    "layout": {"dp_shard": 4, "ac": "none"},
}


@pytest.fixture
def pool(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmPool:
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    monkeypatch.setenv("PATH", PATH)
    python = str(light_python.install(tmp_path))
    launch = LaunchSettings(folder=tmp_path / "probes", worker=worker.__file__, python=python)
    return SlurmPool(launch, partition="debug")


def run(
    pool: SlurmPool, notes: str, *, limit: float = 600.0, watch: Watch | None = None, **job: Any
) -> ProbeResult:
    name = f"probe-{notes.replace(' ', '-') or 'ok'}"
    task = ProbeTask(
        id=name, job={**TWO_NODES, "notes": notes, **job}, device="cpu", time_limit_seconds=limit
    )
    result = pool.run(task, watch)
    for begin in pool.settings.folder.glob(f"{name}*/begin.json"):
        _quiet(Begin.read(begin).token)
    return result


def _quiet(token: str) -> None:
    """Slurm's daemons are not ours to wait for: the nodes' guardians end a moment after srun."""
    deadline = time.monotonic() + LIMIT_SECONDS
    tokens = [token, node_token(token, 0), node_token(token, 1)]
    while any(guardian.bearers(one) for one in tokens) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [guardian.bearers(one) for one in tokens] == [set(), set(), set()]


def _wait_until_it_runs(slurm: Path) -> None:
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(slurm)}
    command = ["squeue", "--noheader", "--states", "RUNNING"]
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if subprocess.run(command, env=environment, capture_output=True, check=True).stdout:
            return
        time.sleep(0.1)
    pytest.fail("the other job does not start")


def assert_no_job_is_left(slurm: Path) -> None:
    """Slurm takes a moment to see that a step has ended."""
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(slurm)}
    deadline = time.monotonic() + LIMIT_SECONDS
    jobs = "?"
    while jobs and time.monotonic() < deadline:
        jobs = subprocess.run(
            ["squeue", "-h"], env=environment, capture_output=True, text=True, check=True
        ).stdout
        time.sleep(0.2)
    assert jobs == ""


def test_a_gang_over_two_nodes_measures_under_the_real_torchrun(
    pool: SlurmPool, slurm: Path
) -> None:
    pool.settings = replace(pool.settings, python=sys.executable)
    result = run(pool, "")
    assert isinstance(result.outcome, MeasuredRun), result
    assert (result.outcome.step_seconds, result.gpu_seconds) == (
        worker.STEP_SECONDS,
        pytest.approx(4 * result.wall_seconds),
    )
    assert result.hosts == ["n1", "n2"]
    (folder,) = pool.settings.folder.glob("probe-*")
    assert {path.name for path in folder.glob("end.node*.json")} == {
        "end.node0.json",
        "end.node1.json",
    }
    assert_no_job_is_left(slurm)


@pytest.mark.slow
def test_a_killed_rank_is_told_by_its_node(pool: SlurmPool) -> None:
    outcome = run(pool, "die").outcome
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.rank) == (FailureKind.KILLED, 1)


@pytest.mark.slow
def test_the_first_cause_among_all_nodes(pool: SlurmPool) -> None:
    outcome = run(pool, "victims").outcome
    assert isinstance(outcome, Failed)
    assert (outcome.rank, outcome.message) == (1, "KeyError: 'rope'")


@pytest.mark.slow
def test_the_time_limit_is_to_the_second_not_to_slurms_minute(pool: SlurmPool, slurm: Path) -> None:
    """Long enough for both ranks to start on a busy machine, which also ends them late."""
    result = run(pool, "sleep 600", limit=40.0)
    assert isinstance(result.outcome, Failed)
    assert result.outcome.kind == FailureKind.TIMEOUT
    assert 40.0 <= result.wall_seconds < 150.0  # Slurm itself would end it after three minutes
    assert "rank 0 was in sleep (worker.py:" in result.outcome.message
    assert_no_job_is_left(slurm)


@pytest.mark.slow
def test_a_queue_without_end_is_left(pool: SlurmPool, slurm: Path) -> None:
    hog = subprocess.Popen(
        ["srun", "--nodes", "2", "--exclusive", "--input=none", "sleep", "600"],
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_until_it_runs(slurm)
        pool.options = SlurmOptions(queue_seconds=3.0)
        with pytest.raises(ProbeError, match=r"no nodes for it within .*squeue"):
            run(pool, "", limit=0.5)
    finally:
        hog.terminate()
        hog.wait(120)
    assert_no_job_is_left(slurm)


def test_a_stop_cancels_the_job(pool: SlurmPool, slurm: Path) -> None:
    stop = threading.Event()

    def stop_when_it_runs(message: str) -> None:
        if "step 1" in message:
            stop.set()

    watch = Watch(stop=stop, progress=stop_when_it_runs)
    outcome = run(pool, "scatter 600", watch=watch).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == FailureKind.INTERRUPTED
    assert_no_job_is_left(slurm)


def test_what_slurm_refuses_is_an_error_in_its_words(pool: SlurmPool) -> None:
    wide = {
        **TWO_NODES,
        "cluster": {"gpu": "cpu", "num_gpus": 6, "gpus_per_node": 2},
        "layout": {"dp_shard": 6},
    }
    wide["training"] = {"seq_len": 64, "global_batch_size": 6}
    with pytest.raises(ProbeError, match=r"Slurm: .*(?:[Nn]ode|configuration)"):
        run(pool, "", **{key: wide[key] for key in ("cluster", "layout", "training")})
    pool.partition = "nowhere"
    with pytest.raises(ProbeError, match=r"Slurm: .*partition"):
        run(pool, "")


@pytest.mark.slow
def test_planner_cli_probe_through_slurm(slurm: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        json.dumps({key: value for key, value in TWO_NODES.items() if key != "notes"})
    )
    environment = {
        "SLURM_CONF": str(slurm),
        "PATH": PATH,
        "PLANNER_PROBE_FOLDER": str(tmp_path / "probes"),
        "PLANNER_PROBE_PROGRAM": worker.__file__,
        "PLANNER_PROBE_PYTHON": str(light_python.install(tmp_path)),
    }
    done = cli(
        "probe", "--job", tmp_path / "job.json", "--pool", "slurm:debug", "--json", env=environment
    )
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["probes"]
    assert (one["state"], one["measurement"]["measured"]["step_seconds"]) == (
        "done",
        worker.STEP_SECONDS,
    )


def test_without_slurm_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeError, match="sbatch is not installed here; use --pool local"):
        SlurmPool(LaunchSettings(folder=tmp_path)).run(
            ProbeTask(id="x", job=TWO_NODES, device="cpu")
        )


def test_ports_differ_by_job_and_attempt_and_stay_out_of_the_clients_range() -> None:
    ports = {master_port(job, attempt) for job in range(100) for attempt in range(3)}
    assert len(ports) == 300
    assert all(20_000 <= master_port(job, 2) < 32_000 for job in (1, 10**6, 2**31))
