"""The worker as torchrun starts it: one result file whatever happens, and an error file of every
rank that fails first.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.estimates import estimate_job
from planner.probes.causes import TRIED, size_in
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, OutOfMemory, ProbeResult
from planner.probes.worker import error_path, rank_error, write_atomically
from tests.conftest import ROOT, clean_environment, needed
from tests.e2e.probe_jobs import task

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

    def error(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(error_path(self.path, rank).read_text(encoding="utf-8"))
        return found


def start(
    folder: Path, given: dict[str, Any], *, world: int = 1, torchrun: bool = False, before: str = ""
) -> Started:
    """Runs the worker on this task. before: Python that runs in each process first, where a fault
    has to be provoked.
    """
    needed("torch")
    (folder / "task.json").write_text(json.dumps(given), encoding="utf-8")
    arguments = [str(folder / "task.json"), str(folder / "result.json")]
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    if torchrun:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
            "-m",
            "planner.probes.worker",
        ]
        done = subprocess.run(
            [*launch, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=ROOT,
        )
        return Started(folder, [done.returncode], done.stderr)
    program = folder / "program.py"
    program.write_text(
        f"{before}\nimport sys\nfrom planner.probes.worker import end, main\n"
        "end(main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env={**environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return Started(folder, [process.returncode for process in processes], "\n".join(said))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# ---- numbers -------------------------------------------------------------------------------------


@slow
def test_two_processes_under_torchrun_measure_a_layout(tmp_path: Path) -> None:
    given = task(
        {"dp_shard": 2}, num_gpus=2, steps=12, warmup_steps=2, spread_below=100.0, breakdown=True
    )
    started = start(tmp_path, given, world=2, torchrun=True)
    result = started.result
    out = result.outcome
    assert isinstance(out, MeasuredRun), out
    assert started.codes == [0]
    assert (result.complete, result.rung) == (True, "probed")
    assert len(out.step_seconds_each) == 5  # they agree well enough after the first look
    assert out.step_seconds == sorted(out.step_seconds_each)[2] > 0
    assert len(out.losses) == len(out.gradient_norms) == 7
    assert out.tokens_per_second_per_gpu == pytest.approx(8 * 32 / 2 / out.step_seconds)
    assert out.mfu is not None
    assert [memory.rank for memory in out.memory] == [0, 1]
    # gloo's thread lets go of a buffer of 31 KB sooner or later, of three on a busy machine
    peaks = [memory.peak_allocated_bytes for memory in out.memory]
    assert max(peaks) - min(peaks) <= 4 * 32_768
    assert out.kernel_seconds is not None
    assert any("mm" in name for name in out.kernel_seconds)
    assert result.environment.torch is not None
    assert result.gpu_seconds == pytest.approx(2 * result.wall_seconds)
    numbers = result.measurement().measured
    assert numbers.peak_allocated_bytes == max(
        memory.peak_allocated_bytes or 0 for memory in out.memory
    )
    assert not list(tmp_path.glob("*.tmp"))


@slow
def test_a_rank_of_512_alone_counts_what_the_layout_would_hold(tmp_path: Path) -> None:
    layout = {"dp_shard": 32, "tp": 4, "pp": 4, "ac": "full", "param_dtype": "bfloat16"}
    job = {"seq_len": 4096, "global_batch_size": 256, "trainer": "torchtitan"}
    model = {"base": "llama3.2-1b", "num_hidden_layers": 6, "tie_word_embeddings": False}
    peaks = []
    for rank in (0, 128, 511):
        folder = tmp_path / str(rank)
        folder.mkdir()
        given = task(
            layout, num_gpus=512, model=model, training=job, emulate_rank=rank, fake_tensors=True
        )
        given["job"]["cluster"] = {"gpu": "h100-sxm-80gb", "num_gpus": 512}
        result = start(folder, given).result
        out = result.outcome
        assert isinstance(out, MeasuredRun), out
        assert (out.step_seconds, out.losses, result.rung) == (None, [], "emulated")
        assert out.counts is not None
        assert out.counts["flops"] > 0
        assert out.counts["send_bytes"] > 0
        peaks.append(out.memory[0].peak_allocated_bytes or 0)
    estimate = estimate_job(result.task.parsed())
    assert estimate.memory is not None
    # benchmarks/emulated_memory.py looks closer
    assert peaks[1] == pytest.approx(estimate.memory.stages[1].peak_allocated_bytes, rel=0.25)
    assert min(peaks[0], peaks[2]) > peaks[1]  # the ends hold the vocabulary


@slow
def test_an_emulated_rank_computes_for_real(tmp_path: Path) -> None:
    given = task(
        {"dp_shard": 2, "tp": 2, "ep": 2, "pp": 2},
        num_gpus=8,
        model="moe",
        emulate_rank=7,
        steps=2,
        warmup_steps=1,
    )
    result = start(tmp_path, given).result
    out = result.outcome
    assert isinstance(out, MeasuredRun), out
    assert out.step_seconds is not None
    assert out.losses == []
    assert [memory.rank for memory in out.memory] == [7]
    assert "no communication" in result.notes[0]
    assert result.gpu_seconds == pytest.approx(result.wall_seconds)


@slow
def test_the_tracker_says_of_a_real_step_what_fake_tensors_say(tmp_path: Path) -> None:
    peaks = []
    for fake in (False, True):
        folder = tmp_path / str(fake)
        folder.mkdir()
        given = task(
            {"dp_shard": 2, "ac": "full"},
            num_gpus=2,
            emulate_rank=1,
            fake_tensors=fake,
            steps=1,
            warmup_steps=1,
        )
        out = start(folder, given).result.outcome
        assert isinstance(out, MeasuredRun), out
        peaks.append(out.memory[0].peak_allocated_bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


# ---- failures are results ------------------------------------------------------------------------


@slow
def test_a_refused_layout_is_a_result(tmp_path: Path) -> None:
    started = start(tmp_path, task({"dp_shard": 3}, num_gpus=2))
    result = started.result
    assert isinstance(result.outcome, Failed)
    assert (result.outcome.kind, result.complete, started.codes) == (
        FailureKind.INVALID_LAYOUT,
        False,
        [1],
    )
    assert "dp_shard" in result.outcome.message
    assert started.error(0)["type"] == "planner.errors.SpecError"


@slow
def test_too_few_processes_are_a_refusal(tmp_path: Path) -> None:
    out = start(tmp_path, task({"dp_shard": 2}, num_gpus=2)).result.outcome
    assert isinstance(out, Failed)
    assert (out.kind, "start 2 processes" in out.message) == (FailureKind.INVALID_LAYOUT, True)


@slow
def test_no_gpu_is_said_in_one_line(tmp_path: Path) -> None:
    out = start(
        tmp_path,
        {**task({}), "device": "cuda"},
        before="import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''",
    ).result.outcome
    assert isinstance(out, Failed)
    assert "torch sees no GPU" in out.message


@slow
def test_out_of_memory_says_how_much_was_wanted(tmp_path: Path) -> None:
    wide = {
        "base": "debug-tiny", "hidden_size": 4096, "intermediate_size": 16384,
        "vocab_size": 128000,
    }  # fmt: skip
    limit = (
        "import resource, torch; held = 3 << 30; resource.setrlimit(resource.RLIMIT_AS, (held, "
        "held))"
    )
    started = start(tmp_path, task({}, model=wide), before=limit)
    out = started.result.outcome
    assert isinstance(out, OutOfMemory), out
    assert out.rank == 0
    assert out.attempted_bytes is not None
    assert out.attempted_bytes >= 1 << 20
    assert started.error(0)["kind"] == "oom"


@slow
def test_a_loss_that_is_no_number_ends_the_probe(tmp_path: Path) -> None:
    started = start(tmp_path, task({}, learning_rate=1e38))
    out = started.result.outcome
    assert isinstance(out, Failed)
    assert out.kind is FailureKind.NON_FINITE_LOSS
    assert out.traceback is not None


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
    assert started.error(1)["message"] == "rank one stumbles"
    assert "raise RuntimeError" in started.error(1)["traceback"]
    assert started.error(0)["time"] > started.error(1)["time"]
    out = started.result.outcome
    assert isinstance(out, Failed)
    assert (out.rank, out.message) == (1, "rank one stumbles")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 "
            "GiB",
            2 * 2**30,
        ),
        ("CUDA out of memory. Tried to allocate 20.50 MiB.", int(20.5 * 2**20)),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        (
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 1073741824 bytes.",
            2**30,
        ),
        ("CUDA out of memory.", None),
    ],
)
def test_attempted_bytes(message: str, expected: int | None) -> None:
    assert size_in(TRIED, message) == expected


def test_kinds_are_given_only_where_they_are_sure() -> None:
    assert rank_error(ImportError("no torchao"), 0).kind == "import-error"
    assert rank_error(RuntimeError("Connection closed by peer"), 3).kind is None
    assert rank_error(ValueError(), 0).message == "ValueError"


def test_a_result_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "first")

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "second")
    assert path.read_text() == "first"
