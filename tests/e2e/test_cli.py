"""The real command line in a subprocess: the main job, and what happens when things go wrong."""

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LAYOUT, UNMEASURED_JOB, Cli, clean_environment, needed, one_fast

MAIN_JOB = (
    "--model", "llama3-8b", "--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--seq-len", "8192",
    "--global-batch-size", "64",
)  # fmt: skip


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_recommend_in_words_then_explain_and_export(cli: Cli, tmp_path: Path) -> None:
    done = cli("recommend", *MAIN_JOB, "--top-k", "3")
    assert done.returncode == 0, done.stderr
    for expected in (
        "Best: ",
        "tokens/s/GPU",
        "Memory of the fullest GPU",
        "Time of one step",
        "Why this one",
        "Run it with torchtitan",
        "explain plan-",
    ):
        assert expected in done.stdout
    assert "\x1b" not in done.stdout
    plan_id = done.stdout.split("Kept as ")[1].split(";")[0]

    explained = cli("explain", plan_id, "--rank", "2", "--versus", "1")
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.startswith("#2")

    exported = cli("export", plan_id, "--save-dir", tmp_path / "run")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "run" / "launch.sh").stat().st_mode & 0o100
    assert "[parallelism]" in (tmp_path / "run" / "train.toml").read_text()
    refused = cli("export", plan_id, "--format", "megatron", "--save-dir", tmp_path / "megatron")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "megatron runs fused kernels and does not use torch.compile" in refused.stderr
    assert not (tmp_path / "megatron").exists()


def test_what_number_1_rests_on_is_said_under_it(cli: Cli, tmp_path: Path) -> None:
    done = cli("recommend", "--job", write(tmp_path, "job.json", UNMEASURED_JOB))
    assert done.returncode == 0, done.stderr
    best, said = done.stdout.split("Best: ")[1].split("\n", 1)
    assert "memory-budget" in best
    words = " ".join(said.split())
    assert words.startswith(
        "uses memory-budget recomputation, which none of the runs behind this calibration "
        "used; best fully measured: rank 2, "
    )
    assert "slower. Number 2: " in words
    assert "\n1*  " in done.stdout
    assert "* no run behind the calibration used memory-budget recomputation" in words
    assert "ac memory-budget extrapolated" in words
    plan_id = done.stdout.split("Kept as ")[1].split(";")[0]
    explained = cli("explain", plan_id)
    assert "uses memory-budget recomputation" in explained.stdout.splitlines()[1]
    pasted = done.stdout.split("planner-cli export ")[1].split("\n  cd ")[0].replace("\\\n", "")
    *words_of_export, folder = shlex.split(pasted)
    exported = cli("export", *words_of_export, tmp_path / folder)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / folder / "train.toml").is_file()


