"""A sweep of real gloo probes on two nodes, whose node and worker are killed in the middle."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.settings import Settings
from planner.api.storage.job_records import ProbeRecord
from planner.api.storage.tasks import gpu_seconds_of
from planner.api.wiring import wire
from tests.conftest import ROOT, clean_environment, needed
from tests.e2e.probe_jobs import TINY, nobody_bears, node_tokens
from tests.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slow
LAYOUTS = [
    {"dp_shard": 2, "ac": "none"},
    {"dp_shard": 2, "ac": "full"},
    {"dp_replicate": 2, "dp_shard": 1, "ac": "none"},
    {"dp_shard": 1, "tp": 2, "ac": "none"},
]
SWEEP: dict[str, Any] = {
    "name": "nightly", "models": [TINY],
    "clusters": [{"gpu": "cpu", "num_gpus": 2, "gpus_per_node": 1}],
    "trainings": [{"seq_len": 64, "global_batch_size": 8}],
    "measure": {"top_k": 0, "anchors": LAYOUTS},
    "steps": 40, "pool": "slurm:debug", "retries": 1, "time_limit_seconds": 240,
}  # fmt: skip


@pytest.fixture
def environment(cluster: SlurmCluster, tmp_path: Path, sqlite_url: str) -> dict[str, str]:
    needed("torch")
    return {
        **clean_environment(), "PATH": cluster.environment["PATH"], "SLURM_CONF": str(cluster.conf),
        "PLANNER_DATABASE_URL": sqlite_url, "PLANNER_PROBE_FOLDER": str(tmp_path / "probes"),
        "PLANNER_LEASE_FOLDER": str(tmp_path / "leases"),
    }  # fmt: skip


@contextmanager
def a_worker(environment: dict[str, str], *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`planner-cli worker` in a process of its own, killed at the end if it still runs."""
    command = [sys.executable, "-m", "planner.api.cli", "worker", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as worker:
        try:
            yield worker
        finally:
            worker.kill()


@pytest.mark.parametrize("held", [False, True], ids=["job each", "one job"])
def test_every_probe_is_accounted_for(
    cluster: SlurmCluster, environment: dict[str, str], sqlite_url: str, tmp_path: Path, held: bool
) -> None:
    """held: probes run one after the other in one allocation."""
    if held:
        environment["PLANNER_SLURM_GPUS_AT_ONCE"] = "2"
    probes = tmp_path / "probes"
    wiring = wire(Settings(database_url=sqlite_url, probe_folder=probes))
    run = run_now(wiring, add_sweep(wiring, SWEEP, allow_files=False), ours=False)

    def in_state(state: str) -> list[ProbeRecord]:
        return [one for one in wiring.probes.list().items if one.state == state]

    with a_worker(environment) as worker:
        cluster.wait_for(lambda: in_state("done"), "the first probe is done")
        cluster.wait_for(
            lambda: any(_has_begun(probes / one.id) for one in in_state("running")), "a probe runs"
        )
        cluster.kill("n2")
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(60)
    cluster.start("n2")
    with a_worker(environment, "--once") as worker:
        assert worker.wait(900) == 0
    ended = wiring.tasks.get(run.id)
    report = ended.result
    assert ended.state == "done", ended.message
    assert report is not None
    lines = report["jobs"][0]["layouts"]
    # once each: measured, or failed with its cause
    assert len(lines) == len({line["layout"] for line in lines}) == len(LAYOUTS)
    assert all(line["status"] == "ok" or line["failure"] for line in lines), lines
    records = list(wiring.probes.list().items)
    assert {one.state for one in records} <= {"done", "failed"}
    assert all(one.state == "done" or one.failure for one in records)
    measured = [one.layout for one in records if one.state == "done"]
    assert len(measured) == len(set(measured))
    spent = sum(gpu_seconds_of(one) for one in records)
    assert report["gpu_seconds"] == pytest.approx(spent, abs=0.2)
    each = [one["gpu_seconds"] for record in records for one in record.results]
    assert sum(each) == pytest.approx(spent)
    tokens = node_tokens(probes)
    assert tokens
    cluster.wait_for(lambda: nobody_bears(tokens), "no process of a probe is left")
    cluster.wait_for(lambda: not cluster.jobs(), "no job is left")


def _has_begun(folder: Path) -> bool:
    """Whether both nodes have started this probe, and it has not ended."""
    begun = list(folder.glob("guardian.node*.json"))
    return len(begun) == 2 and not list(folder.glob("end*.json"))
