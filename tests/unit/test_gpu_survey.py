"""The survey of a GPU, with a stand-in for the training program; and the table of its rows."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_survey, predicted_against_measured
from benchmarks.first_day import first_day
from benchmarks.survey_grid import Case, cases, fake_cases
from planner.calibration.coverage import NEAR
from planner.calibration.fit import Data
from planner.cost.machine.knobs import Calibration
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.measurements import read_measurement
from planner.probes.pools import nvidia
from planner.probes.protocol import Failed
from planner.specs.job import Job
from tests.conftest import ROOT, needed, ran
from tests.unit.test_local_pool import H100

CPU = gpu_survey.Machine(gpu="cpu", name="CPU", devices=None)
WORKER = """
import json, sys
task = json.load(open(sys.argv[1]))
memory = {"rank": task["emulate_rank"] or 0, "peak_allocated_bytes": 3 * 2**30, "peak_reserved_bytes": 4 * 2**30}
outcome = {"status": "ok", "step_seconds": 0.25, "step_seconds_each": [0.2, 0.25, 0.3], "tokens_per_second_per_gpu": 100.0,
           "mfu": None, "losses": [1.0], "gradient_norms": [1.0], "memory": [memory]}
if "full" in task["id"] and "rank" not in task["id"]:
    outcome = {"status": "oom", "rank": 0, "attempted_bytes": 2**31, "allocated_bytes": 2**33, "message": "CUDA out of memory"}
if "selective-op" in task["id"]:
    sys.exit(3)
result = {"task": task, "outcome": outcome, "environment": {"python": "3", "torch": "2.13.0", "gpu_name": "CPU"},
          "started_at": "2026-01-01T00:00:00+00:00", "wall_seconds": 1.0, "gpu_seconds": 1.0}
