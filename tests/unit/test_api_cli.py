"""The command line in this process: flags into jobs, errors in a line each, no half answers."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from planner.api.cli.files import write_file, write_folder
from planner.api.cli.flags import (
    job_of_flags,
    parse_checkpoint,
    parse_choices,
    parse_count,
    parse_pair,
)
from planner.api.cli.root import COMMANDS, tree
from planner.api.docstrings import notes_in
from planner.api.render.plan import short_path
from planner.api.settings import Settings
from planner.api.storage.store import SqlStore
from planner.api.wiring import wire
from planner.errors import SpecError, StoreError
from tests.conftest import MAIN_JOB, job_values
from tests.unit.conftest import Say


def flags(**given: Any) -> dict[str, Any]:
    return job_of_flags(given)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_override_the_file(tmp_path: Path) -> None:
    text = (
        "model: a\ncluster: {gpu: x, num_gpus: 8, power_limit: 500 W}\ntraining: {seq_len: "
        "1}\nsearch: {fix: {tp: 1, cp: 2}}\n"
    )
    own = {"seq_len": 2, "trainer": None, "seed": 0, "fix": ["tp=8"], "allow": ["ac=full,none"]}
    job = written(tmp_path / "job.yaml", text)
    assert flags(job=str(job), model="b", num_gpus="16", **own) == {
        "model": "b",
        "cluster": {"gpu": "x", "num_gpus": 16, "power_limit": "500 W"},
        "training": {"seq_len": 2},
        "search": {"fix": {"tp": 8, "cp": 2}, "seed": 0, "allow": {"ac": ["full", "none"]}},
    }


def test_a_named_cluster_can_be_resized_or_read_from_a_file(tmp_path: Path) -> None:
    cluster = flags(cluster="h100-256", num_gpus="128")["cluster"]
    assert (cluster["num_gpus"], cluster["gpu"]) == (128, "h100-sxm-80gb")
    assert not {"source", "aliases"} & set(cluster)
    path = written(tmp_path / "mine.yaml", "gpu: h100\nnum_gpus: 8\nsource: me\n")
    assert flags(cluster=str(path))["cluster"] == {"gpu": "h100", "num_gpus": 8}
    with pytest.raises(SpecError, match="beside --cluster"):
        flags(cluster="h100-256", gpu="h100")


def test_what_a_whole_run_costs_has_flags() -> None:
    run = {"total_tokens": "15T", "checkpoint": "500:sync"}
    values = flags(cluster="h100-256", price_per_gpu_hour=1.5, **run)
    assert (values["cluster"]["price_per_gpu_hour"], values["cluster"]["num_gpus"]) == (1.5, 256)
    saving = {"interval_steps": 500, "mode": "sync"}
    assert values["training"] == {"total_tokens": "15T", "checkpoint": saving}
    assert parse_checkpoint("20") == {"interval_steps": 20}


@pytest.mark.parametrize(("read", "text", "value"), [
    *((parse_pair, f"{name}={text}", (name, value)) for name, text, value in (
        ("tp", "8", 8), ("compile", "true", True), ("ac", "none", "none"),
        ("pp_schedule", "1F1B", "1F1B"), ("ac", "memory-budget-0.5", "memory-budget-0.5"),
        ("layers_per_stage", "[4, 4]", [4, 4]),
    )),
    (parse_choices, "precision=bf16,float8-rowwise", ("precision", ["bf16", "float8-rowwise"])),
    (parse_choices, "layers_per_stage=[1,2],[2,1]", ("layers_per_stage", [[1, 2], [2, 1]])),
    (parse_count, "256", 256), (parse_count, "64..1024", "64..1024"),
    (parse_count, "64,96", [64, 96]), (parse_count, "[8, 16]", [8, 16]),
])  # fmt: skip
def test_values_of_flags_are_yaml(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(("read", "texts"), [
    (parse_checkpoint, ["", "often", "5:", ":sync", "-5", "1.5"]),
    (parse_pair, ["tp", "=8", "tp=", "tp={", "tp=.nan"]),
    (parse_choices, ["tp", "=8", "tp=", "tp={", "tp=.nan"]),
], ids=["checkpoint", "fix", "allow"])  # fmt: skip
def test_broken_values_of_flags(read: Callable[[str], object], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(SpecError, match="STEPS:MODE" if read is parse_checkpoint else "."):
            read(text)


@pytest.mark.parametrize("arguments", [
    ["nope"], ["--nope"], ["recommend", "--seq-len", "x"], ["estimate"],
    ["estimate", "--job", "/", "--jobs", "/"], ["estimate", "--jobs", "/"],
    ["estimate", "--jobs", "/no/such.jsonl"], ["explain", "plan-nope"], ["explain", "\0"],
    ["export", "plan-nope"], ["catalog"], ["catalog", "planets"], ["catalog", "gpus", "h1000"],
    ["db"], ["db", "sink"], ["serve", "--port", "70000"], ["serve", "--host", "0.0.0.0"],
    *(["recommend", *MAIN_JOB, *wrong.split()] for wrong in (
        "--probe 1", "--fix tp", "--fix nope=1", "--fix tp=x", "--fix tp=1 --fix tp=2",
        "--allow tp=1 --allow tp=2", '--fix ac="\\e[31mnone"', "--allow precision=bf17",
        "--objective fame", "--sampler dice", "--top-k 0", "--seed -1", "--trainer keras",
        "--seq-len -1", "--num-gpus 1e3", "--model llama3-8", "--model /no/such/config.json",
        "--current /no/such.json", "--job /", "--save-dir /proc/nope", "--model \udcff",
    )),
])  # fmt: skip
def test_wrong_requests_are_exit_2_with_one_line(arguments: list[str], say: Say) -> None:
    told = say(*arguments, code=2)
    assert (told.err.count("\n"), told.out) == (1, ""), told
    assert told.err.startswith("error: ")


def test_every_fault_has_its_line(say: Say) -> None:
    wrong = ["--model", "llama9", "--gpu", "h1000", "--num-gpus", "-8", "--seq-len", "0"]
    told = say("recommend", *wrong, "--json", code=2)
    lines = told.err.splitlines()
    assert len(lines) == len(told.json["error"]["errors"]) == 5
    assert all("; " in line and line.startswith("error: ") for line in lines)


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "llama3-8b"], ["--gpu", "h100-sxm-80gb", "--num-gpus", "8"]]
)
def test_what_is_missing_is_said_in_flags(arguments: list[str], say: Say) -> None:
    told = say("recommend", *arguments, code=2).err
    for flag in ("--model", "--gpu", "--num-gpus", "--seq-len", "--global-batch-size"):
        assert (f"error: {flag} is required" in told) == (flag not in arguments), told
    assert "None" not in told


@pytest.mark.parametrize("typed", ["8k", "8K"])
def test_a_sequence_may_be_8k_tokens_long_and_a_gpu_has_a_full_name(typed: str, say: Say) -> None:
    job = ["--seq-len", typed, "--gpu", "H100", "--fix", "pp=1", "--fix", "cp=1", "--top-k", "1"]
    shown = say("recommend", *MAIN_JOB, *job).out
    assert "llama3-8b (8.03B parameters) on 8 GPUs (h100-sxm-80gb)" in shown
    (name,) = {word.rstrip(";") for word in shown.split() if re.match(r"plan-\w+-\w+;", word)}
    assert say("show", name, "--json").json["job"]["training"]["seq_len"] == 8192


@pytest.mark.parametrize(("model", "shown"), [
    ("llama3-8b", "llama3-8b"), ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
    ("/models/mixtral/config.json", "mixtral"), ("config.json", "config"),
    ("configs/olmo2-7b.json", "olmo2-7b"), ("/models/mixtral", "mixtral"),
])  # fmt: skip
def test_models_from_files_have_short_names(model: str, shown: str) -> None:
    assert short_path(model) == shown


def test_home_is_expanded_in_what_is_to_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")  # test processes have few, and long folders
    told = say("recommend", *MAIN_JOB, "--top-k", "1", "--save-dir", "~/plan")
    assert f"cd {tmp_path}/plan/rank-01" in told.out
    names = {path.name for path in (tmp_path / "plan").iterdir()}
    assert names == {".planner", "plan.json", "plan.txt", "rank-01"}


@pytest.mark.parametrize("columns", ["40", "60"])
def test_narrow_terminals_show_layout_and_speed_whole(
    columns: str, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    head, _, _ = say("recommend", *MAIN_JOB, "--top-k", "2").out.partition("Memory of the fullest")
    assert "…" not in head
    assert "tokens/s/GPU" in head
    assert "\n    fsdp" in head, "the layout stands below its row"
    assert max(map(len, head.splitlines())) <= int(columns)
    monkeypatch.setenv("COLUMNS", "0")  # no columns
    assert "memory bandwidth" in say("catalog", "gpus").out


def test_a_bug_is_one_line_and_a_hint(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("what\nnow")

    monkeypatch.setattr("planner.api.cli.recommend.answer_on_paper", broken)
    hint = "PLANNER_DEBUG=1 shows where, please report it"
    line = f"bug: ZeroDivisionError: what now; {hint}\n"
    assert say("recommend", *MAIN_JOB, code=1).err == line
    monkeypatch.setenv("PLANNER_DEBUG", "1")
    assert "Traceback" in say("recommend", *MAIN_JOB, code=1).err


def test_a_file_that_cannot_be_written_is_named_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--trace=.*Is a directory"):
        write_file(tmp_path, "{}", "--trace")
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(SpecError, match="outside"):
        write_folder(target, {"fine": "", "../escape": ""})
    assert list(tmp_path.iterdir()) == []
    write_folder(target, {"a/b.txt": "1", "old": ""})
    write_folder(target, {"a/b.txt": "2"})
    files = [str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()]
    assert sorted(files) == [".planner", "a/b.txt"]
    for taken in (written(tmp_path / "file", ""), tmp_path):
        with pytest.raises(SpecError):
            write_folder(taken, {"a": ""})


def test_measurements_are_exported_as_json_lines_and_filters_are_checked(say: Say) -> None:
    assert say("measurements", "export", "--json").out == ""
    for command in (["list"], ["list", "--json"], ["export"]):
        told = say("measurements", *command, "--status", "fine", code=2)
        assert "use ok, oom, failed" in told.err
    say("measurements", "export", "--json", "--format", "csv", code=2)
    assert "TorchTitan log" in say("measurements", "import", "/no/such.jsonl", code=2).err


@pytest.mark.parametrize(("arguments", "field", "value"), [
    (["recommend", "--seq-len", "many"], "--seq-len", "many"),
    (["recommend", "--seq-len=many"], "--seq-len", "many"),
    (["recommend", "--sequence", "8"], "--sequence", None), (["explain"], "plan_id", None),
])  # fmt: skip
def test_a_usage_error_names_its_option_and_value(
    arguments: list[str], field: str, value: str | None, say: Say
) -> None:
    error = say(*arguments, "--json", code=2).json["error"]
    assert (error["type"], error["field"], error["value"]) == ("usage", field, value)


def test_calibrate_knows_its_gpu_by_name(say: Say) -> None:
    assert "--gpu='nope': no GPU of this name" in say("calibrate", "--gpu", "nope", code=2).err
    assert say("calibrate", "--gpu", "H100", "--json").out == "[]\n"


def test_accuracy_of_nothing_is_exit_2(tmp_path: Path, say: Say) -> None:
    told = say("accuracy", "--jobs", written(tmp_path / "jobs.jsonl", "not a job\n"), code=2)
    assert "holds no line that could be read" in told.err


SWEEP = """
name: nightly
schedule: "0 2 * * *"
jobs: [{model: debug-tiny, cluster: {gpu: h100-sxm-80gb, num_gpus: 1}, training: {seq_len: 64, global_batch_size: 4}}]
measure: {top_k: 0, anchors: [{ac: none}]}
"""  # noqa: E501


def test_a_sweep_that_could_measure_nothing_is_exit_4_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi: no GPU
    monkeypatch.setenv("PLANNER_PROBE_FOLDER", str(tmp_path / "probes"))
    monkeypatch.setenv("PLANNER_LEASE_FOLDER", str(tmp_path / "leases"))
    told = say("sweep", "run", written(tmp_path / "sweep.yaml", SWEEP), "--json", code=4)
    assert told.json["error"]["message"].startswith("no NVIDIA GPU to probe on")
    assert say("sweep", "list", "--json").json == []


def test_a_probe_is_run_as_its_job_says_unless_flags_say_otherwise(tmp_path: Path) -> None:
    from planner.api.cli.probe import _asked

    wished = {"pool": "slurm:gpu", "trainer": "torchtitan", "steps": 4}
    job = {**job_values("debug-tiny", "cpu", 2, 64, 4), "layout": {"dp_shard": 2}, "probe": wished}
    path = written(tmp_path / "job.json", json.dumps(job))
    for flags in ({}, {"trainer": "reference", "pool": "local"}):
        (one,) = _asked(wire(Settings(database_url="sqlite://")), str(path), None, 1, flags)
        assert {name: getattr(one.request, name) for name in wished} == {**wished, **flags}


@pytest.mark.parametrize("command", ["estimate", "simulate"])
def test_a_layout_is_priced_on_one_size(command: str, tmp_path: Path, say: Say) -> None:
    text = (
        "model: llama3-8b\ncluster: {gpu: h100, num_gpus: 16..64}\ntraining: {seq_len: 8192, "
        "global_batch_size: 64}\nlayout: {pp: 2}\n"
    )
    job = written(tmp_path / "job.yaml", text)
    error = say(command, "--job", job, "--json", code=2).json["error"]
    assert (error["field"], error["value"]) == ("cluster.num_gpus", "16..64")
    assert "choose one of 16, 32, 64" in error["remedy"]


@pytest.mark.parametrize(("trainer", "format"), [
    ("torchtitan", "torchtitan"), ("megatron", "megatron"), ("fsdp", "accelerate")])  # fmt: skip
def test_a_plan_is_exported_to_its_own_trainer(trainer: str, format: str, say: Say) -> None:
    narrow = ["--trainer", trainer, "--fix", "pp=1", "--fix", "cp=1", "--top-k", "1", "--json"]
    plan = say("recommend", *MAIN_JOB, *narrow).json
    assert say("export", plan["id"], "--json").json["trainer"] == format


def test_a_finished_plan_is_answered_even_where_it_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    def full(*_: object) -> None:
        raise StoreError("database /x.db: database or disk is full")

    monkeypatch.setattr(SqlStore, "save_plan", full)
    told = say("recommend", *MAIN_JOB, "--top-k", "1", "--json", code=4)
    assert told.json["ranked"][0]["rank"] == 1
    assert "error: the plan above was not stored: database /x.db" in told.err


def test_a_plan_that_nobody_reads_is_stored(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    """`recommend ... | head -1`, say."""

    def closed(*_: object) -> None:
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr("planner.api.cli.recommend.print_plan", closed)
        patched.setattr("planner.api.cli.root._drop_output", lambda: None)
        say("recommend", *MAIN_JOB, "--top-k", "1")
    assert say("plans", "--json").json["items"][0]["model"] == "llama3-8b"


def test_the_table_of_commands_has_each_commands_own_line_of_help(say: Say) -> None:
    commands: dict[str, Any] = get_command(tree()).commands  # type: ignore[attr-defined]
    assert {name: one.get_short_help_str(999) for name, one in commands.items()} == COMMANDS
    listed = say("--help").out.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in listed if line.strip()] == list(commands)


def test_every_flag_has_its_help_and_no_help_is_of_another() -> None:
    commands = [get_command(tree())]
    for command in commands:  # which grows by the commands of groups
        commands += getattr(command, "commands", {}).values()
        assert [one.name for one in command.params if "--" in one.opts[0] and not one.help] == []  # type: ignore[attr-defined]
        explained = notes_in(inspect.getdoc(command.callback) or "")
        assert explained.keys() <= {one.name for one in command.params}, command.name
