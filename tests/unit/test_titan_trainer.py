"""TorchTitan as a trainer: commands for each version, and logs of record.py read back."""

import itertools
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from planner.probes.evidence import Evidence
from planner.probes.protocol import (
    Environment,
    Failed,
    FailureKind,
    MeasuredRun,
    OutOfMemory,
    ProbeTask,
)
from planner.probes.trainers import Program
from planner.probes.trainers.tensorboard_events import read_scalars
from planner.probes.trainers.titan_log import read_log
from planner.probes.trainers.titan_outcome import read_outcome
from planner.probes.trainers.torchtitan import OUTPUTS, PACKAGES, TitanTrainer
from planner.units import GIB
from tests.conftest import job_values

LOGS = Path(__file__).parents[1] / "fixtures" / "titan_logs"
INSTALLED = dict.fromkeys(PACKAGES, "1.0") | {"torch": "2.14.0.dev20261101+cu130"}


def trainer(monkeypatch: pytest.MonkeyPatch, **versions: str) -> TitanTrainer:
    found = {name: version for name, version in {**INSTALLED, **versions}.items() if version}
    monkeypatch.setattr(TitanTrainer, "versions", lambda self: found)
    return TitanTrainer(python="python")


def task(layout: dict | None = None, training: dict | None = None, **values: Any) -> ProbeTask:
    model, gpus = values.pop("model", "llama3-8b"), values.pop("gpus", 8)
    job = job_values(model, "h100-sxm-80gb", gpus, 4096, 32, layout=layout or {})
    job["training"] |= training or {}
    return ProbeTask.model_validate({"id": "p", "job": job, "trainer": "torchtitan", **values})


def program(patch: pytest.MonkeyPatch, asked: ProbeTask, version: str = "0.2.2") -> Program:
    found = trainer(patch, torchtitan=version).program(asked)
    assert isinstance(found, Program), found
    return found


def measured(asked: ProbeTask, log: str, folder: Path | None = None) -> MeasuredRun:
    found = read_outcome(asked, Evidence(log=log), folder and folder / OUTPUTS)
    assert isinstance(found, MeasuredRun), found
    return found


def failed(asked: ProbeTask, log: str, **end: Any) -> Failed:
    found = read_outcome(asked, Evidence(log=log, **end))
    assert isinstance(found, Failed), found
    return found


def flags(found: Program) -> dict[str, str]:
    """Last value of every flag, as a command line is read."""
    items = [*found.arguments, "--"]
    return {item: after for item, after in itertools.pairwise(items) if item.startswith("--")}


def recorded(name: str) -> tuple[ProbeTask, str]:
    task, log = ((LOGS / f"{name}{end}").read_text() for end in (".task.json", ".log"))
    return ProbeTask.model_validate_json(task), log


