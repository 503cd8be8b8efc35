"""Stored plans on the command line: listed, shown, named by a beginning, priced, completed."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.root import run
from planner.api.input.names import plan_id_of
from planner.api.wiring import Wiring, wire
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.specs.plan import Plan
from tests.conftest import JOB, fixed_now
from tests.stand_ins.records import PLAN_JOB, task_record
from tests.unit.conftest import Say

IDS = ("plan-1aaa00001-x", "plan-1aaa00002-y", "plan-1bbb00000-z")  # oldest first
Told = Callable[..., Any]


@pytest.fixture
def wiring(say: Say, plan: Plan) -> Wiring:
    """The command line's, with a plan of each of IDS."""
    found = wire()
    for number, name in enumerate(IDS):
        made = datetime(2026, 11, 20 + number, tzinfo=UTC)
        copy = plan.model_copy(update={"id": name, "created_at": made.isoformat()})
        found.store.save_plan(copy, PLAN_JOB)
    return found


@pytest.fixture
def told(wiring: Wiring, say: Say) -> Told:
    """What a command answers in JSON of these plans."""
    return lambda *words: say(*words, "--json").json


def test_plans_are_listed_newest_first(told: Told) -> None:
    listed = told("plans")
    assert [item["id"] for item in listed["items"]] == list(reversed(IDS))
    assert (listed["items"][0]["model"], listed["next_cursor"]) == ("llama3-8b", None)
    first = told("plans", "--limit", "2")
    rest = told("plans", "--cursor", first["next_cursor"])
    assert [len(first["items"]), *(item["id"] for item in rest["items"])] == [2, IDS[0]]


@pytest.mark.parametrize("width", ["80", "120", "200"])
@pytest.mark.usefixtures("wiring")
def test_the_list_names_id_model_and_layout(
    say: Say, plan: Plan, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    listed = say("plans").out
    assert max(map(len, listed.splitlines())) <= int(width)
    words = (*IDS, "llama3-8b", *plan.ranked[0].layout.short().split())
    assert all(word in listed for word in words)


def test_an_empty_list_says_what_makes_one(say: Say) -> None:
    assert "`planner-cli recommend` makes one" in say("plans").out


def test_a_plan_is_shown_as_recommend_printed_it(say: Say) -> None:
    job = "--model llama3.2-1b --gpu h100 --num-gpus 1 --seq-len 8k --global-batch-size 4"
    printed = say("recommend", *job.split(), "--top-k", "2").out
    words = (word for word in printed.split() if "rank" not in word)
    (name,) = {word.rstrip(";") for word in words if word.startswith("plan-")}
    assert say("show", name).out == printed
    assert say("show", name[:-3], "--json").json["id"] == name


def test_a_unique_beginning_names_a_plan(told: Told) -> None:
    for beginning in ("plan-1b", "1b", "1B", IDS[2]):
        assert told("show", beginning)["id"] == IDS[2]
    assert told("explain", "1b")["id"] == IDS[2]
    assert told("export", "1b")["trainer"] == "torchtitan"


@pytest.mark.usefixtures("wiring")
def test_a_beginning_of_several_names_them(say: Say) -> None:
    assert say("show", "1aaa", code=2).err.startswith(
        "error: PLAN_ID='1aaa': is the beginning of 2 plans: plan-1aaa00002-y, plan-1aaa00001-x; "
        "give more"
    )
    answer = say("show", "plan-zzz", code=2).err
    assert "no plan of id 'plan-zzz'; `planner-cli plans` lists them" in answer


def test_an_id_that_is_a_beginning_too_is_itself(wiring: Wiring, plan: Plan) -> None:
    wiring.store.save_plan(plan.model_copy(update={"id": "plan-1bbb"}), PLAN_JOB)
    assert plan_id_of(wiring, "plan-1bbb") == "plan-1bbb"
    with pytest.raises(SpecError, match="2 plans"):
        plan_id_of(wiring, "1bb")
    assert plan_id_of(wiring, "%") == "%"  # no pattern of the database


def test_a_plan_not_made_yet_is_named(wiring: Wiring, say: Say, told: Told, plan: Plan) -> None:
    at = datetime(2026, 11, 23, tzinfo=UTC)
    own = {"created_at": at, "request": dict(plan.job), "job_hash": "y"}
    wiring.tasks.add([task_record(id="plan-1ccc", **own)])
    assert "plan-1ccc is queued" in say("show", "1c").out
    assert told("show", "1c")["status"] == "queued"
    assert told("plans")["items"][0]["id"] == "plan-1ccc"


def test_a_ranked_layout_is_priced_as_the_plan_did(told: Told, plan: Plan) -> None:
    for rank in (1, 3):
        seconds = plan.ranked[rank - 1].estimate.step_seconds
        estimate = told("estimate", "--plan", "1b", "--rank", rank)
        assert estimate["step_seconds"] == pytest.approx(seconds, rel=1e-9)


def test_a_ranked_pipeline_is_played_out_as_the_plan_priced_it(told: Told, wiring: Wiring) -> None:
    asked = read_job({**JOB, "search": {"top_k": 1, "fix": {"pp": 2}}})
    piped = recommend(asked, now=fixed_now)
    wiring.store.save_plan(piped.model_copy(update={"id": "plan-1ddd"}), PLAN_JOB)
    simulated = told("simulate", "--plan", "1d", "--rank", "1")
    seconds = piped.ranked[0].estimate.step_seconds
    assert simulated["estimate"]["step_seconds"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.usefixtures("wiring")
@pytest.mark.parametrize("command", ["estimate", "simulate"])
@pytest.mark.parametrize(("arguments", "says"), [
    (["--plan", "1b", "--rank", "9"], "--rank=9: the plan ranks 1 to 3"),
    (["--plan", "1b", "--job", "x.yaml"], "exactly one of --job"),
    (["--job", "x.yaml", "--rank", "2"], "--rank=2: is of a plan's layouts"),
    ([], "exactly one of --job"),
])  # fmt: skip
def test_a_layout_is_given_once(say: Say, command: str, arguments: list[str], says: str) -> None:
    error = say(command, *arguments, code=2).err
    assert says in error
    assert "None" not in error


@pytest.mark.usefixtures("wiring")
@pytest.mark.parametrize(("words", "offers", "but_not"), [
    ("recommend --model llama3-", {"llama3-8b", "llama3-70b"}, "kimi-k2"),
    ("recommend --gpu h100-s", {"h100-sxm-80gb"}, "b200-sxm-180gb"),
    ("recommend --trainer megatron-b", {"megatron-bridge"}, "torchtitan"),
    ("show plan-1a", {IDS[0], IDS[1]}, IDS[2]),
    ("estimate --plan plan-1b", {IDS[2]}, IDS[0]),
    ("sho", {"show"}, "sweep"),
])  # fmt: skip
def test_the_shell_completes(
    words: str, offers: set[str], but_not: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = f"planner-cli {words}"
    monkeypatch.setenv("_PLANNER_CLI_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit) as done:
        run([])
    offered = set(capsys.readouterr().out.split())
    assert (done.value.code, offered & {*offers, but_not}) == (0, offers)


def test_without_database_no_completion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from planner.api.cli.typed import complete_plan

    monkeypatch.setenv("PLANNER_DATABASE_URL", f"sqlite:///{tmp_path}/no/such/folder/x.db")
    offered: Any = complete_plan("plan")
    assert offered == []
