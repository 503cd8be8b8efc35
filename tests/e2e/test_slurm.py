"""Probes through a real Slurm of two nodes on this machine, started for the test."""

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError
from probes import guardian
from probes.launch import LaunchSettings, Watch
from probes.outcome import Begin
from probes.pools.slurm import SlurmPool
from probes.pools.slurm_node import master_port, node_token
from probes.protocol import Failed, FailureKind, Measured, ProbeResult, ProbeTask
from tests.conftest import Cli, missing, needed
from tests.stand_ins import worker
from tests.stand_ins.runners import JOB

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "squeue", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
READY_SECONDS = 60.0
TWO_NODES = {
    **JOB,
    "cluster": {"gpu": "cpu", "num_gpus": 4, "gpus_per_node": 2},
    "layout": {"dp_shard": 4, "ac": "none"},
}

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
ReturnToService=2
KillWait=3
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=30 State=UP
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a running cluster."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        missing(", ".join(lacking), "apt-get install slurm-wlm")
    needed("torch")
    folder = tmp_path_factory.mktemp("slurm")
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, user=user, ports=free_ports(3)))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "--force",
        "--foreground",
        f"--socket={folder}/munge.socket",
        f"--key-file={key}",
        f"--pid-file={folder}/munge.pid",
    ]
    munge += [
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/munge.seed",
        "--num-threads=2",
    ]
    daemons = [
        ["munged", *munge],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    started = []
    try:
        for command in daemons:
            program = str(shutil.which(command[0], path=PATH))
            out = (folder / f"{len(started)}.out").open("w")
            started.append(
                subprocess.Popen([program, *command[1:]], env=environment, stdout=out, stderr=out)
            )
            out.close()
            time.sleep(0.5 if command[0] == "munged" else 0.0)
        _wait_for_nodes(environment, folder)
        yield folder / "slurm.conf"
    finally:
        subprocess.run(
            ["scancel", "--user", user],
            env=environment,
            capture_output=True,
            timeout=30,
            check=False,
        )
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def _wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    seen = ""
    while time.monotonic() < deadline:
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seen = asked.stdout + asked.stderr
        if seen.split() == ["n1", "idle", "n2", "idle"]:
            return
        time.sleep(0.5)
    logs = "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in folder.glob("*.log")
    )
    raise AssertionError(f"Slurm did not come up: {seen}\n{logs}")


@pytest.fixture
def pool(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmPool:
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    monkeypatch.setenv("PATH", PATH)
    return SlurmPool(
        LaunchSettings(folder=tmp_path / "probes", worker=worker.__file__), partition="debug"
    )


def run(
    pool: SlurmPool, notes: str, *, limit: float = 120.0, watch: Watch | None = None, **job: Any
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
    deadline = time.monotonic() + 15.0
    tokens = [token, node_token(token, 0), node_token(token, 1)]
    while any(guardian.bearers(one) for one in tokens) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [guardian.bearers(one) for one in tokens] == [set(), set(), set()]


def assert_no_job_is_left(slurm: Path) -> None:
    """Slurm takes a moment to see that a step has ended."""
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(slurm)}
    deadline = time.monotonic() + 15.0
    jobs = "?"
    while jobs and time.monotonic() < deadline:
        jobs = subprocess.run(
            ["squeue", "-h"], env=environment, capture_output=True, text=True, check=True
        ).stdout
        time.sleep(0.2)
    assert jobs == ""


def test_a_gang_over_two_nodes_measures(pool: SlurmPool, slurm: Path) -> None:
    result = run(pool, "")
    assert isinstance(result.outcome, Measured), result
    assert (result.outcome.step_seconds, result.gpu_seconds) == (
        worker.STEP_SECONDS,
        pytest.approx(4 * result.wall_seconds),
    )
    (folder,) = pool.settings.folder.iterdir()
    assert {path.name for path in folder.glob("end.node*.json")} == {
        "end.node0.json",
        "end.node1.json",
    }
    assert_no_job_is_left(slurm)


def test_a_killed_rank_is_told_by_its_node(pool: SlurmPool) -> None:
    outcome = run(pool, "die").outcome
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.rank) == (FailureKind.KILLED, 1)


def test_the_first_cause_among_all_nodes(pool: SlurmPool) -> None:
    outcome = run(pool, "victims").outcome
    assert isinstance(outcome, Failed)
    assert (outcome.rank, outcome.message) == (1, "KeyError: 'rope'")


def test_the_time_limit_is_to_the_second_not_to_slurms_minute(pool: SlurmPool, slurm: Path) -> None:
    result = run(pool, "sleep 600", limit=20.0)
    assert isinstance(result.outcome, Failed)
    assert (result.outcome.kind, 20.0 <= result.wall_seconds < 23.0) == (FailureKind.TIMEOUT, True)
    assert "rank 0 was in sleep (worker.py:" in result.outcome.message
    assert_no_job_is_left(slurm)


def test_a_queue_without_end_is_left(pool: SlurmPool, slurm: Path) -> None:
    hog = subprocess.Popen(
        ["srun", "--nodes", "2", "--exclusive", "--input=none", "sleep", "120"],
        stdin=subprocess.DEVNULL,
    )
    try:
        time.sleep(2.0)
        pool.queue_seconds = -115.0  # with the probe's own limit and the slack for Slurm: 5 s
        with pytest.raises(ProbeError, match=r"no nodes for it within .*squeue"):
            run(pool, "", limit=0.5)
    finally:
        hog.terminate()
        hog.wait(30)
    assert_no_job_is_left(slurm)


def test_a_stop_cancels_the_job(pool: SlurmPool, slurm: Path) -> None:
    watch = Watch()
    threading.Timer(8.0, watch.stop.set).start()
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


def test_planner_cli_probe_through_slurm(slurm: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        json.dumps({key: value for key, value in TWO_NODES.items() if key != "notes"})
    )
    environment = {
        "SLURM_CONF": str(slurm),
        "PATH": PATH,
        "PLANNER_PROBE_FOLDER": str(tmp_path / "probes"),
        "PLANNER_PROBE_PROGRAM": worker.__file__,
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
    with pytest.raises(ProbeError, match="srun is not installed here; use --pool local"):
        SlurmPool(LaunchSettings(folder=tmp_path)).run(
            ProbeTask(id="x", job=TWO_NODES, device="cpu")
        )


def test_ports_differ_by_job_and_attempt_and_stay_out_of_the_clients_range() -> None:
    ports = {master_port(job, attempt) for job in range(100) for attempt in range(3)}
    assert len(ports) == 300
    assert all(20_000 <= master_port(job, 2) < 32_000 for job in (1, 10**6, 2**31))
