"""The command line in this process: flags into jobs, errors in a line each, no half answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from planner.api.cli.flags import JobFlags, parse_checkpoint, parse_choices, parse_count, parse_pair
from planner.api.cli.root import COMMANDS, run, tree
from planner.api.cli.saving import write_folder
from planner.api.cli.simulate import write_text
from planner.api.render.plan import short_path
from planner.api.storage.store import SqlStore
from planner.errors import SpecError, StoreError
from tests.conftest import job_values


@pytest.fixture(autouse=True)
def _own_database(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)
    monkeypatch.delenv("PLANNER_DEBUG", raising=False)


def flags(**given: Any) -> dict[str, Any]:
    names = ("job", "model", "gpu", "cluster", "num_gpus", "current", "probe")
    nothing: dict[str, Any] = dict.fromkeys(names)
    empty = {"training": {}, "search": {}, "fix": (), "allow": ()}
    return JobFlags(**{**nothing, **empty, **given}).values()


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: a\ncluster: {gpu: x, num_gpus: 8, power_limit: 500 W}\ntraining: {seq_len: "
        "1}\nsearch: {fix: {tp: 1, cp: 2}}\n"
    )
    values = flags(
        job=str(path),
        model="b",
        num_gpus="16",
        training={"seq_len": 2, "trainer": None},
        search={"seed": 0},
        fix=["tp=8"],
    )
    assert values == {
        "model": "b",
        "cluster": {"gpu": "x", "num_gpus": 16, "power_limit": "500 W"},
        "training": {"seq_len": 2},
        "search": {"fix": {"tp": 8, "cp": 2}, "seed": 0},
    }


def test_a_named_cluster_can_be_resized() -> None:
    values = flags(cluster="h100-256", num_gpus="128")
    assert (values["cluster"]["num_gpus"], values["cluster"]["gpu"]) == (128, "h100-sxm-80gb")
    assert not {"source", "aliases"} & set(values["cluster"])


def test_a_cluster_file_is_read_into_the_job(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: h100\nnum_gpus: 8\nsource: me\n")
    assert flags(cluster=str(path))["cluster"] == {"gpu": "h100", "num_gpus": 8}


def test_what_a_whole_run_costs_has_flags() -> None:
    values = flags(
        cluster="h100-256",
        price_per_gpu_hour=1.5,
        training={"total_tokens": "15T", "checkpoint": parse_checkpoint("500:sync")},
    )
    assert (values["cluster"]["price_per_gpu_hour"], values["cluster"]["num_gpus"]) == (1.5, 256)
    saving = {"interval_steps": 500, "mode": "sync"}
    assert values["training"] == {"total_tokens": "15T", "checkpoint": saving}
    assert parse_checkpoint("20") == {"interval_steps": 20}


@pytest.mark.parametrize("text", ["", "often", "5:", ":sync", "-5", "1.5"])
def test_broken_checkpoints(text: str) -> None:
    with pytest.raises(SpecError, match="STEPS:MODE"):
        parse_checkpoint(text)


def test_gpu_beside_cluster_is_refused() -> None:
    with pytest.raises(SpecError, match="beside --cluster"):
        flags(cluster="h100-256", gpu="h100")


@pytest.mark.parametrize(("text", "value"), [
    ("tp=8", 8),
    ("compile=true", True),
    ("ac=none", "none"),
    ("ac=memory-budget-0.5", "memory-budget-0.5"),
    ("layers_per_stage=[4, 4]", [4, 4]),
    ("pp_schedule=1F1B", "1F1B"),
])  # fmt: skip
def test_values_of_fix_are_yaml(text: str, value: object) -> None:
    assert parse_pair(text, "--fix") == (text.partition("=")[0], value)


def test_values_of_allow_are_a_list() -> None:
    found = parse_choices("precision=bf16,float8-rowwise")
    assert found == ("precision", ["bf16", "float8-rowwise"])
    assert parse_choices("layers_per_stage=[1,2],[2,1]") == ("layers_per_stage", [[1, 2], [2, 1]])


@pytest.mark.parametrize("text", ["tp", "=8", "tp=", "tp={", "tp=.nan"])
def test_broken_pairs(text: str) -> None:
    with pytest.raises(SpecError):
        parse_pair(text, "--fix")
    with pytest.raises(SpecError):
        parse_choices(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("256", 256), ("64..1024", "64..1024"), ("64,96", [64, 96]), ("[8, 16]", [8, 16])],
)
def test_counts(text: str, value: object) -> None:
    assert parse_count(text) == value


MAIN_JOB = [
    "--model", "llama3-8b", "--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--seq-len", "8192",
    "--global-batch-size", "64",
]  # fmt: skip


@pytest.mark.parametrize("arguments", [
    ["nope"],
    ["--nope"],
    ["recommend", "--seq-len", "x"],
    ["recommend", *MAIN_JOB, "--probe", "1"],
    ["recommend", *MAIN_JOB, "--fix", "tp"],
    ["recommend", *MAIN_JOB, "--fix", "nope=1"],
    ["recommend", *MAIN_JOB, "--fix", "tp=x"],
    ["recommend", *MAIN_JOB, "--fix", "tp=1", "--fix", "tp=2"],
    ["recommend", *MAIN_JOB, "--allow", "tp=1", "--allow", "tp=2"],
    ["recommend", *MAIN_JOB, "--fix", 'ac="\\e[31mnone"'],
    ["recommend", *MAIN_JOB, "--allow", "precision=bf17"],
    ["recommend", *MAIN_JOB, "--objective", "fame"],
    ["recommend", *MAIN_JOB, "--sampler", "dice"],
    ["recommend", *MAIN_JOB, "--top-k", "0"],
    ["recommend", *MAIN_JOB, "--seed", "-1"],
    ["recommend", *MAIN_JOB, "--trainer", "keras"],
    ["recommend", *MAIN_JOB, "--seq-len", "-1"],
    ["recommend", *MAIN_JOB, "--num-gpus", "1e3"],
    ["recommend", *MAIN_JOB, "--model", "llama3-8"],
    ["recommend", *MAIN_JOB, "--model", "/no/such/config.json"],
    ["recommend", *MAIN_JOB, "--current", "/no/such.json"],
    ["recommend", *MAIN_JOB, "--job", "/"],
    ["recommend", *MAIN_JOB, "--save-dir", "/proc/nope"],
    ["recommend", *MAIN_JOB, "--model", "\udcff"],
    ["estimate"],
    ["estimate", "--job", "/", "--jobs", "/"],
    ["estimate", "--jobs", "/"],
    ["estimate", "--jobs", "/no/such.jsonl"],
    ["explain", "plan-nope"],
    ["explain", "\0"],
    ["export", "plan-nope"],
    ["catalog"],
    ["catalog", "planets"],
    ["catalog", "gpus", "h1000"],
    ["db"],
    ["db", "sink"],
    ["serve", "--port", "70000"],
    ["serve", "--host", "0.0.0.0"],
])  # fmt: skip
def test_wrong_requests_are_exit_2_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(arguments)
    captured = capsys.readouterr()
    assert (code, captured.err.count("\n"), captured.out) == (2, 1, ""), captured
    assert captured.err.startswith("error: ")


def test_every_fault_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--model", "llama9", "--gpu", "h1000", "--num-gpus", "-8", "--seq-len", "0"]
    code = run(["recommend", *wrong, "--json"])
    captured = capsys.readouterr()
    assert (code, captured.err.count("\n")) == (2, 5)
    assert all("; " in line and line.startswith("error: ") for line in captured.err.splitlines())
    assert len(json.loads(captured.out)["error"]["errors"]) == 5


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "llama3-8b"], ["--gpu", "h100-sxm-80gb", "--num-gpus", "8"]]
)
def test_what_is_missing_is_said_in_flags(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["recommend", *arguments]) == 2
    told = capsys.readouterr().err
    for flag in ("--model", "--gpu", "--num-gpus", "--seq-len", "--global-batch-size"):
        assert (f"error: {flag} is required" in told) == (flag not in arguments), told
    assert "None" not in told


@pytest.mark.parametrize("typed", ["8k", "8K", "8192"])
def test_a_sequence_may_be_8k_tokens_long(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = [typed if word == "8192" else word for word in MAIN_JOB]
    assert run(["recommend", *job, "--top-k", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["training"]["seq_len"] == 8192


def test_a_named_gpu_is_shown_by_its_full_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recommend", *MAIN_JOB, "--gpu", "H100", "--top-k", "1"]) == 0
    assert "llama3-8b (8.03B parameters) on 8 GPUs (h100-sxm-80gb)" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "shown"), [
    ("llama3-8b", "llama3-8b"),
    ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
    ("/models/mixtral/config.json", "mixtral"),
    ("config.json", "config"),
    ("configs/olmo2-7b.json", "olmo2-7b"),
    ("/models/mixtral", "mixtral"),
])  # fmt: skip
def test_models_from_files_have_short_names(model: str, shown: str) -> None:
    assert short_path(model) == shown


def test_home_is_expanded_in_what_is_to_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")  # test processes have few, and long folders
    assert run(["recommend", *MAIN_JOB, "--top-k", "1", "--save-dir", "~/plan"]) == 0
    assert f"cd {tmp_path}/plan/rank-01" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["40", "60"])
def test_narrow_terminals_show_layout_and_speed_whole(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["recommend", *MAIN_JOB, "--top-k", "2"]) == 0
    shown = capsys.readouterr().out
    head, _, _ = shown.partition("Memory of the fullest")
    assert "…" not in head
    assert "tokens/s/GPU" in head
    assert "\n    fsdp" in head, "the layout stands below its row"
    assert max(map(len, head.splitlines())) <= int(columns)


def test_columns_of_zero_are_no_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert run(["catalog", "gpus"]) == 0
    assert "memory bandwidth" in capsys.readouterr().out


def test_a_bug_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("what\nnow")

    monkeypatch.setattr("planner.api.cli.recommend.answer_on_paper", broken)
    assert run(["recommend", *MAIN_JOB]) == 1
    assert (
        capsys.readouterr().err
        == "bug: ZeroDivisionError: what now; PLANNER_DEBUG=1 shows where, please report it\n"
    )
    monkeypatch.setenv("PLANNER_DEBUG", "1")
    assert run(["recommend", *MAIN_JOB]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--trace=.*Is a directory"):
        write_text(tmp_path, "{}", "--trace")
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(SpecError, match="outside"):
        write_folder(target, {"fine": "", "../escape": ""})
    assert list(tmp_path.iterdir()) == []
    write_folder(target, {"a/b.txt": "1", "old": ""})
    write_folder(target, {"a/b.txt": "2"})
    assert sorted(
        str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()
    ) == [".planner", "a/b.txt"]
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path):
        with pytest.raises(SpecError):
            write_folder(taken, {"a": ""})


def test_measurements_are_exported_as_json_lines_and_filters_are_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["measurements", "export", "--json"]) == 0
    assert capsys.readouterr().out == ""
    for command in (["list"], ["list", "--json"], ["export"]):
        assert run(["measurements", *command, "--status", "fine"]) == 2
        assert "use ok, oom, failed" in capsys.readouterr().err
    assert run(["measurements", "export", "--json", "--format", "csv"]) == 2
    assert run(["measurements", "import", "/no/such.jsonl"]) == 2
    assert "TorchTitan log" in capsys.readouterr().err


def test_a_usage_error_names_its_option_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, field, value in (
        (["recommend", "--seq-len", "many"], "--seq-len", "many"),
        (["recommend", "--seq-len=many"], "--seq-len", "many"),
        (["recommend", "--sequence", "8"], "--sequence", None),
        (["explain"], "plan_id", None),
    ):
        assert run([*arguments, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["type"], error["field"], error["value"]) == ("usage", field, value)


def test_what_is_not_there_comes_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "plan-nope", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "no plan of id 'plan-nope'"
    assert error["remedy"] == "`planner-cli plans` lists them"


def test_calibrate_knows_its_gpu_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--gpu", "nope"]) == 2
    assert "--gpu='nope': no GPU of this name" in capsys.readouterr().err
    assert run(["calibrate", "--gpu", "H100", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_accuracy_of_nothing_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("not a job\n")
    assert run(["accuracy", "--jobs", str(jobs)]) == 2
    assert "holds no line that could be read" in capsys.readouterr().err


SWEEP = """
name: nightly
schedule: "0 2 * * *"
jobs: [{model: debug-tiny, cluster: {gpu: h100-sxm-80gb, num_gpus: 1}, training: {seq_len: 64, global_batch_size: 4}}]
measure: {top_k: 0, anchors: [{ac: none}]}
"""  # noqa: E501


def test_sweeps_answer_in_json_and_a_cancelled_one_runs_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    assert run(["sweep", "schedule", str(path), "--json"]) == 0
    name = json.loads(capsys.readouterr().out)["id"]
    for command, state in (("pause", "paused"), ("resume", "active"), ("cancel", "cancelled")):
        assert run(["sweep", command, name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == state
    assert run(["sweep", "run", name, "--json"]) == 2
    assert "was cancelled" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_sweep_that_could_measure_nothing_is_exit_4_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi: no GPU
    monkeypatch.setenv("PLANNER_PROBE_FOLDER", str(tmp_path / "probes"))
    monkeypatch.setenv("PLANNER_LEASE_FOLDER", str(tmp_path / "leases"))
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    assert run(["sweep", "run", str(path), "--json"]) == 4
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["message"].startswith("no NVIDIA GPU to probe on")
    assert run(["sweep", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_probe_is_run_as_its_job_says_unless_flags_say_otherwise(tmp_path: Path) -> None:
    from planner.api.cli.probe import _asked
    from planner.api.wiring import wire

    path = tmp_path / "job.json"
    job = job_values("debug-tiny", "cpu", 2, 64, 4)
    wished = {"pool": "slurm:gpu", "trainer": "torchtitan", "steps": 4}
    path.write_text(json.dumps({**job, "layout": {"dp_shard": 2}, "probe": wished}))
    (one,) = _asked(wire(), str(path), None, 1, {})
    request = one.request
    assert (request.pool, request.trainer, request.steps) == ("slurm:gpu", "torchtitan", 4)
    (one,) = _asked(wire(), str(path), None, 1, {"trainer": "reference", "pool": "local"})
    assert (one.request.pool, one.request.trainer, one.request.steps) == ("local", "reference", 4)


@pytest.mark.parametrize("command", ["estimate", "simulate"])
def test_a_layout_is_priced_on_one_size(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: llama3-8b\ncluster: {gpu: h100, num_gpus: 16..64}\ntraining: {seq_len: 8192, "
        "global_batch_size: 64}\nlayout: {pp: 2}\n"
    )
    assert run([command, "--job", str(path), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["field"], error["value"]) == ("cluster.num_gpus", "16..64")
    assert "choose one of 16, 32, 64" in error["remedy"]


@pytest.mark.parametrize(
    ("trainer", "format"),
    [("torchtitan", "torchtitan"), ("megatron", "megatron"), ("fsdp", "accelerate")],
)
def test_a_plan_is_exported_to_its_own_trainer(
    trainer: str, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "--model", "llama3-8b", "--gpu", "h100", "--num-gpus", "8", "--seq-len", "4096",
        "--global-batch-size", "64", "--top-k", "1",
    ]  # fmt: skip
    narrow = ["--trainer", trainer, "--fix", "pp=1", "--fix", "cp=1", "--json"]
    assert run(["recommend", *asked, *narrow]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert run(["export", plan["id"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainer"] == format


def test_a_finished_plan_is_answered_even_where_it_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise StoreError("database /x.db: database or disk is full")

    monkeypatch.setattr(SqlStore, "save_plan", full)
    assert run(["recommend", *MAIN_JOB, "--top-k", "1", "--json"]) == 4
    told = capsys.readouterr()
    assert json.loads(told.out)["ranked"][0]["rank"] == 1
    assert "error: the plan above was not stored: database /x.db" in told.err


def test_a_plan_that_nobody_reads_is_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`recommend ... | head -1`, say."""

    def closed(*_: object) -> None:
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr("planner.api.cli.recommend.print_plan", closed)
        patched.setattr("planner.api.cli.root._drop_output", lambda: None)
        assert run(["recommend", *MAIN_JOB, "--top-k", "1"]) == 0
    assert run(["plans", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["model"] == "llama3-8b"


def test_a_database_that_cannot_be_opened_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLANNER_DATABASE_URL", f"sqlite:///{tmp_path}/file/plans.db")
    monkeypatch.setattr("planner.api.cli.recommend.answer_on_paper", None)
    assert run(["recommend", *MAIN_JOB]) == 4


def test_the_table_of_commands_has_each_commands_own_line_of_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: dict[str, Any] = get_command(tree()).commands  # type: ignore[attr-defined]
    assert {name: one.get_short_help_str(999) for name, one in commands.items()} == COMMANDS
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in listed if line.strip()] == list(commands)