json.dump(result, open(sys.argv[2], "w"))
"""  # noqa: E501


@pytest.fixture(params=["guarded", "plain"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> gpu_survey.Run:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return partial(getattr(gpu_survey, request.param), worker=str(path))


H200 = gpu_survey.Machine(gpu="h200-sxm-141gb", name="NVIDIA H200", devices=("0",))


@pytest.mark.slow
def test_every_case_is_legal_and_has_a_name_of_its_own() -> None:
    found = cases(H200.gpu)
    assert [name for name, count in Counter(case.id for case in found).items() if count > 1] == []
    for case in found:
        estimate, job = estimate_job(read_job(case.job)), read_job(case.job)
        assert estimate.valid, (case.id, estimate.violations)
        assert case.rank is None or 0 <= case.rank < job.cluster.num_gpus


def test_the_grid_spans_what_was_asked_and_starts_wide() -> None:
    found = cases(H200.gpu)
    asked = "8b-on-8 8b-on-64 70b-on-256 405b-on-512 mixtral-on-64 deepseek-v3-on-256 8b-131k-cp8"
    ranks = {case.id.split("/")[1] for case in found if case.rank is not None}
    assert set(asked.split()) <= ranks
    stages = {case.labels["pipeline_rank"] for case in found if "/405b-on-512/" in case.id}
    assert stages == {0, 8, 15}
    first = [case.job["layout"] for case in found[:18]]
    assert {layout["compile"] for layout in first if "compile" in layout} == {True, False}
    assert {layout["ac"] for layout in first} >= {"none", "full", "selective-op"}
    assert any(layout.get("optimizer_in_backward") for layout in first)
    assert any(layout.get("precision") == "float8-rowwise" for layout in first)
    fits = fitting(found)
    assert 3 <= fits.count(False) <= len(fits) // 3


def fitting(found: list[Case]) -> list[bool | None]:
    return [estimate_job(read_job(case.job)).fits for case in found if case.rank is None]


def test_a_smaller_gpu_has_smaller_runs() -> None:
    found = [case for case in cases("rtx-4090") if case.rank is None]
    assert fitting(found).count(True) >= len(found) // 2
    assert len(found) >= 25
    assert {case.job["layout"].get("ac") for case in found} >= {"none", "full", "selective-op"}


def test_fake_tensors_see_every_rank_and_nothing_compiled() -> None:
    found = fake_cases("h100-sxm-80gb")
    names = {case.id for case in found}
    assert len(names) == len(found) > 50
    assert all(case.rank is not None and not case.job["layout"]["compile"] for case in found)
    assert names >= {"fake/rank/405b-on-512/256", "fake/train/llama3-8b/s8192/b1/full/eager"}
    assert not [name for name in names if re.search("float8|budget|compile", name)]
    machine = gpu_survey.choose_machine("H100", tiny=False)
    task = gpu_survey.task_of(found[0], machine, 100.0)
    assert (machine.gpu, machine.source) == ("h100-sxm-80gb", "fake-h100-sxm-80gb")
    assert (task.fake_tensors, task.device, task.steps) == (True, "cpu", 1)


@pytest.mark.slow
def test_a_survey_fits_a_few_calls() -> None:
    seconds = [gpu_survey.expected_seconds(case, H200) for case in cases(H200.gpu)]
    assert max(seconds) < gpu_survey.CASE_SECONDS
    assert sum(seconds) < 5 * 560


def test_the_first_minute_of_kernels_covers_what_the_runs_consist_of() -> None:
    found = [case for case in cases(H200.gpu) if case.rank is None][:10]
    chosen = gpu_survey.wanted_shapes(found, [], 60.0)
    assert len(gpu_survey.wanted_shapes(found, chosen, 60.0)) < len(chosen) > 20
    unavailable = {**chosen[0].as_dict(), "status": "unavailable"}
    rows = [{"kind": "environment"}, unavailable, {"kind": "end"}]
    again = gpu_survey.wanted_shapes(found, gpu_survey.measured_shapes(rows), 60.0)
    assert all(shape.octaves_to(chosen[0]) > NEAR for shape in again)


@pytest.mark.slow
def test_rows_are_measurements_and_failures_and_memory_ends_are_rows_too(
    tmp_path: Path, run: gpu_survey.Run
) -> None:
    out = tmp_path / "rows.jsonl"
    left = cases("cpu", tiny=True)
    added = gpu_survey.run_cases(CPU, left, out, time.monotonic() + 300, run)
    rows = {row["id"]: row for row in gpu_survey.read_rows(out)}
    assert added == len(rows) == len(left)
    statuses = Counter(row["measured"]["status"] for row in rows.values())
    assert statuses == {"ok": 8, "oom": 1, "failed": 1}
    for name, row in rows.items():
        measurement = read_measurement(row, measurement_id="m", created_at="2026-01-01")
        assert measurement.job.layout is not None
        assert row["group"] == "own-cpu"
        rung = "emulated" if name.startswith("rank/") else "probed"
        assert row["measured"]["rung"] == rung
        assert row["measured"]["environment"]["python"]
    staged = rows["rank/tiny-pp3/4"]["measured"]
    assert (staged["pipeline_rank"], staged["emulated_rank"]) == (2, 4)


def test_what_there_is_no_time_for_waits(tmp_path: Path, run: gpu_survey.Run) -> None:
    out, (first, second, *_) = tmp_path / "rows.jsonl", cases("cpu", tiny=True)
    end = time.monotonic() + gpu_survey.LEAST_SECONDS - 1
    assert gpu_survey.run_cases(CPU, [first, second], out, end, run) == 0
    long = replace(second, steps=10**9)
    assert gpu_survey.run_cases(CPU, [long, first], out, time.monotonic() + 200, run) == 1
    assert [row["id"] for row in gpu_survey.read_rows(out)] == [first.id]
    out.write_text(out.read_text() + '{"id": "cut sho')
    assert [row["id"] for row in gpu_survey.read_rows(out)] == [first.id]


def test_long_steps_are_repeated_less_often() -> None:
    names = ("rank/70b-on-256/0", "train/llama3.2-1b/s8192/b1/none/eager", "rank/405b-on-512/256")
    by_name = {case.id: case for case in cases(H200.gpu)}
    found = [gpu_survey.task_of(by_name[name], H200, 100.0) for name in names]
    assert [(task.steps, task.emulate_rank) for task in found] == [(2, 0), (8, None), (2, 256)]


def test_a_gpu_is_known_by_its_catalogue_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine_of(*gpus: nvidia.Gpu, problem: str | None = None) -> gpu_survey.Machine:
        monkeypatch.setattr(nvidia, "survey", lambda: nvidia.Survey(gpus=gpus, problem=problem))
        return gpu_survey.find_machine()

    gpu = replace(H100, uuid="GPU-1", name="NVIDIA H200", memory_bytes=143771 * 2.0**20)
    assert machine_of(gpu) == replace(H200, devices=("GPU-1",))
    both = (gpu, replace(gpu, index=1, uuid="GPU-2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine_of(*both).devices == ("GPU-2",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="CUDA_VISIBLE_DEVICES hides all"):
        machine_of(*both)
    with pytest.raises(SystemExit, match="nvidia-smi is not installed; on a CPU try --tiny"):
        machine_of(problem="nvidia-smi is not installed")


def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return ran(sys.executable, ROOT / "benchmarks" / "gpu_survey.py", *arguments, timeout=400)


def test_a_probe_that_hangs_is_left_for_the_next_call(tmp_path: Path) -> None:
    asleep = tmp_path / "asleep.py"
    asleep.write_text("import time; time.sleep(600)")
    task = gpu_survey.task_of(cases("cpu", tiny=True)[0], CPU, 3.0)
    result = gpu_survey.plain(task, CPU, tmp_path / "probes", worker=str(asleep))
    assert isinstance(result.outcome, Failed)
    assert result.outcome.kind in gpu_survey.NOT_YET


@pytest.mark.torch
@pytest.mark.slow
def test_the_real_program_runs_and_a_second_call_passes_it_over(tmp_path: Path) -> None:
    needed("torch")
    only = ("--only", "train/debug-tiny/s64/b2/full")
    first, second = (command("--tiny", "--out", tmp_path, *only) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    (row,) = gpu_survey.read_rows(tmp_path / "own-cpu-tiny.runs.jsonl")
    assert row["measured"]["status"] == "ok"
    assert len(row["measured"]["steps_seconds"]) >= 3
    assert "0 of 10 cases" in second.stdout


def rows_of(slowness: float) -> list[dict]:
    """Rows as if this GPU were so much slower than predicted, and its memory 1% off."""
    found = []
    chosen = ("train/llama3.2-1b/s8192", "rank/405b", "rank/8b-on-8")
    for case in (case for case in cases(H200.gpu) if case.id.startswith(chosen)):
        estimate, whole = estimate_job(read_job(case.job)), case.rank is None
        rung = {"rung": "probed" if whole else "emulated", **case.labels}
        numbers: dict[str, Any] = {"status": "oom", **rung}
        if estimate.fits or not whole:
            stage = None if whole else case.labels.get("pipeline_rank")
            busy = predicted_against_measured.busy_seconds(estimate)
            allocated, reserved = predicted_against_measured.memory_of(estimate, stage)
            numbers |= {
                "status": "ok",
                "step_seconds": slowness * (estimate.step_seconds if whole else busy),
                "peak_allocated_bytes": 1.01 * allocated,
                "peak_reserved_bytes": reserved,
            }
        found.append({"id": case.id, "group": "own-test", **case.job, "measured": numbers})
    return found


@pytest.fixture(scope="module")
def lines() -> list[predicted_against_measured.Line]:
    return predicted_against_measured.table(rows_of(1.25))


@pytest.mark.slow
def test_one_half_mends_a_gpu_that_is_slower(lines: list[predicted_against_measured.Line]) -> None:
    figures = predicted_against_measured.summary(lines)
    assert figures["step time of real runs, as shipped"]["bias"] == pytest.approx(-0.2, abs=1e-3)
    assert figures["step time of real runs, calibrated on the other half"]["mean"] < 0.05
    bias = figures["busy time of emulated ranks, as shipped"]["bias"]
    assert bias == pytest.approx(-0.2, abs=1e-3)
    mean = figures["allocated memory of emulated ranks"]["mean"]
    assert mean == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert figures["reserved memory of all"]["worst"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
def test_goals_and_memory_ends_are_judged(lines: list[predicted_against_measured.Line]) -> None:
    def said(of: list[predicted_against_measured.Line]) -> list[str]:
        return predicted_against_measured.verdicts(of, predicted_against_measured.summary(of))

    time_goal, memory_goal, foreseen, *_ = said(lines)
    assert time_goal.startswith("goal 8%: step time")
    assert [goal.endswith("met") for goal in (time_goal, memory_goal)] == [True, True]
    assert foreseen == f"out of memory or not: {len(lines)} of {len(lines)} foreseen"
    late = [
        replace(one, calibrated_seconds=one.calibrated_seconds and 1.2 * one.calibrated_seconds)
        for one in lines
    ]
    assert said(late)[0].endswith("missed")


def test_no_run_teaches_what_judges_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ((row, row["measured"]) for row in rows_of(1.0))
    rows = [row for row, of in measured if of["rung"] == "probed" and "step_seconds" in of][:7]
    for index, row in enumerate(rows, start=1):
        row["measured"]["step_seconds"] = float(index)
    taught, judged = [], []

    def fit(data: Data, prior: Calibration, *, own: bool) -> tuple[Calibration, None]:
        assert own
        taught.append(set(np.exp(data.log_seconds).round(6)))
        return prior, None

    def estimate(job: Job, calibration: Calibration) -> SimpleNamespace:
        judged.append((len(taught), job.id))
        return SimpleNamespace(step_seconds=float(len(taught)))

    monkeypatch.setattr(predicted_against_measured, "fit", fit)
    monkeypatch.setattr(predicted_against_measured, "estimate_job", estimate)
    found = predicted_against_measured.calibrated(rows)
    names = [row["id"] for row in rows]
    assert judged == [(1, name) for name in names[1::2]] + [(2, name) for name in names[::2]]
    assert taught == [{1.0, 3.0, 5.0, 7.0}, {2.0, 4.0, 6.0}]
    assert list(found.values()) == [2.0, 1.0] * 3 + [2.0]


def test_memory_alone_is_a_row_of_the_table() -> None:
    cases = {case.id: case for case in fake_cases("h100-sxm-80gb")}
    case = cases["fake/rank/405b-on-512/480"]
    numbers = {"status": "ok", "rung": "emulated", "peak_allocated_bytes": 2.0**35, **case.labels}
    (line,) = predicted_against_measured.table([{"id": case.id, **case.job, "measured": numbers}])
    assert (line.emulated, line.measured_seconds, line.measured_allocated) == (True, None, 2.0**35)
    estimate = estimate_job(read_job(case.job))
    assert line.predicted_allocated == estimate.memory.stages[15].peak_allocated_bytes
    assert predicted_against_measured.cells(line)[1:4] == ["-", "-", "-"]


@pytest.mark.slow
def test_the_table_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(1.1)))
    monkeypatch.setattr(predicted_against_measured, "calibrated", lambda rows: {})
    monkeypatch.setattr(sys, "argv", ["", str(path), "--json", str(tmp_path / "out.json")])
    predicted_against_measured.main()
    shown = capsys.readouterr().out
    assert "rank/405b-on-512/256" in shown
    assert "predicted not to fit" in shown
    assert json.loads((tmp_path / "out.json").read_text())["summary"]
    widths = {len(line) for line in shown.split("\n\n")[0].splitlines()}
    assert len(widths) == 1


@pytest.mark.slow
def test_a_first_day_begins_with_the_machine_and_one_run(tmp_path: Path) -> None:
    """Parts 0 and 1 and one of a node, from the command to the files; the others run alike."""
    how = ("--only", "0/,1/,3/node/ep", "--seconds", "300")
    done = command("--first-day", "--tiny", "--plain", *how, "--out", tmp_path)
    assert "2 of 2 runs" in done.stdout, done.stdout + done.stderr
    said = (tmp_path / "first-day" / "environment.txt").read_text()
    for words in ("$ nvidia-smi topo -m", "/dev/shm", "$ cc --version", "'torch':", '"problem"'):
        assert words in said
    rows = gpu_survey.read_rows(tmp_path / "first-day" / "own-cpu.runs.jsonl")
    assert [row["notes"] for row in rows] == ["one GPU", "4 GPUs"]
    for row in rows:
        assert row["measured"]["status"] == "ok"
        assert len(row["measured"]["steps_seconds"]) >= 5


def test_a_first_day_is_in_order_and_a_node_shows_each_way_to_communicate() -> None:
    alone, node = (first_day("h100-sxm-80gb", gpus=gpus) for gpus in (1, 8))
    parts = [int(case.id.partition("/")[0]) for case in node]
    assert list(dict.fromkeys(parts)) == list(range(1, 10))
    assert parts == sorted(parts)
    more = [case for case in node if case not in alone]
    assert len(more) == len(node) - len(alone) == 7
    jobs = [read_job(case.job) for case in more]
    assert all(estimate_job(job).memory for job in jobs)
    degrees = [job.layout for job in jobs if job.layout is not None]
    for axis in ("dp_replicate", "tp", "cp", "pp", "ep"):
        assert any(getattr(layout, axis) > 1 for layout in degrees), axis
    assert any(layout.async_tp for layout in degrees)
    assert [case.rank for case in more].count(0) == 1
