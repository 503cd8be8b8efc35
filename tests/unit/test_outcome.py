"""What the files of a probe say about how it went."""

import errno
import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from planner.calibration.update import teaches
from planner.probes import guardian, protocol
from planner.probes.folder import BEGIN, END, LOG, RESULT, TASK
from planner.probes.outcome import LOG_BYTES, Begin, conclude, read_end, read_log
from planner.probes.protocol import Environment, Failed, MeasuredRun, ProbeResult, ProbeTask
from tests.conftest import ROOT, job_values

JOB = job_values("debug-tiny", "cpu", 2, 64, 4, layout={"dp_shard": 2, "ac": "none"})
GEMM = {"kind": "gemm", "name": "", "dtype": "bf16", "sizes": {"k": 8, "m": 8, "n": 8}}
BEGUN = Begin(started=1e9, num_gpus=2, token="abc")


def measured(**more: Any) -> MeasuredRun:
    values: dict[str, Any] = {
        "step_seconds": 0.1, "step_seconds_each": [0.1, 0.1], "tokens_per_second_per_gpu": 1.0,
        "mfu": None, "losses": [2.0, 1.5], "gradient_norms": [], "memory": [], **more,
    }  # fmt: skip
    return MeasuredRun(**values)


def end(folder: Path, name: str = END, **values: Any) -> None:
    whole = {"reason": "exit", "exit_code": 0, "seconds": 3.0, "left": [], **values}
    guardian.write_json(folder / name, whole)


def probe(
    folder: Path, *, outcome: MeasuredRun | None = None, written_by: str = "probe-1", **task: Any
) -> ProbeTask:
    """A folder as a probe leaves it, but for its end."""
    one = ProbeTask.model_validate({"id": "probe-1", "job": JOB, "device": "cpu", **task})
    (folder / TASK).write_text(one.model_dump_json())
    guardian.write_json(folder / BEGIN, BEGUN.model_dump())
    (folder / LOG).touch()
    if outcome is not None:
        written = result_of(one.model_copy(update={"id": written_by}), outcome)
        (folder / RESULT).write_text(json.dumps(written.model_dump()))
    return one


