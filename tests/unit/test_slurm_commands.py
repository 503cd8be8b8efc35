"""What Slurm's commands say, as stand-ins of them print it; the real ones are in tests/e2e."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError
from planner.probes.evidence import Evidence, read_errors
from planner.probes.failures import classify
from planner.probes.launch import LaunchSettings, Watch
from planner.probes.pools.nvidia import Survey, others_on
from planner.probes.pools.protocol import PoolSettings
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_allocation import Allocation, NodeGrid, ProbeOrder
from planner.probes.pools.slurm_commands import COMMANDS, NoControllerError, Slurm, job_state
from planner.probes.pools.slurm_node import own_gpus, write_foreign
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.pools.slurm_wait import IN_VAIN, OrderWait, SlurmPace
from planner.probes.protocol import Failed, FailureKind, ProbeTask
from planner.probes.trainers.torchtitan import TitanTrainer
from tests.conftest import job_values
from tests.unit.test_local_pool import H100

PREEMPTED = (
    "JobId=7 JobName=planner-probe-a UserId=ada(1000) JobState=PREEMPTED Reason=None "
    "Restarts=0 RunTime=1-02:03:04 TimeLimit=1-00:00:00 StartTime=2026-11-20T10:00:00 "
    "EndTime=2026-11-21T12:03:04 PreemptEligibleTime=2026-11-20T10:00:00 "
    "PreemptTime=2026-11-21T12:03:00 NodeList=n[1-2] Comment=planner probe-a /shared/x"
)
WAITING = (
    "JobId=8 JobName=x JobState=PENDING Reason=PartitionTimeLimit Restarts=2 RunTime=00:00:00 "
    "EndTime=Unknown PreemptTime=None NodeList=(null)"
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that answer nothing, and the only one on the path but the shell's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in COMMANDS:
        answer(folder, name, "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def answer(folder: Path, name: str, script: str) -> None:
    """Makes a command run a script of the shell."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def says(folder: Path, name: str, text: str) -> None:
    """Makes a command print a text."""
    answer(folder, name, f"cat <<'END'\n{text}\nEND")


def refuses(folder: Path, name: str, text: str) -> None:
    """Makes a command fail with a text."""
    answer(folder, name, f"cat >&2 <<'END'\n{text}\nEND\nexit 1")


def wait_of(folder: Path, queue_seconds: float = 60.0) -> OrderWait:
    """The wait for job 8 and its only order, in this folder."""
    nothing = {"arguments": [], "environment": {}, "seconds": 60.0}
    allocation = Allocation(slurm=Slurm(), parent=folder, name="x", **nothing)
    (folder / "job").write_text("8")
    order = ProbeOrder(1, "probe-a", folder, folder)
    options = SlurmOptions(queue_seconds=queue_seconds)
    return OrderWait(order, allocation, options, SlurmPace(files=0.01), job=8)


def test_a_job_is_read_as_scontrol_shows_it() -> None:
    job, waiting = job_state(PREEMPTED), job_state(WAITING)
    assert (job.state, job.reason, job.restarts, job.nodes) == ("PREEMPTED", "", 0, "n[1-2]")
    assert (job.has_ended, job.is_waiting, job.is_preempted) == (True, False, True)
    assert job.seconds == 26 * 3600 + 3 * 60 + 4
    assert (job.ended is None, waiting.ended) == (False, None)
    assert (waiting.is_waiting, waiting.has_ended, waiting.is_preempted) == (True, False, False)
    assert (waiting.reason, waiting.restarts, waiting.nodes) == ("PartitionTimeLimit", 2, "")


def test_a_job_that_slurm_forgot_is_looked_up_in_its_accounting(commands: Path) -> None:
    refuses(commands, "scontrol", "slurm_load_jobs error: Invalid job id specified")
    refuses(commands, "sacct", "Slurm accounting storage is disabled")
    assert Slurm().job(9) is None
    lines = "PREEMPTED|40|2026-11-21T10:00:00|n1\nCANCELLED by 0|90|2026-11-21T12:00:00|n[1-2]"
    says(commands, "sacct", lines)
    job = Slurm().job(9)
    assert (job.state, job.seconds, job.nodes, job.restarts) == ("CANCELLED", 90.0, "n[1-2]", 1)


@pytest.mark.parametrize("text", [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "squeue: error: Socket timed out on send/recv operation",
    "slurm_load_jobs error: Zero Bytes were transmitted or received",
])  # fmt: skip
def test_a_controller_that_is_away_is_no_unknown_job(commands: Path, text: str) -> None:
    refuses(commands, "scontrol", text)
    with pytest.raises(NoControllerError):
        Slurm().job(9)