def test_recommend_as_json_is_the_stored_plan(
    cli: Cli, tmp_path: Path, job: dict[str, Any]
) -> None:
    job |= {"search": {"top_k": 5, "fix": {"precision": "bf16"}}, "id": "j1"}
    done = cli(
        "recommend",
        "--job",
        write(tmp_path, "job.yaml", job),
        "--top-k",
        "2",
        "--fix",
        "tp=2",
        "--allow",
        "ac=full,none",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert len(plan["ranked"]) <= 2
    assert plan["job"]["search"] == {
        "top_k": 2,
        "fix": {"precision": "bf16", "tp": 2},
        "allow": {"ac": ["full", "none"]},
    }
    assert {(r["layout"]["tp"], r["layout"]["precision"]) for r in plan["ranked"]} == {(2, "bf16")}


@pytest.mark.slow
def test_a_plan_a_pipeline_and_the_accuracy_are_drawn(cli: Cli, tmp_path: Path) -> None:
    needed("vl_convert")
    size = ("--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--seq-len", "8192")
    job = ("--model", "llama3-8b", *size, "--global-batch-size", "64")
    made = cli("recommend", *job, "--fix", "pp=2", "--plot", tmp_path / "plan.svg", "--json")
    assert made.returncode == 0, made.stderr
    plan = json.loads(made.stdout)
    assert "drew" in made.stderr
    drawn = (tmp_path / "plan.svg").read_text()
    assert plan["ranked"][0]["label"] in drawn
    again = cli("show", plan["id"], "--plot", "-")
    assert "tokens/s/GPU\n" in again.stdout
    done = cli("simulate", "--plan", plan["id"], "--plot", tmp_path / "step.html")
    assert done.returncode == 0, done.stderr
    assert "pipeline rank" in (tmp_path / "step.html").read_text()
    done = cli("accuracy", "--plot", tmp_path / "accuracy.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    refused = cli("recommend", *job, "--plot", "plan.gif")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--plot" in refused.stderr


def test_the_same_question_has_the_same_answer_of_two_real_processes(executable: Cli) -> None:
    """Which order sets differently: a fork would order them as the one before did."""
    asked = ("recommend", *MAIN_JOB, "--seed", "7", "--json")
    plans = [json.loads(executable(*asked).stdout) for _ in range(2)]
    for plan in plans:
        for key in ("id", "created_at"):
            del plan[key]
        del plan["searched"]["seconds"]
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_save_dir_is_whole_replaced_and_never_someone_elses(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "plan"
    for _ in range(2):
        done = cli("recommend", *MAIN_JOB, "--top-k", "2", "--save-dir", target)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in target.iterdir()} == {
        ".planner",
        "plan.json",
        "plan.txt",
        "rank-01",
        "rank-02",
    }
    assert [path.name for path in target.parent.iterdir()] == ["plan"]
    assert f"cd {target}/rank-01" in done.stdout
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    done = cli("recommend", *MAIN_JOB, "--save-dir", foreign)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_current_layout_is_compared(cli: Cli, tmp_path: Path) -> None:
    layout = {"dp_shard": 2, "tp": 4, "ac": "full"}
    current = write(tmp_path, "layout.json", {"layout": layout})
    plan = json.loads(cli("recommend", *MAIN_JOB, "--current", current, "--json").stdout)
    seconds = plan["versus_current"]["estimate"]["step_seconds"]
    times = seconds / plan["ranked"][0]["estimate"]["step_seconds"]
    assert times > 2
    assert plan["versus_current"]["times_as_fast"] == pytest.approx(times)
    changed = len(plan["versus_current"]["changed"])
    done = cli("recommend", *MAIN_JOB, "--current", current)
    line = f"Number 1 is {times:.2f} times as fast; {changed} fields change."
    assert line in done.stdout, done.stderr


NOTHING_FITS = {
    "activations": ("--model", "llama3-8b", "--gpu", "l4", "--num-gpus", "8", "--seq-len", "524288",
        "--global-batch-size", "8"),
    "states": ("--model", "llama3.1-405b", "--gpu", "l4", "--num-gpus", "8", "--seq-len", "8192",
        "--global-batch-size", "64"),
}  # fmt: skip


@pytest.mark.parametrize("cause", ["activations", "states"])
def test_nothing_fits_is_exit_3_with_the_nearest_miss(cli: Cli, cause: str) -> None:
    done = cli("recommend", *NOTHING_FITS[cause], "--json")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "nothing_fits"
    assert error["nearest_miss"]["missing_bytes"] > 0
    assert error["remedy"]


def test_estimate_in_words_and_as_json(cli: Cli, tmp_path: Path, job: dict[str, Any]) -> None:
    path = write(tmp_path, "job.json", {**job, "layout": LAYOUT})
    done = cli("estimate", "--job", path)
    assert (done.returncode, "It fits." in done.stdout, "ac full" in done.stdout) == (
        0,
        True,
        True,
    ), done.stderr
    estimate = json.loads(cli("estimate", "--job", path, "--json").stdout)
    assert estimate["valid"]
    assert estimate["id"].startswith("estimate-")
    impossible = write(tmp_path, "impossible.json", {**job, "layout": {"tp": 3}, "id": 7})
    done = cli("estimate", "--job", impossible)
    assert (done.returncode, "cannot run" in done.stdout) == (0, True)
    estimate = json.loads(cli("estimate", "--job", impossible, "--json").stdout)
    assert (estimate["id"], estimate["valid"], estimate["step_seconds"]) == (7, False, None)
    assert estimate["violations"]


def test_estimate_many_answers_every_line_in_order(cli: Cli, job: dict[str, Any]) -> None:
    good = {**job, "layout": LAYOUT}
    lines = [
        json.dumps({**good, "id": 0}),
        "not json",
        "",
        json.dumps([1]),
        json.dumps({**good, "id": "bad", "modell": 1}),
        json.dumps({**job, "id": "no layout"}),
        json.dumps({**good, "id": "x"}).replace("8192", "NaN"),
        json.dumps({**good, "id": "tp", "layout": {"tp": 3}}),
        json.dumps({**good, "id": "last"}),
    ]
    done = cli("estimate", "--jobs", "-", input="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    ids = [0, None, None, None, "bad", "no layout", None, "tp", "last"]
    assert [answer["id"] for answer in answers] == ids
    assert [number for number, one in enumerate(answers) if "error" not in one] == [0, 7, 8]
    assert all(
        {"type", "field", "value", "message", "remedy"} <= set(answer["error"])
        for answer in answers
        if "error" in answer
    )
    assert answers[7]["valid"] is False


@pytest.mark.parametrize(
    "text",
    [
        "not json\n",
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("", "\n\n", "\x00\x01")),
    ],
)
def test_estimate_many_of_nothing_readable_is_exit_2(cli: Cli, text: str) -> None:
    done = cli("estimate", "--jobs", "-", input=text)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert len(done.stdout.splitlines()) == len(text.splitlines())


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(
    cli: Cli, tmp_path: Path, job: dict[str, Any], sqlite_url: str
) -> None:
    jobs = write(tmp_path, "jobs.jsonl", (json.dumps({**job, "layout": LAYOUT}) + "\n") * 600)
    command = f"{sys.executable} -m planner.api.cli estimate --jobs {jobs} | head -n 1"
    environment = {**clean_environment(), "PLANNER_DATABASE_URL": sqlite_url}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def shell(line: str, sqlite_url: str) -> "subprocess.CompletedProcess[str]":
    line = line.replace("planner-cli", f"{sys.executable} -m planner.api.cli")
    env = {**clean_environment(), "PLANNER_DATABASE_URL": sqlite_url}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False, env=env
    )


@pytest.mark.parametrize(
    "tail",
    [
        "--fix cp_method=ulysses --json",
        *(pytest.param(tail, marks=pytest.mark.slow) for tail in ("", "--json")),
    ],
)
def test_a_full_disk_is_exit_4_and_one_line(tail: str, sqlite_url: str) -> None:
    done = shell(f"planner-cli recommend {' '.join(MAIN_JOB)} {tail} > /dev/full", sqlite_url)
    assert (done.returncode, done.stderr.count("\n")) == (2 if "--fix" in tail else 4, 1), (
        done.stderr
    )
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("closed", one_fast(">&-", "2>&-", "<&- >&- 2>&-"))
def test_closed_streams_are_no_error(closed: str, sqlite_url: str) -> None:
    done = shell(f"planner-cli recommend {' '.join(MAIN_JOB)} --top-k 1 {closed}", sqlite_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert shell("planner-cli doctor", sqlite_url).returncode == 0


def test_an_estimate_is_kept_under_its_own_id(
    cli: Cli, tmp_path: Path, job: dict[str, Any]
) -> None:
    done = cli(
        "estimate", "--job", write(tmp_path, "job.json", {**job, "layout": LAYOUT, "id": "mine"})
    )
    assert "Kept as estimate-" in done.stdout


def test_interrupted_is_130(tmp_path: Path, sqlite_url: str) -> None:
    environment = {**clean_environment(), "PLANNER_DATABASE_URL": sqlite_url}
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.api.cli", "estimate", "--jobs", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    # CPython ends by the signal itself where it fell into a string that was executed (dataclasses
    # are made so); a shell says 130 of both.
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert (code, stderr) == (130, "error: interrupted\n")


def test_a_database_that_is_gone_is_exit_4_before_any_work(cli: Cli, tmp_path: Path) -> None:
    blocked = write(tmp_path, "file", "no folder")
    for url, kind in (
        (f"sqlite:///{blocked}/x.db", "store_error"),
        (f"sqlite:///{tmp_path}", "database_unavailable"),
        ("postgresql://nobody:hunter2@127.0.0.1:1/x", "database_unavailable"),
    ):
        done = cli("recommend", *MAIN_JOB, "--json", env={"PLANNER_DATABASE_URL": url})
        assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
        assert "PLANNER_DATABASE_URL" in done.stderr
        assert "hunter2" not in done.stderr + done.stdout
        assert json.loads(done.stdout)["error"]["type"] == kind


def test_doctor_and_catalog(cli: Cli) -> None:
    report = json.loads(cli("doctor", "--json").stdout)
    assert report["database"]["state"].startswith("not created yet")
    assert report["packages"]["numpy"]
    assert cli("doctor").returncode == 0
    assert cli("doctor", env={"PLANNER_DATABASE_URL": "postgresql://127.0.0.1:1/x"}).returncode == 4
    for kind in ("models", "gpus", "clusters", "schedules", "defaults"):
        items = json.loads(cli("catalog", kind, "--json").stdout)["items"]
        one = cli("catalog", kind, items[0]["name"])
        assert (one.returncode, items[0]["name"] in cli("catalog", kind).stdout) == (0, True), (
            one.stderr
        )


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from planner.api.cli.root import run; run(['--help']); "
        "print({m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=300,
        check=True,
    )
    for heavy in ("numpy", "pydantic", "sqlalchemy", "optuna", "rich", "fastapi", "torch", "yaml"):
        assert f"'{heavy}'" not in done.stderr


def test_serve_refuses_an_open_door(cli: Cli) -> None:
    done = cli("serve", "--host", "0.0.0.0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "PLANNER_API_KEYS" in done.stderr


def test_serve_on_a_port_that_is_taken_is_exit_2(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("serve", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be bound" in done.stderr


@pytest.mark.parametrize(
    ("number", "codes"), [(signal.SIGINT, {130}), (signal.SIGTERM, {0, -signal.SIGTERM})]
)
def test_a_worker_that_is_stopped_tells_how(number: int, codes: set[int], sqlite_url: str) -> None:
    """`test_http_abuse.py` stops services."""
    environment = {**clean_environment(), "PLANNER_DATABASE_URL": sqlite_url}
    with subprocess.Popen(
        [sys.executable, "-m", "planner.api.cli", "worker"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "working on" in line:
                break
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode in codes


@pytest.mark.slow
def test_wrong_settings_are_named_and_secrets_are_not(cli: Cli) -> None:
    for name, value in (
        ("PLANNER_PORT", "x"),
        ("PLANNER_API_KEYS", "me:read:swordfish"),
        ("PLANNER_DATABASE_URL", "mysql://u:swordfish@h/d"),
    ):
        done = cli("serve", env={name: value})
        assert (done.returncode, name in done.stderr, "swordfish" in done.stderr) == (
            2,
            True,
            False,
        ), done.stderr


def test_terminals_that_know_no_unicode_get_plain_letters_of_a_real_process(
    executable: Cli,
) -> None:
    environment = {"PYTHONIOENCODING": "ascii", "COLUMNS": "70"}
    done = executable("recommend", *MAIN_JOB, "--top-k", "2", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "\\x" not in done.stdout
    assert all(
        len(line) <= 70 or line.startswith("  planner-cli") or "--save-dir" in line
        for line in done.stdout.splitlines()
    )


def test_the_main_job_on_postgres(cli: Cli, postgres_url: str) -> None:
    environment = {"PLANNER_DATABASE_URL": postgres_url}
    refused = cli("recommend", *MAIN_JOB, env=environment)
    assert (refused.returncode, "planner-cli db upgrade" in refused.stderr) == (4, True)
    assert cli("db", "upgrade", env=environment).returncode == 0
    plan = json.loads(cli("recommend", *MAIN_JOB, "--top-k", "2", "--json", env=environment).stdout)
    assert cli("explain", plan["id"], env=environment).returncode == 0
