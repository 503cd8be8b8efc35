"""The real command line in a subprocess: the main job, and what happens when things go wrong."""

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    LAYOUT,
    MAIN_JOB,
    PLANNER,
    UNMEASURED_JOB,
    Cli,
    clean_environment,
    needed,
    one_fast,
    ran,
)
from tests.e2e.conftest import Say, write

Ran = subprocess.CompletedProcess[str]


def kept_as(shown: str) -> str:
    return shown.split("Kept as ")[1].split(";")[0]


def is_one_line(done: Ran, code: int, *words: str) -> None:
    """Whether it ended with the code and one line of error that says so."""
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert [word for word in words if word not in done.stderr] == []


def test_recommend_in_words_then_explain_and_export(cli: Cli, say: Say, tmp_path: Path) -> None:
    shown = say("recommend", *MAIN_JOB, "--top-k", "3")
    heads = ("Best: ", "tokens/s/GPU", "Memory of the fullest GPU", "Time of one step")
    for expected in (*heads, "Why this one", "Run it with torchtitan", "explain plan-"):
        assert expected in shown
    assert "\x1b" not in shown
    plan_id = kept_as(shown)
    assert say("explain", plan_id, "--rank", "2", "--versus", "1").startswith("#2")
    say("export", plan_id, "--save-dir", tmp_path / "run")
    assert (tmp_path / "run" / "launch.sh").stat().st_mode & 0o100
    assert "[parallelism]" in (tmp_path / "run" / "train.toml").read_text()
    refused = cli("export", plan_id, "--format", "megatron", "--save-dir", tmp_path / "megatron")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "megatron runs fused kernels and does not use torch.compile" in refused.stderr
    assert not (tmp_path / "megatron").exists()


def test_what_number_1_rests_on_is_said_under_it(say: Say, tmp_path: Path) -> None:
    shown = say("recommend", "--job", write(tmp_path, "job.json", UNMEASURED_JOB))
    best, said = shown.split("Best: ")[1].split("\n", 1)
    assert "memory-budget" in best
    words = " ".join(said.split())
    assert words.startswith(
        "uses memory-budget recomputation, which none of the runs behind this calibration "
        "used; best fully measured: rank 2, "
    )
    assert "slower. Number 2: " in words
    assert "\n1*  " in shown
    assert "* no run behind the calibration used memory-budget recomputation" in words
    assert "ac memory-budget extrapolated" in words
    assert "uses memory-budget recomputation" in say("explain", kept_as(shown)).splitlines()[1]
    pasted = shown.split("planner-cli export ")[1].split("\n  cd ")[0].replace("\\\n", "")
    *words_of_export, folder = shlex.split(pasted)
    say("export", *words_of_export, tmp_path / folder)
    assert (tmp_path / folder / "train.toml").is_file()


@pytest.mark.slow
def test_a_plan_a_pipeline_and_the_accuracy_are_drawn(cli: Cli, say: Say, tmp_path: Path) -> None:
    needed("vl_convert")
    made = cli("recommend", *MAIN_JOB, "--fix", "pp=2", "--plot", tmp_path / "plan.svg", "--json")
    assert (made.returncode, "drew" in made.stderr) == (0, True), made.stderr
    plan = json.loads(made.stdout)
    assert plan["ranked"][0]["label"] in (tmp_path / "plan.svg").read_text()
    assert "tokens/s/GPU\n" in say("show", plan["id"], "--plot", "-")
    say("simulate", "--plan", plan["id"], "--plot", tmp_path / "step.html")
    assert "pipeline rank" in (tmp_path / "step.html").read_text()
    say("accuracy", "--plot", tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_question_has_the_same_answer_of_two_real_processes(executable: Cli) -> None:
    """Which order sets differently: a fork would order them as the one before did."""
    asked = ("recommend", *MAIN_JOB, "--seed", "7", "--json")
    plans = [json.loads(executable(*asked).stdout) for _ in range(2)]
    for plan in plans:
        del plan["id"], plan["created_at"], plan["searched"]["seconds"]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("model", "seq_len"), [
    ("llama3-8b", "524288"), ("llama3.1-405b", "8192")], ids=["activations", "states"])  # fmt: skip