def test_what_a_controller_said_before_it_went_away_is_not_held_against_a_probe_that_began(
    commands: Path, tmp_path: Path
) -> None:
    """The job waited, then began, and its controller does not answer: it was not put back."""
    wait = wait_of(tmp_path)

    def lost() -> Any:
        wait._ask_slurm()
        return wait._lost()

    says(commands, "scontrol", WAITING)
    assert lost() is None
    (tmp_path / "started.1").write_text("2\n")
    refuses(commands, "scontrol", "slurm_load_jobs error: Zero Bytes were transmitted or received")
    assert lost() is None
    says(commands, "scontrol", WAITING)
    assert lost().reason == "requeued"
    assert (tmp_path / "stop").exists()


def test_a_job_that_waits_in_vain_is_cancelled_at_once(commands: Path, tmp_path: Path) -> None:
    says(commands, "scontrol", WAITING)
    cancelled = tmp_path / "cancelled"
    answer(commands, "scancel", f"echo $@ >> '{cancelled}'")
    with pytest.raises(ProbeError, match=r"would wait in vain.*PartitionTimeLimit"):
        wait_of(tmp_path, queue_seconds=1e-3).end(60.0, 1, Watch())
    assert cancelled.read_text().split()[-1] == "8"


@pytest.mark.parametrize(("state", "reason"), [
    ("PREEMPTED", "preempted"),
    ("NODE_FAIL", "lost-node"),
    ("TIMEOUT", "allocation-ended"),
    ("CANCELLED", "asked"),
])  # fmt: skip
def test_a_job_that_slurm_ended_under_its_probe_says_how(
    commands: Path, tmp_path: Path, state: str, reason: str
) -> None:
    says(commands, "scontrol", PREEMPTED.replace("JobState=PREEMPTED", f"JobState={state}"))
    (tmp_path / "started.1").write_text("0\n")
    ended = wait_of(tmp_path).end(60.0, 1, Watch())
    assert ended.reason == reason
    assert "Slurm's job 8 on n[1-2]" in str(ended.message)


def test_a_silent_node_holds_no_probe_beyond_its_limit(commands: Path, tmp_path: Path) -> None:
    """Its guardian should have ended it by then; both times are the file system's."""
    wait, now = wait_of(tmp_path), 1_000_000.0
    for name in ("started.1", "guardian.node0.json"):
        (tmp_path / name).write_text("0\n")
    os.utime(tmp_path / "guardian.node0.json", (now, now))
    for seconds, reason in ((60.0 + wait.pace.end, None), (61.0 + wait.pace.end, "time-limit")):
        (tmp_path / "heartbeat").touch()
        os.utime(tmp_path / "heartbeat", (now + seconds, now + seconds))
        ended = wait._overdue(60.0, 1)
        assert (ended and ended.reason) == reason


def test_what_sbatch_refuses_is_an_error_in_its_words(commands: Path) -> None:
    said, path = "Batch job submission failed: Invalid account", {"PATH": os.environ["PATH"]}
    refuses(commands, "sbatch", f"sbatch: error: {said}")
    with pytest.raises(ProbeError, match=rf"^Slurm: {said}"):
        Slurm().submit([], path)
    says(commands, "sbatch", "12;cluster")
    assert Slurm().submit([], path) == 12


def test_the_time_limit_of_a_partition(commands: Path) -> None:
    partitions = (
        "PartitionName=long Default=NO MaxTime=7-00:00:00 State=UP\n"
        "PartitionName=day Default=YES MaxTime=1-00:00:00 State=UP"
    )
    says(commands, "scontrol", partitions)
    assert Slurm().longest_seconds(None) == 86_400.0
    says(commands, "scontrol", "PartitionName=free Default=NO MaxTime=UNLIMITED State=UP")
    assert Slurm().longest_seconds("free") == math.inf


def test_nodes_that_are_down_or_do_not_answer(commands: Path) -> None:
    states = {"n1": "ALLOCATED", "n2": "ALLOCATED*", "n3": "DOWN+DRAIN", "n4": "IDLE+DRAIN"}
    lines = (f"NodeName={name} Arch=x86_64 State={one} Cores=1" for name, one in states.items())
    says(commands, "scontrol", "\n".join(lines))
    assert Slurm().down_nodes("n[1-4]") == ["n2", "n3"]


