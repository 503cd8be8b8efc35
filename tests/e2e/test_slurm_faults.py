"""Probes on a real Slurm whose nodes, jobs and controller fail under them."""

import multiprocessing
import re
import threading

import pytest

from planner.errors import ProbeError
from planner.probes import guardian
from planner.probes.launch import Watch
from planner.probes.outcome import Begin
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_node import node_token
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.pools.slurm_wait import SlurmPace
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, ProbeResult, ProbeTask
from tests.slurm_cluster import TWO_NODES, SlurmCluster
from tests.stand_ins.runners import JOB

pytestmark = pytest.mark.slow


class Running:
    """A probe that runs in a thread. lines: its progress."""

    def __init__(self, pool: SlurmPool, task: ProbeTask) -> None:
        self.lines: list[str] = []
        self.watch = Watch(progress=self.lines.append)
        self.results: list[ProbeResult | BaseException] = []

        def run() -> None:
            try:
                self.results.append(pool.run(task, self.watch))
            except BaseException as error:
                self.results.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> ProbeResult:
        self._thread.join(900)
        (found,) = self.results
        assert isinstance(found, ProbeResult), found
        return found


def task(notes: str, limit: float) -> ProbeTask:
    job = {**TWO_NODES, "notes": notes}
    return ProbeTask(id="probe-x", job=job, device="cpu", time_limit_seconds=limit)


def _runs(running: Running, cluster: SlurmCluster) -> None:
    cluster.wait_for(lambda: any("step 1" in line for line in running.lines), "the probe runs")


def _nobody_is_left(pool: SlurmPool, cluster: SlurmCluster, of: str = "probe-*") -> None:
    """Guardians end within a moment after the file or the signal that tells them to."""
    tokens = [
        node_token(Begin.read(path).token, node)
        for path in pool.settings.folder.glob(f"{of}/begin.json")
        for node in (0, 1)
    ]
    assert tokens
    cluster.wait_for(lambda: not any(map(guardian.bearers, tokens)), "nobody is left")


def test_a_node_that_does_not_answer_holds_nobody_beyond_the_limit(
    pool: SlurmPool, cluster: SlurmCluster
) -> None:
    """Slurm itself takes long to notice: here the controller is away as well.

    The limit is long enough for both nodes to start the probe on a busy machine.
    """
    pool.options, pool.pace = SlurmOptions(restarts=0), SlurmPace(files=0.1, slurm=1.0, end=15.0)
    running = Running(pool, task("sleep 600", 40.0))
    _runs(running, cluster)
    cluster.kill("n2")
    cluster.kill("slurmctld")
    result = running.result()
    assert isinstance(result.outcome, Failed), result
    assert result.outcome.kind in (FailureKind.TIMEOUT, FailureKind.LOST_NODE)
    _nobody_is_left(pool, cluster)


def test_after_a_lost_node_it_runs_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    """Nothing is left where a slurmd is gone: its guardian reads the order to stop."""
    running = Running(pool, task("once", 500.0))
    _runs(running, cluster)
    cluster.kill("n2")
    cluster.wait_for(lambda: any("runs again" in line for line in running.lines), "it runs again")
    _nobody_is_left(pool, cluster, of="probe-x")
    cluster.start("n2")
    result = running.result()
    assert isinstance(result.outcome, MeasuredRun), result
    (note,) = [note for note in result.notes if note.startswith("ran again")]
    lost = int(re.search(r"after (\d+) s: Slurm's job .* lost (?:a node|n2)", note)[1])  # type: ignore[index]
    assert result.wall_seconds >= lost - 1
    assert lost > 0
    assert result.gpu_seconds == pytest.approx(4 * result.wall_seconds)
    _nobody_is_left(pool, cluster)


def test_a_retry_runs_where_it_failed_if_there_is_nowhere_else(
    pool: SlurmPool, cluster: SlurmCluster
) -> None:
    watch = Watch(rather_not=frozenset({"n1", "n2"}))
    result = pool.run(task("", 300.0), watch)
    assert isinstance(result.outcome, MeasuredRun), result
    one_node = {**JOB, "cluster": {"gpu": "cpu", "num_gpus": 2, "gpus_per_node": 2}}
    small = ProbeTask(id="probe-y", job=one_node, device="cpu", time_limit_seconds=300.0)
    result = pool.run(small, Watch(rather_not=frozenset({"n1"})))
    assert set(result.hosts) == {"n2"}, result


def test_a_requeued_job_runs_its_probe_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    running = Running(pool, task("once", 300.0))
    _runs(running, cluster)
    (job,) = cluster.jobs()
    assert cluster.ask("scontrol", "update", f"jobid={job}", "requeue=1") == ""
    assert cluster.ask("scontrol", "requeue", job) == ""
    result = running.result()
    assert isinstance(result.outcome, MeasuredRun), result
    assert "was put back into its queue" in result.notes[0]


def test_a_preempted_job_runs_its_probe_again(pool: SlurmPool, cluster: SlurmCluster) -> None:
    running = Running(pool, task("once", 300.0))
    _runs(running, cluster)
    urgent = ["--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null"]
    cluster.ask("sbatch", *urgent, "--wrap", "sleep 2")
    result = running.result()
    assert isinstance(result.outcome, MeasuredRun), result
    assert "was preempted" in result.notes[0]


def test_what_is_lost_too_often_says_why(pool: SlurmPool, cluster: SlurmCluster) -> None:
    pool.options = SlurmOptions(restarts=0)
    running = Running(pool, task("sleep 600", 300.0))
    _runs(running, cluster)
    urgent = ["--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null"]
    cluster.ask("sbatch", *urgent, "--wrap", "sleep 2")
    outcome = running.result().outcome
    assert isinstance(outcome, Failed)
    assert (outcome.kind, "preempted" in outcome.message) == (FailureKind.PREEMPTED, True)


def test_a_job_that_somebody_cancels_is_not_run_again(
    pool: SlurmPool, cluster: SlurmCluster
) -> None:
    running = Running(pool, task("sleep 600", 300.0))
    _runs(running, cluster)
    cluster.ask("scancel", *cluster.jobs())
    outcome = running.result().outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == FailureKind.INTERRUPTED
    assert "was cancelled, not by us" in outcome.message


def test_a_controller_that_is_away_for_a_while(pool: SlurmPool, cluster: SlurmCluster) -> None:
    """It is away when the probe is submitted, and again while it runs."""
    cluster.kill("slurmctld")
    running = Running(pool, task("sleep 12", 300.0))
    cluster.wait_for(lambda: any("controller" in line for line in running.lines), "it is missed")
    cluster.start("slurmctld")
    _runs(running, cluster)
    cluster.kill("slurmctld")
    result = running.result()
    assert isinstance(result.outcome, MeasuredRun), result
    assert not any("ran again" in note for note in result.notes)


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


def test_a_job_survives_its_runner_and_is_found_again(
    pool: SlurmPool, cluster: SlurmCluster
) -> None:
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
    ids = cluster.ask("squeue", "--noheader", "--format=%A", "--states=all").split()
    assert max(map(int, ids)) == int(job)
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
