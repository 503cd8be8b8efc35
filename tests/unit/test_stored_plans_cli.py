"""Stored plans on the command line: listed, shown, named by a beginning, priced, completed."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.root import run
from planner.api.input.names import plan_id_of
from planner.api.storage.job_records import TaskRecord
from planner.api.wiring import Wiring, wire
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.specs.plan import Plan
from tests.conftest import JOB, fixed_ports
from tests.stand_ins.plan_labels import plan_labels

IDS = ("plan-1aaa00001-x", "plan-1aaa00002-y", "plan-1bbb00000-z")  # oldest first
Told = Callable[..., str]


@pytest.fixture
def wiring(monkeypatch: pytest.MonkeyPatch, sqlite_url: str, plan: Plan) -> Wiring:
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)
    monkeypatch.delenv("PLANNER_DEBUG", raising=False)
    found = wire()
    for number, name in enumerate(IDS):
        made = datetime(2026, 11, 20 + number, tzinfo=UTC)
        labels = plan_labels("llama3-8b", "h100-sxm-80gb")
        copy = plan.model_copy(update={"id": name, "created_at": made.isoformat()})
        found.store.save_plan(copy, labels)
    return found


@pytest.fixture
def told(wiring: Wiring, capsys: pytest.CaptureFixture[str]) -> Told:
    def say(*arguments: str, code: int = 0) -> str:
        assert run(arguments) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return say


def test_plans_are_listed_newest_first(told: Told) -> None:
    listed = json.loads(told("plans", "--json"))
    assert [item["id"] for item in listed["items"]] == list(reversed(IDS))
    assert (listed["items"][0]["model"], listed["next_cursor"]) == ("llama3-8b", None)
    first = json.loads(told("plans", "--limit", "2", "--json"))
    assert len(first["items"]) == 2
    rest = json.loads(told("plans", "--cursor", first["next_cursor"], "--json"))
    assert [item["id"] for item in rest["items"]] == [IDS[0]]


@pytest.mark.parametrize("width", ["80", "120", "200"])
def test_the_list_names_id_model_and_layout(
    told: Told, plan: Plan, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    listed = told("plans")
    assert max(map(len, listed.splitlines())) <= int(width)
    words = (*IDS, "llama3-8b", *plan.ranked[0].layout.short().split())
    assert all(word in listed for word in words)


def test_an_empty_list_says_what_makes_one(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)
    assert run(["plans"]) == 0
    assert "`planner-cli recommend` makes one" in capsys.readouterr().out


def test_a_plan_is_shown_as_recommend_printed_it(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)
    job = [
        "--model", "llama3.2-1b", "--gpu", "h100", "--num-gpus", "1", "--seq-len", "8k",
        "--global-batch-size", "4", "--top-k", "2",
    ]  # fmt: skip
    assert run(["recommend", *job]) == 0
    printed = capsys.readouterr().out
    words = (word for word in printed.split() if "rank" not in word)
    (name,) = {word.rstrip(";") for word in words if word.startswith("plan-")}
    assert run(["show", name]) == 0
    assert capsys.readouterr().out == printed
    assert run(["show", name[:-3], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == name


def test_a_unique_beginning_names_a_plan(told: Told) -> None:
    for beginning in ("plan-1b", "1b", "1B", IDS[2]):
        assert json.loads(told("show", beginning, "--json"))["id"] == IDS[2]
    assert json.loads(told("explain", "1b", "--json"))["id"] == IDS[2]
    assert json.loads(told("export", "1b", "--json"))["trainer"] == "torchtitan"


def test_a_beginning_of_several_names_them(told: Told) -> None:
    error = told("show", "1aaa", code=2)
    assert error.startswith(
        "error: PLAN_ID='1aaa': is the beginning of 2 plans: plan-1aaa00002-y, plan-1aaa00001-x; "
        "give more"
    )
    answer = told("show", "plan-zzz", code=2)
    assert "no plan of id 'plan-zzz'; `planner-cli plans` lists them" in answer


def test_an_id_that_is_a_beginning_too_is_itself(wiring: Wiring, plan: Plan) -> None:
    labels = plan_labels("m", "g")
    wiring.store.save_plan(plan.model_copy(update={"id": "plan-1bbb"}), labels)
    assert plan_id_of(wiring, "plan-1bbb") == "plan-1bbb"
    with pytest.raises(SpecError, match="2 plans"):
        plan_id_of(wiring, "1bb")
    assert plan_id_of(wiring, "%") == "%"  # no pattern of the database


def test_a_plan_that_is_not_made_yet_is_named(wiring: Wiring, told: Told, plan: Plan) -> None:
    task = TaskRecord(
        id="plan-1ccc",
        kind="study",
        created_at=datetime(2026, 11, 23, tzinfo=UTC),
        request=dict(plan.job),
        job_hash="y",
    )
    wiring.tasks.add([task])
    assert "plan-1ccc is queued" in told("show", "1c")
    assert json.loads(told("show", "1c", "--json"))["status"] == "queued"
    assert json.loads(told("plans", "--json"))["items"][0]["id"] == "plan-1ccc"


def test_a_ranked_layout_is_priced_as_the_plan_did(told: Told, plan: Plan) -> None:
    for rank in (1, 3):
        estimate = json.loads(told("estimate", "--plan", "1b", "--rank", str(rank), "--json"))
        seconds = plan.ranked[rank - 1].estimate.step_seconds
        assert estimate["step_seconds"] == pytest.approx(seconds, rel=1e-9)


def test_a_ranked_pipeline_is_played_out_as_the_plan_priced_it(told: Told, wiring: Wiring) -> None:
    asked = read_job({**JOB, "search": {"top_k": 1, "fix": {"pp": 2}}})
    piped = recommend(asked, ports=fixed_ports())
    labels = plan_labels("llama3-8b", "h100-sxm-80gb")
    wiring.store.save_plan(piped.model_copy(update={"id": "plan-1ddd"}), labels)
    simulated = json.loads(told("simulate", "--plan", "1d", "--rank", "1", "--json"))
    seconds = piped.ranked[0].estimate.step_seconds
    assert simulated["estimate"]["step_seconds"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("arguments", "says"), [
    (["--plan", "1b", "--rank", "9"], "--rank=9: the plan ranks 1 to 3"),
    (["--plan", "1b", "--job", "x.yaml"], "exactly one of --job"),
    (["--job", "x.yaml", "--rank", "2"], "--rank=2: is of a plan's layouts"),
    ([], "exactly one of --job"),
])  # fmt: skip
def test_a_layout_is_given_once(told: Told, arguments: list[str], says: str) -> None:
    for command in ("estimate", "simulate"):
        error = told(command, *arguments, code=2)
        assert says in error
        assert "None" not in error


@pytest.mark.parametrize(("words", "offers", "but_not"), [
    ("recommend --model llama3-", {"llama3-8b", "llama3-70b"}, "kimi-k2"),
    ("recommend --gpu h100-s", {"h100-sxm-80gb"}, "b200-sxm-180gb"),
    ("recommend --trainer megatron-b", {"megatron-bridge"}, "torchtitan"),
    ("show plan-1a", {IDS[0], IDS[1]}, IDS[2]),
    ("estimate --plan plan-1b", {IDS[2]}, IDS[0]),
    ("sho", {"show"}, "sweep"),
])  # fmt: skip
def test_the_shell_completes(
    wiring: Wiring,
    words: str,
    offers: set[str],
    but_not: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"planner-cli {words}".split()
    for name, value in (
        ("_PLANNER_CLI_COMPLETE", "complete_bash"),
        ("COMP_WORDS", " ".join(line)),
        ("COMP_CWORD", str(len(line) - 1)),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as done:
        run([])
    offered = set(capsys.readouterr().out.split())
    assert done.value.code == 0
    assert offers <= offered
    assert but_not not in offered


def test_a_database_that_is_not_there_completes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from planner.api.cli.typed import complete_plan

    monkeypatch.setenv("PLANNER_DATABASE_URL", f"sqlite:///{tmp_path}/no/such/folder/x.db")
    offered: Any = complete_plan("plan")
    assert offered == []