def test_options_become_arguments() -> None:
    given = {"account": "lab", "qos": "high", "constraint": "h100&ib", "exclude": "n[3-4]"}
    options = SlurmOptions(**given, gpus_by="gres")
    words = "--partition gpu --account lab --qos high --constraint h100&ib --exclude n[3-4]"
    assert options.job("gpu") == words.split()
    assert options.job(None, {"n9", "n7"})[-2:] == ["--exclude", "n[3-4],n7,n9"]
    assert options.nodes(2, 8, "cuda")[-2:] == ["--gres", "gpu:8"]
    assert SlurmOptions().nodes(2, 8, "cuda")[-2:] == ["--gpus-per-node", "8"]
    flags = "--nodes 2 --ntasks 2 --ntasks-per-node 1"
    assert SlurmOptions().nodes(2, 8, "cpu") == flags.split()
    assert SlurmOptions().job(None) == []


def test_a_probe_on_whole_nodes_has_their_cores_and_memory() -> None:
    """Else Slurm may give eight GPUs one core, and the memory that goes with it."""
    assert SlurmOptions().share(8, "cuda", whole=True) == ["--exclusive", "--mem", "0"]
    assert SlurmOptions().share(2, "cuda", whole=False) == []
    assert SlurmOptions().share(8, "cpu", whole=True) == []
    shared = SlurmOptions(exclusive=False, cpus_per_gpu=12, memory_gib_per_gpu=200)
    assert shared.share(8, "cuda", whole=True) == ["--mem", "1600G"]
    assert "--cpus-per-task 24 --gpus-per-node 2" in " ".join(shared.nodes(1, 2, "cuda"))
    assert NodeGrid.of(16, 8) == NodeGrid(nodes=2, per_node=8, whole=True)
    assert not NodeGrid(nodes=1, per_node=8).holds(NodeGrid.of(8, 8))


def test_a_container_needs_a_plugin_of_srun(commands: Path, tmp_path: Path) -> None:
    launch, image = LaunchSettings(folder=tmp_path), "nvcr.io#nvidia/pytorch:25.09-py3"
    options = SlurmOptions(container_image=image)
    pool = SlurmPool.open(PoolSettings(launch=launch, leases=tmp_path, slurm=options), "gpu")
    says(commands, "srun", "  --container=bundle  path of an OCI bundle")
    with pytest.raises(ProbeError, match=r"has no --container-image, which nvcr\.io#nvidia"):
        pool.check_container()
    says(commands, "srun", "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    pool.check_container()
    mounts = "/shared/probes:/shared/probes,/opt/planner:/opt/planner"
    words = f"--container-image {image} --container-mounts {mounts}"
    assert options.container([Path("/shared/probes"), Path("/opt/planner")]) == words.split()


NEVER = (
    "PartitionTimeLimit PartitionNodeLimit PartitionConfig BadConstraints InvalidQOS "
    "QOSMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AccountNotAllowed "
    "DependencyNeverSatisfied"
)
NOT_YET = (
    "Resources Priority QOSGrpGRES AssocGrpNodeLimit BeginTime ReqNodeNotAvail,_UnavailableNodes:n1"
)


def test_reasons_for_which_a_job_waits_in_vain() -> None:
    assert [one for one in NEVER.split() if not IN_VAIN.search(one)] == []
    assert [one for one in NOT_YET.split() if IN_VAIN.search(one)] == []


def test_what_others_hold_on_a_node_is_not_the_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leftover that goes is waited for; one that stays fails the probe as foreign."""
    idle = replace(H100, index=3, bus_id="0000:3b:00")
    left = replace(idle, processes=("pid 51234 (python3)",))
    looks = iter([left, idle])
    assert own_gpus(0.0, lambda: Survey(gpus=(next(looks),))) == (idle,)
    monkeypatch.setattr("planner.probes.pools.slurm_node.SETTLE_SECONDS", 0.0)
    gpus = own_gpus(0.0, lambda: Survey(gpus=(left,)))
    result = tmp_path / "result.json"
    write_foreign(result, 8, f"n1: {others_on(gpus)}")
    left_behind = {"exit_code": 1, "time_limit_seconds": 60.0, "errors": read_errors(result)}
    evidence = Evidence(reason="exit", **left_behind)
    job = job_values("llama3-8b", "h100-sxm-80gb", 16, 8192, 16, layout={"dp_shard": 16})
    titan = TitanTrainer().outcome(ProbeTask(id="probe-1", job=job), tmp_path, evidence)
    assert titan is not None
    for found in (classify(evidence), titan[0]):
        assert isinstance(found, Failed)
        assert (found.kind, found.rank) == (FailureKind.FOREIGN, 8)
        assert "n1: GPU 3 is used by pid 51234 (python3)" in found.message
        assert "remedy: another process" in found.message
