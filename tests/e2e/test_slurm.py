"""Probes through a real Slurm of two nodes on this machine, started for the test."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError
from planner.probes.launch import Watch
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_node import master_port
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, ProbeResult, ProbeTask
from tests.conftest import Cli
from tests.e2e.probe_jobs import nobody_bears, node_tokens
from tests.slurm_cluster import TWO_NODES, SlurmCluster
from tests.stand_ins import worker


def run(
    pool: SlurmPool, cluster: SlurmCluster, notes: str, /, *, limit: float = 600.0,
    watch: Watch | None = None, **job: Any,
) -> ProbeResult:  # fmt: skip
    """The result of a probe of which neither a process nor a job is left."""
    name = f"probe-{notes.replace(' ', '-') or 'ok'}"
    task = ProbeTask(
        id=name, job={**TWO_NODES, "notes": notes, **job}, device="cpu", time_limit_seconds=limit
    )
    result = pool.run(task, watch)
    # Slurm's daemons are not ours to wait for: guardians end a moment after srun
    tokens = node_tokens(pool.settings.folder, f"{name}*")
    cluster.wait_for(lambda: nobody_bears(tokens), "no process is left")
    cluster.wait_for(lambda: not cluster.jobs(), "no job is left")
    return result


def stopped(run_it: Callable[[Watch], ProbeResult]) -> None:
    """A probe that is stopped as soon as it is at work says that it was interrupted."""
    stop = threading.Event()
    watch = Watch(stop=stop, progress=lambda message: stop.set() if "step 1" in message else None)
    outcome = run_it(watch).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == FailureKind.INTERRUPTED


def test_two_nodes_measure_under_the_real_torchrun(pool: SlurmPool, cluster: SlurmCluster) -> None:
    pool.settings, pool.partition = replace(pool.settings, python=sys.executable), "debug"
    result = run(pool, cluster, "")
    assert isinstance(result.outcome, MeasuredRun), result
    assert result.outcome.step_seconds == worker.STEP_SECONDS
    assert result.gpu_seconds == pytest.approx(4 * result.wall_seconds)
    assert result.hosts == ["n1", "n2"]
    (folder,) = pool.settings.folder.glob("probe-*")
    ends = sorted(path.name for path in folder.glob("end.node*.json"))
    assert ends == ["end.node0.json", "end.node1.json"]


@pytest.mark.slow
def test_a_queue_without_end_is_left(pool: SlurmPool, cluster: SlurmCluster) -> None:
    command = ["srun", "--nodes", "2", "--exclusive", "--input=none", "sleep", "600"]
    hog = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        running = ("squeue", "--noheader", "--states", "RUNNING")
        cluster.wait_for(lambda: cluster.ask(*running), "the other job runs")
        pool.options = SlurmOptions(queue_seconds=3.0)
        with pytest.raises(ProbeError, match=r"no nodes for it within .*squeue"):
            run(pool, cluster, "", limit=0.5)
    finally:
        hog.terminate()
        hog.wait(120)


def test_a_stop_cancels_the_job(pool: SlurmPool, cluster: SlurmCluster) -> None:
    stopped(lambda watch: run(pool, cluster, "scatter 600", watch=watch))


def test_what_slurm_refuses_is_told_in_its_words(pool: SlurmPool, cluster: SlurmCluster) -> None:
    wide = {
        "cluster": {"gpu": "cpu", "num_gpus": 6, "gpus_per_node": 2},
        "layout": {"dp_shard": 6},
        "training": {"seq_len": 64, "global_batch_size": 6},
    }
    with pytest.raises(ProbeError, match=r"Slurm: .*(?:[Nn]ode|configuration)"):
        run(pool, cluster, "", **wide)
    pool.partition = "nowhere"
    with pytest.raises(ProbeError, match=r"Slurm: .*partition"):
        run(pool, cluster, "")


@pytest.mark.slow
def test_planner_cli_probe_through_slurm(
    cluster: SlurmCluster, cli: Cli, surroundings: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**TWO_NODES, "notes": ""}))
    slurm = {"SLURM_CONF": str(cluster.conf), "PATH": cluster.environment["PATH"]}
    command = ("probe", "--job", path, "--pool", "slurm:debug", "--json")
    done = cli(*command, env={**surroundings, **slurm})
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["probes"]
    assert one["state"] == "done"
    assert one["measurement"]["measured"]["step_seconds"] == worker.STEP_SECONDS


def test_ports_differ_by_job_and_attempt_and_stay_out_of_the_clients_range() -> None:
    ports = {master_port(job, attempt) for job in range(100) for attempt in range(3)}
    assert len(ports) == 300
    assert all(20_000 <= master_port(job, 2) < 32_000 for job in (1, 10**6, 2**31))
