"""`planner-cli probe` from a job to a stored measurement with the real program on the CPU pool; its
ends with a stand-in.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.probes import guardian
from planner.probes.protocol import (
    Environment,
    MeasuredRun,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
    RankMemory,
)
from tests.conftest import ROOT, Cli, clean_environment, needed
from tests.e2e.conftest import REAL_PROBE
from tests.stand_ins import worker
from tests.stand_ins.runners import JOB

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256, "model_type": "llama", "name": "tiny",
}  # fmt: skip
REAL_JOB = {
    "model": TINY, "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"seq_len": 32, "global_batch_size": 4},
    "layout": {"dp_shard": 2, "ac": "none"},
}  # fmt: skip
Probe = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def probe(cli: Cli, tmp_path: Path, surroundings: dict[str, str]) -> Probe:
    """Runs `probe --job` on a job with these notes for the stand-in."""

    def run(
        notes: str = "",
        *arguments: str,
        job: Mapping[str, Any] = JOB,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        path = tmp_path / "job.json"
        path.write_text(json.dumps({**job, "notes": notes} if notes or job is JOB else job))
        return cli("probe", "--job", path, *arguments, env={**surroundings, **(env or {})})

    return run


@pytest.mark.torch
@pytest.mark.slow
def test_from_a_job_to_a_stored_measurement_with_the_real_program(probe: Probe, cli: Cli) -> None:
    needed("torch")
    done = probe("", "--steps", "3", "--warmup", "1", job=REAL_JOB, env=REAL_PROBE)
    assert done.returncode == 0, done.stderr
    assert "predicted / measured" in done.stdout
    assert "probed, 3 timed steps" in done.stdout
    assert "on cpu from 1 measurement" in done.stderr, "what was measured is learnt from"
    (row,) = json.loads(cli("measurements", "list", "--json").stdout)["items"]
    measured = row["measured"]
    assert (row["model"]["name"], row["cluster"], row["layout"]) == (
        "tiny",
        REAL_JOB["cluster"],
        REAL_JOB["layout"],
    )
    assert (measured["status"], measured["rung"], measured["steps"], measured["trainer"]) == (
        "ok",
        "probed",
        3,
        "reference",
    )
    assert measured["step_seconds"] > 0
    assert measured["tokens_per_second_per_gpu"] == pytest.approx(
        32 * 4 / 2 / measured["step_seconds"], rel=0.01
    )
    assert measured["software"]["torch"]


def test_json_alone_on_stdout(probe: Probe) -> None:
    done = probe("", "--json")
    (one,) = json.loads(done.stdout)["probes"]
    assert (done.returncode, one["state"], one["measurement"]["measured"]["step_seconds"]) == (
        0,
        "done",
        worker.STEP_SECONDS,
    )
    assert one["estimate"]["step_seconds"] > 0
    assert one["results"][0]["outcome"]["step_seconds_each"] == [0.12, 0.125, 0.13]


def test_a_failure_is_told_by_its_own_first_cause_and_exit_4(probe: Probe, cli: Cli) -> None:
    done = probe("victims")
    assert done.returncode == 4
    assert done.stderr == "error: crash: rank 1: KeyError: 'rope'\n"
    assert "KeyError: 'rope'" in done.stdout
    assert "Connection closed" not in done.stdout
    assert json.loads(cli("measurements", "list", "--json").stdout)["items"] == []
    told = json.loads(probe("victims", "--json").stdout)
    assert (told["error"]["type"], told["probes"][0]["failure"]) == ("probe_failed", "crash")


def test_out_of_memory_is_a_measurement_and_exit_3(probe: Probe, cli: Cli) -> None:
    done = probe("oom")
    assert done.returncode == 3
    assert "out of memory on rank 1" in done.stderr
    assert "shard more" in done.stderr
    (row,) = json.loads(cli("measurements", "list", "--status", "oom", "--json").stdout)["items"]
    assert (row["measured"]["attempted_bytes"], row["measured"]["rank"]) == (2**31, 1)


@pytest.mark.parametrize(
    ("job", "field", "words"),
    [
        ({**JOB, "layout": None}, "layout", "add the layout to measure"),
        ({**JOB, "layout": {"dp_shard": 3}}, "layout.dp_shard=3", "3 ranks on 2 GPUs"),
        (
            {
                **JOB,
                "layout": {"tp": 2, "dp_shard": 1},
                "training": {"seq_len": 63, "global_batch_size": 4},
            },
            "layout.",
            "seq_len",
        ),
    ],
)
def test_a_wrong_request_is_exit_2_before_anything_runs(
    probe: Probe, cli: Cli, job: dict[str, Any], field: str, words: str
) -> None:
    done = probe(job=job)
    assert done.returncode == 2, done.stdout
    assert field in done.stderr
    assert words in done.stderr
    unknown = probe("", "--pool", "cloud")
    assert (unknown.returncode, "use local, slurm" in unknown.stderr) == (2, True)
    both = cli("probe")
    assert (both.returncode, "--plan PLAN_ID" in both.stderr) == (2, True)


def test_without_a_gpu_one_clear_line(probe: Probe, surroundings: dict[str, str]) -> None:
    job = {**JOB, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2}}
    done = probe(job=job, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "--emulate" in done.stderr
    assert "gpu: cpu" in done.stderr
    assert not Path(surroundings["PLANNER_PROBE_FOLDER"]).exists()


@pytest.mark.slow
def test_emulated_ranks_without_a_gpu_tell_memory_alone(probe: Probe) -> None:
    job = {
        **JOB,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "layout": {"pp": 4, "dp_shard": 2, "ac": "none"},
    }
    job["training"] = {"seq_len": 64, "global_batch_size": 16}
    done = probe("", "--emulate", "--json", job=job, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["probes"]
    measured = one["measurement"]["measured"]
    assert [rank["rank"] for rank in measured["ranks"]] == [0, 4, 6]
    assert (measured["rung"], measured["peak_reserved_bytes"], "step_seconds" in measured) == (
        "emulated",
        2**22,
        False,
    )
    assert "memory and counts only" in done.stderr


@pytest.mark.slow
def test_the_best_of_a_plan(cli: Cli, tmp_path: Path, surroundings: dict[str, str]) -> None:
    (tmp_path / "job.json").write_text(
        json.dumps({key: JOB[key] for key in ("model", "cluster", "training")})
    )
    plan = json.loads(
        cli("recommend", "--job", tmp_path / "job.json", "--top-k", "3", "--json").stdout
    )
    done = cli("probe", "--plan", plan["id"], "--top-k", "2", "--json", env=surroundings)
    assert done.returncode == 0, done.stderr
    probes = json.loads(done.stdout)["probes"]
    assert [(one["plan_id"], one["plan_rank"], one["state"]) for one in probes] == [
        (plan["id"], 1, "done"),
        (plan["id"], 2, "done"),
    ]
    assert probes[0]["measurement"]["layout"] == plan["ranked"][0]["layout"]
    too_many = cli("probe", "--plan", plan["id"], "--top-k", "99", env=surroundings)
    assert (too_many.returncode, "top_k=99" in too_many.stderr) == (2, True)
    assert cli("probe", "--plan", "plan-nope", env=surroundings).returncode == 2


@pytest.mark.slow
def test_recordings_stand_for_gpus(probe: Probe, tmp_path: Path) -> None:
    job = {**JOB, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2}}
    task = ProbeTask(id="recorded", job=job)
    memory = [
        RankMemory(
            rank=1,
            peak_allocated_bytes=3,
            peak_reserved_bytes=4,
            device_used_bytes=5,
            allocator_retries=1,
        )
    ]
    ran = MeasuredRun(
        step_seconds=0.5,
        step_seconds_each=[0.5, 0.5],
        tokens_per_second_per_gpu=256.0,
        mfu=0.4,
        losses=[2.0],
        gradient_norms=[1.0],
        memory=memory,
    )
    result = ProbeResult(
        task=task,
        outcome=ran,
        environment=Environment(python="3", torch="2.11.0", gpu_name="NVIDIA H100 80GB HBM3"),
        started_at="2026-11-21T12:00:00+00:00",
        wall_seconds=30.0,
        gpu_seconds=60.0,
    )
    (tmp_path / "results.jsonl").write_text(result.model_dump_json())
    done = probe("", "--pool", f"replay:{tmp_path / 'results.jsonl'}", "--json", job=job)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["probes"][0]["measurement"]
    assert (
        row["measured"]["step_seconds"],
        row["measured"]["device_bytes"],
        row["measured"]["software"]["torch"],
    ) == (0.5, 5.0, "2.11.0")
    assert row["measured"]["allocator_retries"] == 1
    full = result.model_copy(
        update={
            "outcome": OutOfMemory(
                rank=0, attempted_bytes=1, allocated_bytes=2, message="CUDA out of memory"
            )
        }
    )
    (tmp_path / "results.jsonl").write_text(full.model_dump_json())
    assert probe("", "--pool", f"replay:{tmp_path / 'results.jsonl'}", job=job).returncode == 3
    other = probe(
        "",
        "--pool",
        f"replay:{tmp_path / 'results.jsonl'}",
        job={**job, "layout": {"dp_shard": 2, "ac": "full"}},
    )
    assert (other.returncode, "no recording of" in other.stderr) == (4, True)


def test_an_interruption_ends_the_probe_first(
    tmp_path: Path, sqlite_url: str, surroundings: dict[str, str], cli: Cli
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({**JOB, "notes": "scatter 600"}))
    environment = {**clean_environment(), **surroundings, "PLANNER_DATABASE_URL": sqlite_url}
    command = [
        sys.executable,
        "-m",
        "planner.api.cli",
        "probe",
        "--job",
        str(tmp_path / "job.json"),
    ]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        token = _token_of_a_running_probe(tmp_path / "probes")
        assert len(guardian.bearers(token)) >= 5  # torchrun, two ranks, and what they scattered
        os.kill(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, told) == (130, "error: interrupted\n")
    assert guardian.bearers(token) == set()


def _token_of_a_running_probe(folder: Path) -> str:
    """The token, once the ranks of a probe are at work."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for log in folder.glob("*/output.log"):
            if log.read_text(errors="replace").count("step 1 of 9") == 2:
                return str(json.loads((log.parent / "begin.json").read_text())["token"])
        time.sleep(0.1)
    raise AssertionError("the probe did not start")
