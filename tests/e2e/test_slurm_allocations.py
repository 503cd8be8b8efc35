"""One allocation for many probes, and GPUs, on a real Slurm with fake GPUs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from planner.errors import ProbeError
from planner.intake.jobs import read_job
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, ProbeResult, ProbeTask
from tests.e2e.test_slurm import stopped
from tests.slurm_cluster import TWO_NODES, SlurmCluster

pytestmark = pytest.mark.slow
ON_GPUS: dict[str, Any] = {
    **TWO_NODES,
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 4, "gpus_per_node": 2},
}


def task(name: str, notes: str = "", limit: float = 60.0, **job: Any) -> ProbeTask:
    whole = {**TWO_NODES, "notes": notes, **job}
    return ProbeTask(id=f"probe-{name}", job=whole, device="cpu", time_limit_seconds=limit)


def last_job(cluster: SlurmCluster) -> int:
    """The id of the newest job, ended or not; jobs are numbered from 1."""
    told = cluster.ask("squeue", "--noheader", "--states=all", "--format=%A")
    return max(map(int, told.split()), default=0)


CLUSTER = read_job(TWO_NODES).cluster
Hold = Callable[[], AbstractContextManager[Any]]


def measured(result: ProbeResult) -> None:
    assert isinstance(result.outcome, MeasuredRun), result


@pytest.fixture
def hold(pool: SlurmPool) -> Hold:
    """An allocation of both nodes for a quarter of an hour."""
    return lambda: pool.hold("night", CLUSTER, num_devices=4, seconds=900.0)


def test_probes_in_one_allocation_wait_once(
    pool: SlurmPool, cluster: SlurmCluster, hold: Hold
) -> None:
    before = last_job(cluster)
    with hold() as held:
        first = held.run(task("a"))
        late = held.run(task("b", "sleep 600", limit=15.0))
        killed = held.run(task("c", "die")).outcome
        small = {"cluster": {**TWO_NODES["cluster"], "num_gpus": 2}, "layout": {"dp_shard": 2}}
        last = held.run(task("d", **small))
        # the notes say why a probe ran again, if one did
        assert last_job(cluster) == before + 1, [one.notes for one in (first, late, last)]
        told = cluster.ask("scontrol", "show", "job", str(before + 1))
        assert "JobName=planner-night" in told
    measured(first)
    measured(last)
    assert isinstance(late.outcome, Failed)
    assert late.outcome.kind == FailureKind.TIMEOUT
    assert 15.0 <= late.wall_seconds < 120.0  # Slurm itself would end it after 15 minutes
    assert "rank 0 was in sleep (worker.py:" in late.outcome.message
    assert isinstance(killed, Failed)
    assert (killed.kind, killed.rank) == (FailureKind.KILLED, 1)
    # each probe is charged for itself, not for the allocation
    assert first.gpu_seconds == pytest.approx(4 * first.wall_seconds)
    assert last.gpu_seconds == pytest.approx(2 * last.wall_seconds)
    cluster.wait_for(lambda: not cluster.jobs(), "the allocation has ended with the last probe")
    assert not list((pool.settings.folder / "allocations").iterdir())


def test_an_allocation_that_ends_is_followed_by_another(cluster: SlurmCluster, hold: Hold) -> None:
    before = last_job(cluster)
    with hold() as held:
        measured(held.run(task("a")))
        cluster.ask("scancel", str(before + 1))
        cluster.wait_for(lambda: not cluster.jobs(), "the allocation has ended")
        measured(held.run(task("b")))
        # what the rest of its time does not cover gets a new one as well
        measured(held.run(task("c", limit=900.0)))
    assert last_job(cluster) == before + 3


def test_a_stopped_probe_leaves_its_nodes_to_the_next(cluster: SlurmCluster, hold: Hold) -> None:
    before = last_job(cluster)
    with hold() as held:
        stopped(lambda watch: held.run(task("a", "scatter 600"), watch))
        measured(held.run(task("b")))
    assert last_job(cluster) == before + 1


@pytest.mark.parametrize("gpus_by", ["gpus-per-node", "gres"])
def test_gpus_are_asked_for_on_every_node(pool: SlurmPool, gpus_by: Any) -> None:
    pool.options = SlurmOptions(gpus_by=gpus_by)
    whole = {**ON_GPUS, "notes": "devices"}
    measured(pool.run(ProbeTask(id="probe-g", job=whole, device="cuda", time_limit_seconds=60.0)))
    (folder,) = pool.settings.folder.glob("probe-*")
    seen = [path.read_text() for path in sorted(folder.glob("output.node*.log"))]
    assert ["devices 0,1" in text for text in seen] == [True, True]


def test_gpus_that_no_node_has_are_refused(pool: SlurmPool) -> None:
    wide = {**ON_GPUS, "cluster": {**ON_GPUS["cluster"], "num_gpus": 8, "gpus_per_node": 4}}
    wide |= {"layout": {"dp_shard": 8}, "training": {"seq_len": 64, "global_batch_size": 8}}
    with pytest.raises(ProbeError, match="Requested node configuration is not available"):
        pool.run(ProbeTask(id="probe-w", job=wide, device="cuda"))


@pytest.mark.parametrize(("options", "said"), [
    (SlurmOptions(constraint="h100"), "Invalid feature specification"),
    (SlurmOptions(exclude="n1"), "(?i)node (?:configuration|count)"),
    (SlurmOptions(container_image="image"), "has no --container-image"),
])  # fmt: skip
def test_options_reach_slurm(pool: SlurmPool, options: SlurmOptions, said: str) -> None:
    pool.options = options
    with pytest.raises(ProbeError, match=said):
        pool.run(task("a"))


def test_an_account_reaches_slurm(pool: SlurmPool, cluster: SlurmCluster) -> None:
    """Without slurmdbd Slurm takes any account, and knows no QOS."""
    pool.options = SlurmOptions(account="lab")
    measured(pool.run(task("a")))
    assert "Account=lab" in cluster.ask("scontrol", "show", "job", str(last_job(cluster)))