def test_nothing_fits_is_exit_3_with_the_nearest_miss(cli: Cli, model: str, seq_len: str) -> None:
    size = ("--model", model, "--gpu", "l4", "--num-gpus", "8", "--seq-len", seq_len)
    done = cli("recommend", *size, "--global-batch-size", "8", "--json")
    is_one_line(done, 3)
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "nothing_fits"
    assert error["nearest_miss"]["missing_bytes"] > 0
    assert error["remedy"]


def test_estimate_in_words_and_as_json(say: Say, tmp_path: Path, job: dict[str, Any]) -> None:
    path = write(tmp_path, "job.json", {**job, "layout": LAYOUT, "id": "mine"})
    shown = say("estimate", "--job", path)
    for words in ("It fits.", "ac full", "Kept as estimate-"):
        assert words in shown
    estimate = json.loads(say("estimate", "--job", path, "--json"))
    assert (estimate["valid"], estimate["id"]) == (True, "mine")
    impossible = write(tmp_path, "impossible.json", {**job, "layout": {"tp": 3}, "id": 7})
    assert "cannot run" in say("estimate", "--job", impossible)
    estimate = json.loads(say("estimate", "--job", impossible, "--json"))
    assert (estimate["id"], estimate["valid"], estimate["step_seconds"]) == (7, False, None)
    assert estimate["violations"]


def test_estimate_many_answers_every_line_in_order(cli: Cli, job: dict[str, Any]) -> None:
    good = {**job, "layout": LAYOUT}
    lines = [
        json.dumps({**good, "id": 0}), "not json", "", json.dumps([1]),
        json.dumps({**good, "id": "bad", "modell": 1}), json.dumps({**job, "id": "no layout"}),
        json.dumps({**good, "id": "x"}).replace("8192", "NaN"),
        json.dumps({**good, "id": "tp", "layout": {"tp": 3}}), json.dumps({**good, "id": "last"}),
    ]  # fmt: skip
    done = cli("estimate", "--jobs", "-", input="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    ids = [0, None, None, None, "bad", "no layout", None, "tp", "last"]
    assert [answer["id"] for answer in answers] == ids
    assert [number for number, one in enumerate(answers) if "error" not in one] == [0, 7, 8]
    parts = {"type", "field", "value", "message", "remedy"}
    assert all(parts <= set(answer.get("error", parts)) for answer in answers)
    assert answers[7]["valid"] is False


@pytest.mark.parametrize("text", one_fast("not json\n", "", "\n\n", "\x00\x01"))
def test_estimate_many_of_nothing_readable_is_exit_2(cli: Cli, text: str) -> None:
    done = cli("estimate", "--jobs", "-", input=text)
    is_one_line(done, 2)
    assert len(done.stdout.splitlines()) == len(text.splitlines())


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(tmp_path: Path, job: dict[str, Any], sqlite_url: str) -> None:
    jobs = write(tmp_path, "jobs.jsonl", (json.dumps({**job, "layout": LAYOUT}) + "\n") * 600)
    done = shell(f"set -o pipefail; planner-cli estimate --jobs {jobs} | head -n 1", sqlite_url)
    assert (done.returncode, done.stderr) == (0, "")


def shell(line: str, sqlite_url: str) -> Ran:
    line = line.replace("planner-cli", shlex.join(PLANNER))
    return ran("bash", "-c", line, env={"PLANNER_DATABASE_URL": sqlite_url})


@pytest.mark.parametrize("tail", one_fast("--fix cp_method=ulysses --json", "", "--json"))
def test_a_full_disk_is_exit_4_and_one_line(tail: str, sqlite_url: str) -> None:
    done = shell(f"planner-cli recommend {' '.join(MAIN_JOB)} {tail} > /dev/full", sqlite_url)
    is_one_line(done, 2 if "--fix" in tail else 4)


@pytest.mark.parametrize("closed", one_fast(">&-", "2>&-", "<&- >&- 2>&-"))
def test_closed_streams_are_no_error(closed: str, sqlite_url: str, say: Say) -> None:
    done = shell(f"planner-cli recommend {' '.join(MAIN_JOB)} --top-k 1 {closed}", sqlite_url)
    assert (done.returncode, done.stderr) == (0, "")
    say("doctor")


def test_interrupted_is_130(sqlite_url: str) -> None:
    with started("estimate", "--jobs", "-", database=sqlite_url) as process:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    # CPython ends by the signal itself where it fell into a string that was executed (dataclasses
    # are made so); a shell says 130 of both.
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert (code, stderr) == (130, "error: interrupted\n")


def started(*words: str, database: str) -> "subprocess.Popen[str]":
    env, pipe = {**clean_environment(), "PLANNER_DATABASE_URL": database}, subprocess.PIPE
    command = [*PLANNER, *words]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)


