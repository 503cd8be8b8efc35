"""Probes on a real Slurm whose nodes, jobs and controller fail under them."""

import multiprocessing
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from planner.errors import ProbeError
from planner.probes.launch import Watch
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.pools.slurm_wait import SlurmPace
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, ProbeResult, ProbeTask
from tests.e2e.probe_jobs import nobody_bears, node_tokens
from tests.e2e.test_slurm_allocations import last_job
from tests.slurm_cluster import TWO_NODES, SlurmCluster
from tests.stand_ins.runners import JOB

pytestmark = pytest.mark.slow


class Running:
    """A probe that runs in a thread, and is at work. lines: its progress."""

    def __init__(
        self, pool: SlurmPool, cluster: SlurmCluster, notes: str, limit: float = 300.0
    ) -> None:
        self.cluster, self.lines = cluster, list[str]()
        watch = Watch(progress=self.lines.append)
        self._result = ThreadPoolExecutor(1).submit(pool.run, task(notes, limit), watch)
        self.says("step 1" if "slurmctld" in cluster.daemons else "controller")

    def says(self, words: str) -> None:
        self.cluster.wait_for(lambda: any(words in line for line in self.lines), words)

    def measured(self) -> ProbeResult:
        found = self._result.result(900)
        assert isinstance(found.outcome, MeasuredRun), found
        return found

    def failed(self) -> Failed:
        outcome = self._result.result(900).outcome
        assert isinstance(outcome, Failed), outcome
        return outcome


def task(notes: str, limit: float) -> ProbeTask:
    job = {**TWO_NODES, "notes": notes}
    return ProbeTask(id="probe-x", job=job, device="cpu", time_limit_seconds=limit)


def _nobody_is_left(pool: SlurmPool, cluster: SlurmCluster, of: str = "probe-*") -> None:
    """Guardians end within a moment after the file or the signal that tells them to."""
    tokens = node_tokens(pool.settings.folder, of)
    assert tokens
    cluster.wait_for(lambda: nobody_bears(tokens), "nobody is left")


def _preempt(cluster: SlurmCluster) -> None:
    urgent = ["--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null"]
    cluster.ask("sbatch", *urgent, "--wrap", "sleep 2")


def test_a_node_that_does_not_answer_holds_nobody_beyond_the_limit(
    pool: SlurmPool, cluster: SlurmCluster
) -> None:
    """Slurm itself takes long to notice: here the controller is away as well.

    The limit is long enough for both nodes to start the probe on a busy machine.
    """
    pool.options, pool.pace = SlurmOptions(restarts=0), SlurmPace(files=0.1, slurm=1.0, end=15.0)
    running = Running(pool, cluster, "sleep 600", 40.0)
    cluster.kill("n2")
    cluster.kill("slurmctld")
    assert running.failed().kind in (FailureKind.TIMEOUT, FailureKind.LOST_NODE)
    _nobody_is_left(pool, cluster)


def test_after_a_lost_node_it_runs_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    """Nothing is left where a slurmd is gone: its guardian reads the order to stop."""
    running = Running(pool, cluster, "once", 500.0)
    cluster.kill("n2")
    running.says("runs again")
    _nobody_is_left(pool, cluster, of="probe-x")
    cluster.start("n2")
    result = running.measured()
    (note,) = [note for note in result.notes if note.startswith("ran again")]
    lost = int(re.search(r"after (\d+) s: Slurm's job .* lost (?:a node|n2)", note)[1])  # type: ignore[index]
    assert 0 < lost <= result.wall_seconds + 1
    assert result.gpu_seconds == pytest.approx(4 * result.wall_seconds)
    _nobody_is_left(pool, cluster)


def test_a_retry_runs_where_it_failed_if_there_is_nowhere_else(pool: SlurmPool) -> None:
    result = pool.run(task("", 300.0), Watch(rather_not=frozenset({"n1", "n2"})))
    assert isinstance(result.outcome, MeasuredRun), result
    one_node = {**JOB, "cluster": {"gpu": "cpu", "num_gpus": 2, "gpus_per_node": 2}}
    small = ProbeTask(id="probe-y", job=one_node, device="cpu", time_limit_seconds=300.0)
    result = pool.run(small, Watch(rather_not=frozenset({"n1"})))
    assert set(result.hosts) == {"n2"}, result


