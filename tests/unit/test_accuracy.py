"""What `planner-cli accuracy` says of groups of rows, and of the rows that it is asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.accuracy import PUBLIC_ROWS, command
from planner.errors import SpecError

# mbr and mci leave something open
HOPPER, AMPERE = ("dgxc-013", "dgxc-014", "mbr-039"), ("kor-001", "mci-7b-001")
TITAN, OPEN_ALONE = ("tt-001", "tt-002"), ("bs-022",)
KEEP = ["complete=True", "platform=megatron on hopper, megatron on ampere"]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Published rows: too few to fit again, so what is told of them is in sample."""
    texts = PUBLIC_ROWS.read_text(encoding="utf-8").splitlines()
    lines = {json.loads(line)["id"]: line for line in texts}
    few = "\n".join(lines[name] for name in (*HOPPER, *AMPERE, *TITAN, *OPEN_ALONE))
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text(few, encoding="utf-8")
    return str(path)


PLAIN: dict[str, Any] = dict.fromkeys(("where", "markdown", "save"))
PLAIN |= dict.fromkeys(("rows", "recompute", "json"), False)


@pytest.fixture
def told(few: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What is told of the few rows, in sample; `where` narrows them."""

    def ask(where: list[str] | None = None) -> dict[str, Any]:
        command(**{**PLAIN, "jobs": few, "where": where, "json": True})
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["in_sample"]
        return found

    return ask


def test_a_platform_is_a_trainer_on_a_family_with_its_complete_rows_beside_it(told: Any) -> None:
    platforms = told()["groups"]["platform"]
    assert [(one["name"], one["rows"]) for one in platforms] == [
        ("platform megatron on hopper", 3),
        ("platform megatron on hopper, complete", 2),
        ("platform megatron on ampere", 2),
        ("platform megatron on ampere, complete", 1),
        ("platform torchtitan on hopper", 2),
        ("platform torchtitan on hopper, complete", 2),
        ("platform megatron-deepspeed on ampere", 1),
    ]


def test_figures_of_the_rows_asked_for_are_those_of_their_groups_together(told: Any) -> None:
    everything, chosen = told(), told(KEEP)
    own = {one["name"]: one["time"] for one in everything["groups"]["platform"]}
    names = (f"platform megatron on {family}, complete" for family in ("hopper", "ampere"))
    hopper, ampere = (own[name] for name in names)
    assert chosen["overall"]["time"]["rows"] == 3
    mean = (2 * hopper["mape"] + ampere["mape"]) / 3
    assert chosen["overall"]["time"]["mape"] == pytest.approx(mean)
    assert [one["name"] for one in chosen["groups"]["trainer"]] == ["trainer megatron"]


@pytest.mark.parametrize(("where", "says"), [
    (["platfrm=megatron on hopper"], "keys are trainer, platform"),
    (["complete"], "KEY=VALUE"),
    (["platform=megatron on hoper"], "megatron on hopper"),
    (["trainer=torchtitan", "complete=false"], "no row meets all"),
])  # fmt: skip
def test_what_no_row_has_is_refused(few: str, where: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        command(**{**PLAIN, "jobs": few, "where": where, "json": True})


def test_the_table_names_complete_rows_of_a_platform(few: str, tmp_path: Path, capsys: Any) -> None:
    unseen = tmp_path / "unseen.jsonl"
    rows = [json.loads(line) for line in Path(few).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "step_seconds" in row["measured"]:
            row["measured"]["step_seconds"] *= 1.01
    unseen.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    written = tmp_path / "accuracy.md"
    command(**{**PLAIN, "jobs": str(unseen), "markdown": written})
    printed = capsys.readouterr().out
    assert "megatron on hopper, complete" in printed
    assert "| megatron on hopper, complete | 2 |" in written.read_text(encoding="utf-8")
