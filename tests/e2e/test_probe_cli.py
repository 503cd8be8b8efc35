"""`planner-cli probe` from a job to a stored measurement with the real program on the CPU pool; its
ends with a stand-in.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.probes import guardian
from tests.conftest import PLANNER, ROOT, Cli, clean_environment, job_values, needed
from tests.e2e.conftest import REAL_PROBE, write
from tests.e2e.probe_jobs import TINY, working
from tests.e2e.test_closed_loop import items, said
from tests.stand_ins import worker
from tests.stand_ins.runners import JOB

REAL_JOB = job_values(TINY, "cpu", 2, 32, 4, layout={"dp_shard": 2, "ac": "none"})
ON_H100 = {**JOB, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2}}
Probe = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def probe(cli: Cli, tmp_path: Path, surroundings: dict[str, str]) -> Probe:
    """Runs `probe --job` on a job with these notes for the stand-in."""

    def run(notes: str = "", *arguments: str, job: Any = JOB, env: Any = None) -> Any:
        path = write(tmp_path, "job.json", {**job, "notes": notes} if notes or job is JOB else job)
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
    (row,) = items(cli)
    measured = row["measured"]
    assert row["model"]["name"] == "tiny"
    assert {name: row[name] for name in ("cluster", "layout")}.items() <= REAL_JOB.items()
    said = {"status": "ok", "rung": "probed", "steps": 3, "trainer": "reference"}
    assert said.items() <= measured.items()
    assert measured["step_seconds"] > 0
    rate = 32 * 4 / 2 / measured["step_seconds"]
    assert measured["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=0.01)
    assert measured["software"]["torch"]


def test_json_alone_on_stdout(probe: Probe) -> None:
    (one,) = said(probe("", "--json"))["probes"]
    assert one["state"] == "done"
    assert one["measurement"]["measured"]["step_seconds"] == worker.STEP_SECONDS
    assert one["estimate"]["step_seconds"] > 0
    assert one["results"][0]["outcome"]["step_seconds_each"] == [0.12, 0.125, 0.13]


def test_a_failure_is_told_by_its_own_first_cause_and_exit_4(probe: Probe, cli: Cli) -> None:
    done = probe("victims")
    assert (done.returncode, done.stderr) == (4, "error: crash: rank 1: KeyError: 'rope'\n")
    assert "KeyError: 'rope'" in done.stdout
    assert "Connection closed" not in done.stdout
    assert items(cli) == []
    told = json.loads(probe("victims", "--json").stdout)
    assert (told["error"]["type"], told["probes"][0]["failure"]) == ("probe_failed", "crash")


def test_out_of_memory_is_a_measurement_and_exit_3(probe: Probe, cli: Cli) -> None:
    done = probe("oom")
    assert done.returncode == 3
    assert "out of memory on rank 1" in done.stderr
    assert "shard more" in done.stderr
    (row,) = items(cli, "--status", "oom")
    assert (row["measured"]["attempted_bytes"], row["measured"]["rank"]) == (2**31, 1)


ODD = {"seq_len": 63, "global_batch_size": 4}


@pytest.mark.parametrize(("job", "field", "words"), [
    ({"layout": None}, "layout", "add the layout to measure"),
    ({"layout": {"dp_shard": 3}}, "layout.dp_shard=3", "3 ranks on 2 GPUs"),
    ({"layout": {"tp": 2, "dp_shard": 1}, "training": ODD}, "layout.", "seq_len"),
])  # fmt: skip
def test_a_wrong_request_is_exit_2_before_anything_runs(
    probe: Probe, cli: Cli, job: dict[str, Any], field: str, words: str
) -> None:
    done = probe(job={**JOB, **job})
    assert done.returncode == 2, done.stdout
    assert field in done.stderr
    assert words in done.stderr


def test_a_wrong_command_is_exit_2(probe: Probe, cli: Cli) -> None:
    unknown, neither = probe("", "--pool", "cloud"), cli("probe")
    assert (unknown.returncode, "use local, slurm" in unknown.stderr) == (2, True)
    assert (neither.returncode, "--plan PLAN_ID" in neither.stderr) == (2, True)


def test_without_a_gpu_one_clear_line(probe: Probe, surroundings: dict[str, str]) -> None:
    done = probe(job=ON_H100, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert "--emulate" in done.stderr
    assert "gpu: cpu" in done.stderr
    assert not Path(surroundings["PLANNER_PROBE_FOLDER"]).exists()


@pytest.mark.slow
def test_emulated_ranks_without_a_gpu_tell_memory_alone(probe: Probe) -> None:
    layout = {"pp": 4, "dp_shard": 2, "ac": "none"}
    job = job_values("debug-tiny", "h100-sxm-80gb", 8, 64, 16, layout=layout)
    done = probe("", "--emulate", "--json", job=job, env={"CUDA_VISIBLE_DEVICES": ""})
    (one,) = said(done)["probes"]
    measured = one["measurement"]["measured"]
    assert [rank["rank"] for rank in measured["ranks"]] == [0, 4, 6]
    assert (measured["rung"], measured["peak_reserved_bytes"]) == ("emulated", 2**22)
    assert "step_seconds" not in measured
    assert "memory and counts only" in done.stderr


@pytest.mark.slow
def test_the_best_of_a_plan(cli: Cli, tmp_path: Path, surroundings: dict[str, str]) -> None:
    path = write(tmp_path, "job.json", {key: JOB[key] for key in ("model", "cluster", "training")})
    plan = json.loads(cli("recommend", "--job", path, "--top-k", "3", "--json").stdout)

    def best(count: int, plan_id: str = plan["id"]) -> Any:
        return cli("probe", "--plan", plan_id, "--top-k", str(count), "--json", env=surroundings)

    probes = said(best(2))["probes"]
    assert [(one["plan_id"], one["plan_rank"], one["state"]) for one in probes] == [
        (plan["id"], 1, "done"),
        (plan["id"], 2, "done"),
    ]
    assert probes[0]["measurement"]["layout"] == plan["ranked"][0]["layout"]
    too_many = best(99)
    assert (too_many.returncode, "top_k=99" in too_many.stderr) == (2, True)
    assert best(1, "plan-nope").returncode == 2


@pytest.mark.slow
def test_recordings_stand_for_gpus(probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    (one,) = said(probe("", "--json"))["probes"]
    (whole,) = one["results"]
    whole["task"] |= {"job": ON_H100, "device": "cuda"}
    whole["environment"] |= {"torch": "2.11.0", "gpu_name": "NVIDIA H100 80GB HBM3"}
    whole["outcome"]["memory"][0] |= {"device_used_bytes": 5, "allocator_retries": 1}
    full = {"status": "oom", "rank": 0, "attempted_bytes": 1, "allocated_bytes": 2, "message": "x"}

    def recorded(outcome: dict[str, Any], **changes: Any) -> Any:
        path.write_text(json.dumps({**whole, "outcome": outcome}))
        return probe("", "--pool", f"replay:{path}", "--json", job={**ON_H100, **changes})

    (one,) = said(recorded(whole["outcome"]))["probes"]
    row = one["measurement"]["measured"]
    assert row["software"]["torch"] == "2.11.0"
    found = {"step_seconds": worker.STEP_SECONDS, "device_bytes": 5.0, "allocator_retries": 1}
    assert found.items() <= row.items()
    assert recorded(full).returncode == 3
    other = recorded(whole["outcome"], layout={"dp_shard": 2, "ac": "full"})
    assert (other.returncode, "no recording of" in other.stdout) == (4, True)


def test_an_interruption_ends_the_probe_first(
    tmp_path: Path, sqlite_url: str, surroundings: dict[str, str]
) -> None:
    path = write(tmp_path, "job.json", {**JOB, "notes": "scatter 600"})
    process = subprocess.Popen(
        [*PLANNER, "probe", "--job", str(path)],
        env={**clean_environment(), **surroundings, "PLANNER_DATABASE_URL": sqlite_url},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        token = working(tmp_path / "probes")
        assert len(guardian.bearers(token)) >= 5  # torchrun, two ranks, and what they scattered
        os.kill(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, told) == (130, "error: interrupted\n")
    assert guardian.bearers(token) == set()
