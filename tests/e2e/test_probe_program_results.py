"""The worker as torchrun starts it: one result file whatever happens, and an error file of every
rank that fails first.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.estimates import estimate_job
from planner.probes.evidence import error_path
from planner.probes.guardian import write_whole
from planner.probes.launch import free_port
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, OutOfMemory, ProbeResult
from tests.conftest import ROOT, clean_environment, needed
from tests.e2e.probe_jobs import task, torchrun

pytestmark = [pytest.mark.torch]
slow = pytest.mark.slow


class Started:
    """What one start of the worker left."""

    def __init__(self, folder: Path, codes: list[int], stderr: str) -> None:
        self.codes, self.stderr, self.path = codes, stderr, folder / "result.json"

    @property
    def result(self) -> ProbeResult:
        assert self.path.exists(), self.stderr[-3000:]
        return ProbeResult.model_validate_json(self.path.read_text(encoding="utf-8"))

    def run(self) -> MeasuredRun:
        assert isinstance(self.result.outcome, MeasuredRun), self.result
        return self.result.outcome

    def failed(self) -> Failed:
        assert isinstance(self.result.outcome, Failed), self.result
        return self.result.outcome

    def error(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(error_path(self.path, rank).read_text(encoding="utf-8"))
        return found


def start(
    folder: Path, given: dict[str, Any], *, world: int = 1, before: str = "", real: bool = False
) -> Started:
    """Runs the worker on this task, under torchrun if `real`. before: Python that runs in each
    process first, where a fault has to be provoked.
    """
    needed("torch")
    folder.mkdir(exist_ok=True)
    (folder / "task.json").write_text(json.dumps(given), encoding="utf-8")
    arguments = [str(folder / "task.json"), str(folder / "result.json")]
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    if real:
        done = torchrun(world, "-m", "planner.probes.worker", *arguments, env=environment)
        return Started(folder, [done.returncode], done.stderr)
    program, ours = folder / "program.py", "import sys\nfrom planner.probes.worker import end, main"
    program.write_text(f"{before}\n{ours}\nend(main(sys.argv[1:]))\n", encoding="utf-8")
    command = [sys.executable, str(program), *arguments]
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            command,
            env={**environment, **ranks_of(rank, world)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return Started(folder, [process.returncode for process in processes], "\n".join(said))


def ranks_of(rank: int, world: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}


@slow
def test_two_processes_under_torchrun_measure_a_layout(tmp_path: Path) -> None:
    timing = {"steps": 12, "warmup_steps": 2, "spread_below": 100.0, "breakdown": True}
    started = start(tmp_path, task({"dp_shard": 2}, num_gpus=2, **timing), world=2, real=True)
    result, out = started.result, started.run()
    assert started.codes == [0]
    assert (result.complete, result.rung) == (True, "probed")
    assert len(out.step_seconds_each) == 5  # they agree well enough after the first look
    assert out.step_seconds == sorted(out.step_seconds_each)[2] > 0
    assert len(out.losses) == len(out.gradient_norms) == 7
    assert out.tokens_per_second_per_gpu == pytest.approx(8 * 32 / 2 / out.step_seconds)
    assert out.mfu is not None
    assert [memory.rank for memory in out.memory] == [0, 1]
    # gloo's thread lets go of a buffer of 31 KB sooner or later, of three on a busy machine
    peaks = [memory.peak_allocated_bytes or 0 for memory in out.memory]
    assert max(peaks) - min(peaks) <= 4 * 32_768
    assert any("mm" in name for name in out.kernel_seconds or {})
    assert result.environment.torch is not None
    assert result.gpu_seconds == pytest.approx(2 * result.wall_seconds)
    assert result.measurement().measured.peak_allocated_bytes == max(peaks)
    assert not list(tmp_path.glob("*.tmp"))


@slow
def test_a_rank_of_512_alone_counts_what_the_layout_would_hold(tmp_path: Path) -> None:
    layout = {"dp_shard": 32, "tp": 4, "pp": 4, "ac": "full", "param_dtype": "bfloat16"}
    job = {"seq_len": 4096, "global_batch_size": 256, "trainer": "torchtitan"}
    model = {"base": "llama3.2-1b", "num_hidden_layers": 6, "tie_word_embeddings": False}
    given = task(layout, num_gpus=512, model=model, training=job, fake_tensors=True)
    given["job"]["cluster"]["gpu"] = "h100-sxm-80gb"
    peaks = []
    for rank in (0, 128, 511):
        started = start(tmp_path / str(rank), {**given, "emulate_rank": rank})
        result, out = started.result, started.run()
        assert (out.step_seconds, out.losses, result.rung) == (None, [], "emulated")
        assert out.counts is not None
        assert min(out.counts["flops"], out.counts["send_bytes"]) > 0
        peaks.append(out.memory[0].peak_allocated_bytes or 0)
    estimate = estimate_job(result.task.parsed())
    assert estimate.memory is not None
    # benchmarks/emulated_memory.py looks closer
    assert peaks[1] == pytest.approx(estimate.memory.stages[1].peak_allocated_bytes, rel=0.25)
    assert min(peaks[0], peaks[2]) > peaks[1]  # the ends hold the vocabulary


@slow
def test_an_emulated_rank_computes_for_real(tmp_path: Path) -> None:
    layout = {"dp_shard": 2, "tp": 2, "ep": 2, "pp": 2}
    options = {"emulate_rank": 7, "steps": 2, "warmup_steps": 1}
    started = start(tmp_path, task(layout, num_gpus=8, model="moe", **options))
    result, out = started.result, started.run()
    assert out.step_seconds is not None
    assert out.losses == []
    assert [memory.rank for memory in out.memory] == [7]
    assert "no communication" in result.notes[0]
    assert result.gpu_seconds == pytest.approx(result.wall_seconds)


@slow
def test_the_tracker_says_of_a_real_step_what_fake_tensors_say(tmp_path: Path) -> None:
    options = {"emulate_rank": 1, "steps": 1, "warmup_steps": 1}
    given = task({"dp_shard": 2, "ac": "full"}, num_gpus=2, **options)
    real, fake = (
        start(tmp_path / str(fake), {**given, "fake_tensors": fake}).run().memory[0]
        for fake in (False, True)
    )
    assert real.peak_allocated_bytes == pytest.approx(fake.peak_allocated_bytes, rel=0.02)


@slow
def test_a_refused_layout_is_a_result(tmp_path: Path) -> None:
    started = start(tmp_path, task({"dp_shard": 3}, num_gpus=2))
    out = started.failed()
    assert (out.kind, started.codes) == (FailureKind.INVALID_LAYOUT, [1])
    assert not started.result.complete
    assert "dp_shard" in out.message
    assert started.error(0)["type"] == "planner.errors.SpecError"


@slow
def test_too_few_processes_are_a_refusal(tmp_path: Path) -> None:
    out = start(tmp_path, task({"dp_shard": 2}, num_gpus=2)).failed()
    assert (out.kind, "start 2 processes" in out.message) == (FailureKind.INVALID_LAYOUT, True)


@slow
def test_no_gpu_is_said_in_one_line(tmp_path: Path) -> None:
    hidden = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''"
    out = start(tmp_path, {**task({}), "device": "cuda"}, before=hidden).failed()
    assert "torch sees no GPU" in out.message


@slow
def test_out_of_memory_says_how_much_was_wanted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "vocab_size": 128000}
    limit = "import resource, torch; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))"
    started = start(tmp_path, task({}, model={"base": "debug-tiny", **sizes}), before=limit)
    out = started.result.outcome
    assert isinstance(out, OutOfMemory), out
    assert out.rank == 0
    assert (out.attempted_bytes or 0) >= 1 << 20


@slow
def test_a_loss_that_is_no_number_ends_the_probe(tmp_path: Path) -> None:
    out = start(tmp_path, task({}, learning_rate=1e38)).failed()
    assert (out.kind, out.traceback is None) == (FailureKind.NON_FINITE_LOSS, False)


@slow
def test_the_first_cause_is_told_not_its_victim(tmp_path: Path) -> None:
    fault = (
        "import os\nimport planner.probes.reference.step as s\nplain = s.Trainer.step\n"
        "def step(self, index, size=None):\n"
        "    if os.environ['RANK'] == '1' and index == 1:\n"
        "        raise RuntimeError('rank one stumbles')\n"
        "    return plain(self, index, size)\ns.Trainer.step = step"
    )
    started = start(tmp_path, task({"dp_shard": 2}, num_gpus=2), world=2, before=fault)
    assert started.codes == [1, 1]
    victim, cause = started.error(0), started.error(1)
    assert cause["message"] == "rank one stumbles"
    assert "raise RuntimeError" in cause["traceback"]
    assert victim["time"] > cause["time"]
    out = started.failed()
    assert (out.rank, out.message) == (1, "RuntimeError: rank one stumbles")


def test_a_result_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "first")

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "second")
    assert path.read_text() == "first"