@pytest.mark.parametrize(
    "version", ["0.2.0", "0.2.1", "0.2.2", "0.2.7", "0.2.2+git1234", "0.3.0", "0.3.1"]
)
def test_every_version_has_a_command(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    asked = task({"tp": 2, "ac": "full"}, warmup_steps=3, steps=7)
    found = program(monkeypatch, asked, version)
    said = flags(found)
    assert (said["--training.steps"], said["--metrics.log_freq"]) == ("10", "1")
    assert not found.single
    if version.startswith("0.2"):
        toml = tomllib.loads(found.files["train.toml"])
        mode = toml["activation_checkpoint"]["mode"]
        assert (toml["parallelism"]["tensor_parallel_degree"], mode) == (2, "full")
        assert (said["--training.dataset"], said["--model.hf_assets_path"]) == ("c4_test", "assets")
    else:
        assert said["--parallelism.tensor_parallel_degree"] == "2"
        assert said["--hf_assets_path"] == "assets"
        assert found.arguments[-1] == "activation-checkpoint:full"


@pytest.mark.parametrize(("model", "routing", "even"), [
    ("deepseek-v2-lite", "balanced", True), ("deepseek-v2-lite", "learned", False),
    ("llama3-8b", "balanced", False),
])  # fmt: skip
def test_experts_are_dealt_tokens_evenly(
    monkeypatch: pytest.MonkeyPatch, model: str, routing: str, even: bool
) -> None:
    found = program(monkeypatch, task(model=model, routing=routing))
    assert ("--debug.moe_force_load_balance" in found.arguments) is even


def test_a_probes_data_feeds_every_rank_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(monkeypatch, task({"tp": 2}, training={"seq_len": 65536}))
    lines = found.files["data/train.jsonl"].splitlines()
    rows = [json.loads(line)["text"].split() for line in lines]
    vocabulary = json.loads(found.files["assets/tokenizer.json"])["model"]["vocab"]
    assert len(rows) == 4
    assert {len(words) for words in rows} == {65536}
    assert {word for words in rows for word in words} <= set(vocabulary)
    assert max(vocabulary.values()) < 100
    assert rows[0] != rows[1]


def test_nothing_is_downloaded_and_no_checkpoint_written(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"base": "llama3-8b", "num_hidden_layers": 4}
    asked = task(training={"checkpoint": {"interval_steps": 1}}, model=few)
    found = program(monkeypatch, asked)
    assert found.env["HF_HUB_OFFLINE"] == found.env["HF_DATASETS_OFFLINE"] == "1"
    said = tomllib.loads(found.files["train.toml"])
    assert (said["checkpoint"]["enable"], said["model"]["name"]) == (False, "planner_model")
    assert "n_layers=4," in found.files["planner_model.py"]


def test_the_allocator_is_the_one_the_plan_was_priced_for(monkeypatch: pytest.MonkeyPatch) -> None:
    env = program(monkeypatch, task()).env
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # torch from 2.9, and before
        assert env[name] == "expandable_segments:True"
    given = "max_split_size_mb:64,expandable_segments:True,roundup_power2_divisions:[256:1,512:2]"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    plain = program(monkeypatch, task(training={"expandable_segments": False})).env
    assert plain["PYTORCH_ALLOC_CONF"] == plain["PYTORCH_CUDA_ALLOC_CONF"]
    assert plain["PYTORCH_ALLOC_CONF"] == (
        "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2],expandable_segments:False"
    )


@pytest.mark.parametrize("version", ["0.2.1", "0.2.2", "0.3.0"])
def test_an_emulated_rank_is_one_process_of_the_whole_world(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    asked = task({"dp_shard": 32, "tp": 8}, gpus=256, model="llama3-70b", emulate_rank=3)
    found = program(monkeypatch, asked, version)
    assert (found.single, found.target) == (True, "torchtitan.train")
    assert flags(found)["--comm.mode"] == "fake_backend"
    world = {"NGPU": "256", "WORLD_SIZE": "256", "RANK": "3", "LOCAL_RANK": "0"}
    assert {name: found.env[name] for name in world} == world


REFUSED = {
    "absent": (dict(torchtitan=""), {}, FailureKind.IMPORT,
        "torchtitan is not installed; pip install torchtitan==0.2.2"),
    "another line": (dict(torchtitan="0.1.0"), {}, FailureKind.IMPORT,
        "torchtitan 0.1.0 is installed and the planner writes for 0.2.0, "),
    "no triton": (dict(torchtitan="0.2.2", triton=""), {}, FailureKind.IMPORT,
        "torchtitan 0.2.2 needs triton; pip install triton"),
    "torch too old": (dict(torchtitan="0.3.0", torch="2.13.0"), {}, FailureKind.IMPORT,
        "torchtitan 0.3.0 needs torch 2.14 or a nightly"),
    "no emulation": (dict(torchtitan="0.2.0"), {"emulate_rank": 0}, FailureKind.IMPORT,
        "torchtitan 0.2.0 has no fake_backend mode"),
    "cpu": (dict(torchtitan="0.2.2"), {"device": "cpu"}, FailureKind.INVALID_LAYOUT,
        "use --trainer reference"),
    "fake": (dict(torchtitan="0.2.2"), {"fake_tensors": True}, FailureKind.INVALID_LAYOUT,
        "use --trainer reference"),
    "emulated pipeline": (dict(torchtitan="0.2.2"), {"layout": {"pp": 2}, "emulate_rank": 0},
        FailureKind.INVALID_LAYOUT, "cannot emulate a pipeline stage"),
    "exported with a gap": (dict(torchtitan="0.3.0"), {"layout": {"cp": 2, "cp_method":
        "alltoall"}}, FailureKind.INVALID_LAYOUT, "cp_method='alltoall'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    versions, asked, kind, said = REFUSED[name]
    found = trainer(monkeypatch, **versions).program(task(**asked))  # type: ignore[arg-type]
    assert isinstance(found, Failed)
    assert (found.kind, "\n" in found.message) == (kind, False)
    assert said in found.message


def test_versions_of_another_interpreter_are_read_without_importing(tmp_path: Path) -> None:
    assert TitanTrainer(python=str(tmp_path / "none")).versions() == {}
    here = TitanTrainer().versions()
    assert "torchtitan" not in here or here["torchtitan"][0].isdigit()


@pytest.mark.parametrize("name", [
    "0.2.0-single", "0.2.1-single", "0.2.2-single", "0.2.2-fsdp2-tp2", "0.2.2-fsdp2-pp2",
    "0.3.0-single",
])  # fmt: skip
def test_a_real_run_of_each_version_gives_its_numbers(name: str) -> None:
    asked, log = recorded(name)
    found = measured(asked, log)
    steps = asked.warmup_steps + asked.steps
    assert len(found.step_seconds_each) == asked.steps
    assert len(found.losses) == len(found.gradient_norms) == steps
    # log(vocabulary) is the loss of a model that knows nothing
    assert found.losses[0] == pytest.approx(math.log(2048), rel=0.08)
    assert found.losses[-1] < found.losses[0]
    assert [rank.rank for rank in found.memory] == list(range(asked.num_processes()))
    assert all(0.3 * GIB < rank.peak_reserved_bytes < 2 * GIB for rank in found.memory)
    tokens = 4 * 256 / asked.num_processes()
    assert found.tokens_per_second_per_gpu == pytest.approx(tokens / found.step_seconds)
    # 0.2.0 does not log its version
    assert read_log(log).version == (None if name.startswith("0.2.0") else name.partition("-")[0])
    ran = Environment(python="3.12.1", torch="2.11.0", trainer_version="of its packages")
    found_there = TitanTrainer().environment(log, ran)
    there = (found_there.gpu_name, found_there.python, found_there.torch)
    assert there == ("CPU", "3.12.1", "2.11.0")


def test_event_files_say_seconds_exactly_and_the_log_agrees(tmp_path: Path) -> None:
    asked, log = recorded("0.2.2-fsdp2-tp2")
    for rank in range(4):
        place = tmp_path / "outputs" / "tb" / "20260101-0000" / f"rank_{rank}"
        place.mkdir(parents=True)
        events = (LOGS / f"0.2.2-fsdp2-tp2.rank_{rank}.tfevents").read_bytes()
        (place / "events.out.tfevents.1").write_bytes(events)
    exact, rough = (measured(asked, log, folder) for folder in (tmp_path, None))
    whole = read_scalars(LOGS / "0.2.2-fsdp2-tp2.rank_0.tfevents")["time_metrics/end_to_end(s)"]
    assert whole.keys() == set(range(1, 7))
    for step, seconds in enumerate(exact.step_seconds_each, start=asked.warmup_steps + 1):
        assert seconds >= whole[step]
    assert exact.step_seconds == pytest.approx(rough.step_seconds, rel=0.1)
    own, other = exact.memory[2], rough.memory[2]
    near = pytest.approx(other.peak_reserved_bytes, abs=0.006 * GIB)
    # a log line does not tell retries
    assert (own.peak_reserved_bytes, own.allocator_retries) == (near, 0)
    assert other.allocator_retries is None


def test_the_loss_of_a_pipeline_is_that_of_its_last_stage() -> None:
    asked, log = recorded("0.2.2-fsdp2-pp2")
    lines = read_log(log).by_rank()
    assert {line.loss < 0 for line in lines[0].values()} == {True}
    assert {line.loss > 0 for line in lines[3].values()} == {True}
    found = measured(asked, log)
    assert min(found.losses) > 0
    # 0.2 does not divide pipelined gradients by the tokens: a habit, not a fault
    assert max(found.gradient_norms) > 500


def test_an_emulated_rank_has_memory_and_time_and_its_loss_is_not_judged() -> None:
    asked, log = recorded("0.2.2-emulated-16")
    failed(asked, log.replace("loss: ", "loss: nan #"))
    unjudged = measured(asked, with_value(log, "loss", "nan"))
    assert (len(unjudged.memory), unjudged.step_seconds > 0) == (1, True)


def with_value(log: str, name: str, value: str) -> str:
    return re.sub(rf"{name}:\s+\S+", f"{name}: {value:>8}", log)


@pytest.mark.parametrize(("name", "column", "value", "kind", "words"), [
    ("0.2.2-single", "loss", "nan", FailureKind.NON_FINITE_LOSS, "step 1"),
    ("0.3.0-single", "grad_norm", "nan", FailureKind.NON_FINITE_LOSS, ""),
    ("0.3.0-single", "grad_norm", "0.0000", FailureKind.CRASH, ""),
    ("0.3.0-single", "grad_norm", "98765.4321", FailureKind.CRASH, ""),
])  # fmt: skip
def test_losses_and_gradient_norms_must_be_plausible(
    name: str, column: str, value: str, kind: FailureKind, words: str
) -> None:
    asked, log = recorded(name)
    found = failed(asked, with_value(log, column, value))
    assert (found.kind, words in found.message) == (kind, True)


def test_a_run_that_stops_early_is_no_measurement() -> None:
    asked, log = recorded("0.2.2-single")
    cut = log[: log.index("step:  5")]
    assert failed(asked, cut).kind == FailureKind.CRASH
    assert failed(asked, cut, reason="time-limit").kind == FailureKind.TIMEOUT


FAILED = {
    "0.2.2-unknown-flag": (FailureKind.INVALID_LAYOUT,
        "Unrecognized options: --training.no_such_flag, 1"),
    "0.3.0-unknown-flag": (FailureKind.INVALID_LAYOUT, "--training.no_such_flag"),
    "0.2.2-uneven-batch": (FailureKind.INVALID_LAYOUT,
        "global batch size must be multiple of local batch size times data-parallel degree"),
    "0.2.2-layers-over-stages": (FailureKind.INVALID_LAYOUT, "ValueError: Number of "),
    "0.3.0-stock-torch": (FailureKind.IMPORT,
        "torchtitan 0.3.0 does not run with what is installed: AttributeError: module 'torch.dist"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_real_failures_have_their_class_and_first_cause(name: str) -> None:
    kind, said = FAILED[name]
    found = failed(*recorded(name))
    assert (found.kind, said in found.message) == (kind, True), found
    assert "ChildFailedError" not in found.message


def test_out_of_memory_is_a_result_with_the_attempted_bytes() -> None:
    asked, log = recorded("0.2.2-fsdp2-tp2")
    begun = log[: log.index("step:  3")]
    # the text of c10/cuda/CUDACachingAllocator.cpp as torch 2.13 prints it
    said = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 2 has a "
        "total capacity of 79.10 GiB of which 3.42 GiB is free. Process 1234 has 75.67 GiB memory "
        "in use. Of the allocated memory 70.12 GiB is allocated by PyTorch, and 3.01 GiB is "
        "reserved by PyTorch but unallocated."
    )
    lines = ["Traceback (most recent call last):", '  File "torchtitan/train.py", line 1', said]
    text = "\n".join([begun, *(f"[rank2]:[rank2]: {line}" for line in lines)])
    found = read_outcome(asked, Evidence(log=f"{text}\n"))
    assert isinstance(found, OutOfMemory), found
    sizes = (round(7.83 * GIB), round(70.12 * GIB))
    assert (found.rank, found.attempted_bytes, found.allocated_bytes) == (2, *sizes)


def test_colours_thousands_and_missing_parts_are_read() -> None:
    line = (
        "\x1b[31mstep: 10  \x1b[32mloss:  7.12345  \x1b[38;2;180;60;0mgrad_norm:  1.2000  "
        "\x1b[38;2;54;234;195mmemory: 66.60GiB(84.20%)  "
        "\x1b[34mtps: 12,345  \x1b[36mtflops: 1,234.50  \x1b[35mmfu: N/A\x1b[39m"
    )
    (step,) = read_log(line).steps
    found = (step.step, step.loss, step.gradient_norm, step.tokens_per_second)
    assert found == (10, 7.12345, 1.2, 12345.0)
    assert step.reserved_bytes == pytest.approx(66.6 * GIB)
    assert (step.rank, step.logged_at) == (None, None)
    rest = "step:  1  loss:  8.0  memory:  0.66GiB(2.81%)  tps: 45"
    assert [old.gradient_norm for old in read_log(f"{rest}  mfu: 1.00%").steps] == [None]
    assert read_log(f"validate {rest}").steps == ()


def test_slow_steps_are_timed_by_the_clock_of_the_log() -> None:
    asked, log = recorded("0.2.2-single")
    slow, real = (measured(asked, one).step_seconds for one in (with_value(log, "tps", "3"), log))
    assert slow == pytest.approx(real, rel=0.1)


def test_an_event_file_cut_short_gives_what_was_whole(tmp_path: Path) -> None:
    data = (LOGS / "0.2.2-single.rank_0.tfevents").read_bytes()
    whole = read_scalars(LOGS / "0.2.2-single.rank_0.tfevents")["throughput(tps)"]
    path = tmp_path / "events"
    path.write_bytes(data[: len(data) // 2])
    cut = read_scalars(path)["throughput(tps)"]
    assert 0 < len(cut) < len(whole)
    assert all(whole[step] == value for step, value in cut.items())