def test_a_database_that_is_gone_is_exit_4_before_any_work(cli: Cli, tmp_path: Path) -> None:
    blocked = write(tmp_path, "file", "no folder")
    for url, kind in (
        (f"sqlite:///{blocked}/x.db", "store_error"),
        (f"sqlite:///{tmp_path}", "database_unavailable"),
        ("postgresql://nobody:hunter2@127.0.0.1:1/x", "database_unavailable"),
    ):
        done = cli("recommend", *MAIN_JOB, "--json", env={"PLANNER_DATABASE_URL": url})
        is_one_line(done, 4, "PLANNER_DATABASE_URL")
        assert "hunter2" not in done.stderr + done.stdout
        assert json.loads(done.stdout)["error"]["type"] == kind


def test_doctor_and_catalog(cli: Cli, say: Say) -> None:
    report = json.loads(say("doctor", "--json"))
    assert report["database"]["state"].startswith("not created yet")
    assert report["packages"]["numpy"]
    say("doctor")
    assert cli("doctor", env={"PLANNER_DATABASE_URL": "postgresql://127.0.0.1:1/x"}).returncode == 4
    for kind in ("models", "gpus", "clusters", "schedules", "defaults"):
        name = json.loads(say("catalog", kind, "--json"))["items"][0]["name"]
        say("catalog", kind, name)
        assert name in say("catalog", kind)


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from planner.api.cli.root import run; run(['--help']); "
        "print({m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = ran(sys.executable, "-c", program, check=True)
    for heavy in ("numpy", "pydantic", "sqlalchemy", "optuna", "rich", "fastapi", "torch", "yaml"):
        assert f"'{heavy}'" not in done.stderr


def test_serve_on_a_port_that_is_taken_is_exit_2(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("serve", "--port", str(taken.getsockname()[1]))
    is_one_line(done, 2, "cannot be bound")


@pytest.mark.parametrize(
    ("number", "codes"), [(signal.SIGINT, {130}), (signal.SIGTERM, {0, -signal.SIGTERM})]
)
def test_a_worker_that_is_stopped_tells_how(number: int, codes: set[int], sqlite_url: str) -> None:
    """`test_http_abuse.py` stops services."""
    with started("worker", database=sqlite_url) as process:
        assert any("working on" in line for line in process.stderr)
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode in codes


def test_terminals_without_unicode_get_plain_letters_of_a_real_process(executable: Cli) -> None:
    environment = {"PYTHONIOENCODING": "ascii", "COLUMNS": "70"}
    done = executable("recommend", *MAIN_JOB, "--top-k", "2", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "\\x" not in done.stdout
    long = [line for line in done.stdout.splitlines() if len(line) > 70]
    assert all(line.startswith("  planner-cli") or "--save-dir" in line for line in long)


def test_the_main_job_on_postgres(cli: Cli, postgres_url: str) -> None:
    on_postgres = partial(cli, env={"PLANNER_DATABASE_URL": postgres_url})
    is_one_line(on_postgres("recommend", *MAIN_JOB), 4, "planner-cli db upgrade")
    assert on_postgres("db", "upgrade").returncode == 0
    plan = json.loads(on_postgres("recommend", *MAIN_JOB, "--top-k", "2", "--json").stdout)
    assert on_postgres("explain", plan["id"]).returncode == 0