def test_a_requeued_job_runs_its_probe_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    running = Running(pool, cluster, "once")
    (job,) = cluster.jobs()
    assert cluster.ask("scontrol", "update", f"jobid={job}", "requeue=1") == ""
    assert cluster.ask("scontrol", "requeue", job) == ""
    assert "was put back into its queue" in running.measured().notes[0]


def test_a_preempted_job_runs_its_probe_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    running = Running(pool, cluster, "once")
    _preempt(cluster)
    assert "was preempted" in running.measured().notes[0]


def test_what_is_lost_too_often_says_why(pool: SlurmPool, cluster: SlurmCluster) -> None:
    pool.options = SlurmOptions(restarts=0)
    running = Running(pool, cluster, "sleep 600")
    _preempt(cluster)
    outcome = running.failed()
    assert (outcome.kind, "preempted" in outcome.message) == (FailureKind.PREEMPTED, True)


def test_a_job_that_was_cancelled_is_not_run_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    running = Running(pool, cluster, "sleep 600")
    cluster.ask("scancel", *cluster.jobs())
    outcome = running.failed()
    assert outcome.kind == FailureKind.INTERRUPTED
    assert "was cancelled, not by us" in outcome.message


def test_a_controller_that_is_away_for_a_while(pool: SlurmPool, cluster: SlurmCluster) -> None:
    """It is away when the probe is submitted, and again while it runs."""
    cluster.kill("slurmctld")
    running = Running(pool, cluster, "sleep 12")
    cluster.start("slurmctld")
    running.says("step 1")
    cluster.kill("slurmctld")
    assert not any("ran again" in note for note in running.measured().notes)


@pytest.mark.parametrize(
    ("partition", "reason"), [("brief", "PartitionTimeLimit"), ("one", "PartitionNodeLimit")]
)
def test_what_a_partition_never_allows_is_not_waited_for(
    pool: SlurmPool, cluster: SlurmCluster, partition: str, reason: str
) -> None:
    """Slurm first names the partition, and the limit once it has tried to schedule the job."""
    pool.partition = partition
    said = rf"in vain.*\((?:PartitionConfig|{reason})\)|[Nn]ode count|[Tt]ime limit"
    with pytest.raises(ProbeError, match=said):
        pool.run(task("", 300.0))
    cluster.wait_for(lambda: not cluster.jobs(), "the job is cancelled")


def test_drained_nodes_are_named(pool: SlurmPool, cluster: SlurmCluster) -> None:
    pool.options = SlurmOptions(queue_seconds=6.0)
    cluster.ask("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        with pytest.raises(ProbeError, match=r"within 6 s \(.*DRAINED"):
            pool.run(task("", 300.0))
    finally:
        cluster.ask("scontrol", "update", "nodename=n2", "state=resume")


def test_a_job_outlives_its_runner_and_is_found(pool: SlurmPool, cluster: SlurmCluster) -> None:
    """Another pool, as of another process, takes over what the first one left running."""
    _killed_runner(pool, task("sleep 8", 300.0), cluster)
    (job,) = cluster.jobs()
    told = cluster.ask("scontrol", "show", "job", job)
    assert "JobName=planner-probe-x" in told
    assert "Comment=planner probe-x" in told
    other = SlurmPool(pool.settings)
    assert (other.is_left("probe-x"), other.is_left("probe-y")) == (True, False)
    result = other.run(task("sleep 8", 300.0))
    assert isinstance(result.outcome, MeasuredRun), result
    assert len(list(pool.settings.folder.glob("probe-*"))) == 1
    assert last_job(cluster) == int(job)
    assert not other.is_left("probe-x")


def _killed_runner(pool: SlurmPool, task: ProbeTask, cluster: SlurmCluster) -> None:
    """Runs a task in a process of its own, and kills that as soon as the probe runs."""
    process = multiprocessing.get_context("fork").Process(target=pool.run, args=(task,))
    process.start()
    logs = pool.settings.folder / task.id
    cluster.wait_for(
        lambda: any("step 1" in path.read_text() for path in logs.glob("output.node*.log")),
        "the probe runs",
    )
    process.kill()
    process.join(60)


def test_what_is_left_can_be_ended(pool: SlurmPool, cluster: SlurmCluster) -> None:
    _killed_runner(pool, task("scatter 600", 300.0), cluster)
    pool.end_left("probe-x")
    assert not pool.is_left("probe-x")
    _nobody_is_left(pool, cluster)
    cluster.wait_for(lambda: not cluster.jobs(), "the job has ended")