def result_of(task: ProbeTask, outcome: MeasuredRun, **environment: Any) -> ProbeResult:
    took = {"started_at": "", "wall_seconds": 1.0, "gpu_seconds": 2.0}
    where = Environment(python="3.11").model_copy(update=environment)
    return ProbeResult(task=task, outcome=outcome, environment=where, **took)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The folder of a probe that measured and ended well."""
    probe(tmp_path, outcome=measured())
    end(tmp_path)
    return tmp_path


def failed_as(folder: Path) -> Failed:
    outcome = conclude(folder).outcome
    assert isinstance(outcome, Failed)
    return outcome


@pytest.mark.parametrize(("throttled", "retries", "reason"), [
    (False, 0, None), (None, None, None),
    (True, 0, "heat or a fault held the GPU's clock down"),
    (False, 3, "the allocator emptied its cache 3 times between steps"),
])  # fmt: skip
def test_a_disturbed_run_teaches_nothing(throttled: Any, retries: Any, reason: str | None) -> None:
    peaks = {"peak_allocated_bytes": 1, "peak_reserved_bytes": 2}
    rank = protocol.RankMemory(rank=0, **peaks, allocator_retries=retries)
    task = ProbeTask.model_validate({"id": "probe-1", "job": JOB})
    clock = {"throttled": throttled, "sm_clock_hertz": 1.5e9}
    found = result_of(task, measured(memory=[rank]), **clock).measurement()
    assert found.measured.disturbed == reason
    assert found.measured.model_extra["sm_clock_hertz"] == 1.5e9
    assert teaches(found) is (reason is None)


class TestWhichEndCounts:
    def test_the_guardian_here_is_believed(self, tmp_path: Path) -> None:
        end(tmp_path, reason="asked", exit_code=None)
        end(tmp_path, "end.node0.json", exit_code=1)
        assert read_end(tmp_path, BEGUN).reason == "asked"

    def test_of_nodes_the_time_limit_then_the_one_that_failed(self, tmp_path: Path) -> None:
        end(tmp_path, exit_code=1)
        end(tmp_path, "end.node0.json", exit_code=0)
        end(tmp_path, "end.node1.json", exit_code=7)
        assert read_end(tmp_path, BEGUN).exit_code == 7
        end(tmp_path, "end.node2.json", reason="time-limit", exit_code=None)
        assert read_end(tmp_path, BEGUN).reason == "time-limit"

    def test_without_any_the_last_change_of_the_folder_was_the_end(self, tmp_path: Path) -> None:
        (tmp_path / LOG).touch()
        os.utime(tmp_path / LOG, (1e9 + 40.0, 1e9 + 40.0))
        os.utime(tmp_path, (1e9 + 30.0, 1e9 + 30.0))
        found = read_end(tmp_path, BEGUN)
        assert (found.reason, found.seconds) == ("guardian-gone", pytest.approx(40.0))

    def test_half_a_file_is_none(self, tmp_path: Path) -> None:
        (tmp_path / END).write_text('{"reason": "ex')
        assert read_end(tmp_path, BEGUN).reason == "guardian-gone"


def test_what_the_interpreter_of_the_program_found_is_the_environment(tmp_path: Path) -> None:
    """Not the service's own packages: the program ran in another Python."""
    program = tmp_path / "program.py"
    program.write_text("")
    python = tmp_path / "env" / "bin" / "python"
    venv.create(tmp_path / "env", with_pip=False)
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    for name, version in (("torch", "2.11.0+cu130"), ("nvidia-nccl-cu13", "2.28.9")):
        about = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (about / "METADATA").write_text(metadata)
    done = subprocess.run(
        [python, "-m", "planner.probes.inside", str(tmp_path / RESULT), str(program)],
        env={"PYTHONPATH": str(ROOT), "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = protocol.found_by(tmp_path, "NVIDIA L4")
    assert (found.torch, found.nccl, found.gpu_name) == ("2.11.0+cu130", "2.28.9", "NVIDIA L4")
    assert found.allocator == "expandable_segments:True"
    assert protocol.found_by(tmp_path / "never-started").torch is None


def test_a_run_beside_others_says_so_and_an_intruder_disturbs_it(ended: Path) -> None:
    (ended / "others.node0.txt").write_text("GPU 0 is used by pid 7 (gnome)")
    found = conclude(ended)
    assert "GPU 0 is used by pid 7 (gnome)" in found.notes
    assert (found.measurement().measured.shared, teaches(found.measurement())) == (True, True)
    intruded = found.environment.model_copy(update={"intruded": True})
    beside = found.model_copy(update={"environment": intruded}).measurement()
    assert "began to compute" in str(beside.measured.disturbed)
    assert not teaches(beside)


class TestConclude:
    def test_gpu_seconds_are_the_guardians(self, ended: Path) -> None:
        result = conclude(ended)
        assert (result.outcome.status, result.complete) == ("ok", True)
        assert (result.wall_seconds, result.gpu_seconds) == (3.0, 6.0)
        assert ProbeResult.model_validate_json((ended / RESULT).read_text()) == result

    def test_a_result_of_another_probe_is_none(self, tmp_path: Path) -> None:
        probe(tmp_path, outcome=measured(), written_by="probe-0")
        end(tmp_path, exit_code=1)
        assert failed_as(tmp_path)

    @pytest.mark.parametrize(("values", "task", "message"), [
        ({"losses": [2.0, float("inf")]}, {}, "the loss of step 1 is inf"),
        ({"step_seconds_each": []}, {}, "without a timed step"),
        ({"step_seconds": 0.0}, {}, "without a timed step"),
        ({"step_seconds": None}, {}, "without a timed step"),
        ({"timings": []}, {"kernels": [GEMM]}, "no kernel could be timed: it wrote no line"),
        ({"timings": [{**GEMM, "status": "oom", "message": "full"}]}, {"kernels": [GEMM]},
            "no kernel could be timed: full"),
    ])  # fmt: skip
    def test_a_success_that_cannot_be_one_is_a_failure(
        self, tmp_path: Path, values: dict[str, Any], task: dict[str, Any], message: str
    ) -> None:
        probe(tmp_path, outcome=measured(**values), **task)
        end(tmp_path)
        assert message in failed_as(tmp_path).message

    @pytest.mark.parametrize(("values", "task"), [
        ({"losses": [float("nan")]}, {"emulate_rank": 1}),
        ({"step_seconds": None, "step_seconds_each": []}, {"fake_tensors": True}),
        ({"timings": [{**GEMM, "status": "ok"}], "step_seconds": None}, {"kernels": [GEMM]}),
    ])  # fmt: skip
    def test_inputs_from_nowhere_have_no_loss_and_no_time(
        self, tmp_path: Path, values: dict[str, Any], task: dict[str, Any]
    ) -> None:
        probe(tmp_path, outcome=measured(**values), **task)
        end(tmp_path)
        assert conclude(tmp_path).outcome.status == "ok"

    def test_a_crash_after_the_result_is_a_note(self, tmp_path: Path) -> None:
        probe(tmp_path, outcome=measured())
        end(tmp_path, exit_code=-6, left=[4711])
        result = conclude(tmp_path)
        assert result.outcome.status == "ok"
        assert result.notes == [
            "processes 4711 could not be killed",
            "the program ended with exit code -6 after it had written its result",
        ]

    def test_what_could_not_be_started(self, tmp_path: Path) -> None:
        probe(tmp_path)
        end(tmp_path, reason="not-started", message="No such file: python9")
        found = failed_as(tmp_path)
        assert found.kind is protocol.FailureKind.IMPORT
        assert found.message == "No such file: python9"


def test_of_a_very_long_log_both_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"first" + b"." * (2 * LOG_BYTES) + b"last")
    text = read_log(tmp_path / LOG)
    assert (text[:5], text[-4:], len(text)) == ("first", "last", 2 * LOG_BYTES + len("\n[...]\n"))


def test_a_result_counts_on_a_full_disk(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: of the owner, and of the worker that finds the folder later."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=full))
    assert [conclude(ended).outcome.status for _ in range(2)] == ["ok", "ok"]


def test_a_result_file_without_end_is_not_read(tmp_path: Path) -> None:
    probe(tmp_path)
    end(tmp_path)
    with (tmp_path / RESULT).open("wb") as file:
        file.truncate(2**31)
    words = "has 2,147,483,648 bytes, more than 16,000,000: it is not read"
    assert words in failed_as(tmp_path).message
