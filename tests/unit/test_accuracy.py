"""What `planner-cli accuracy` says: of the report that ships, which is of today's rows, calibration
and model, and of other rows by their groups.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.api.cli import accuracy
from planner.api.cli.accuracy import PUBLIC_ROWS, command, read_rows
from planner.api.render.accuracy_document import document
from planner.calibration.comparison import Comparison, digest_of, shipped_comparison
from planner.calibration.own_runs import SCATTER, stands_for
from planner.calibration.report import report
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.machine.stacks import kind_of
from planner.errors import SpecError
from tests.conftest import ROOT

REMAKE = (
    "planner-cli accuracy --recompute --markdown docs/accuracy.md --save "
    "planner/catalog/calibrations/accuracy.json"
)
EVERY = 45  # of the rows are predicted again here; all of them take minutes


def asked(**options: Any) -> None:
    unsaid = dict.fromkeys(("jobs", "where", "markdown", "save"))
    command(**{**unsaid, "rows": False, "recompute": False, "json": True, **options})


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def print_it(**options: Any) -> dict[str, Any]:
        asked(**options)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return print_it


def public_lines() -> list[str]:
    return PUBLIC_ROWS.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def no_pricing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the shipped report needs no estimate")

    monkeypatch.setattr("planner.api.service.Estimates.of", never)
    monkeypatch.setattr("planner.calibration.held_out.Fitted.find", never)


def test_the_stamp_is_that_of_today() -> None:
    digest = digest_of(PUBLIC_ROWS.read_text(encoding="utf-8"))
    assert shipped_comparison().stale(shipped_calibration().id, digest) == [], f"run {REMAKE}"


def test_it_predicts_what_the_model_predicts_today() -> None:
    """A few rows of all groups, to all digits: a change of the model that moves one shows here."""
    lines = public_lines()[::EVERY]
    shipped = {row.id: row for row in shipped_comparison().rows}
    rows, malformed = read_rows("\n".join(lines))
    assert (len(rows), malformed) == (len(lines), [])
    for row in rows:
        now, before = row.compared(seen=True), shipped[str(row.job.id)]
        for name in ("predicted_seconds", "interval_seconds", "predicted_reserved_bytes"):
            expected = pytest.approx(getattr(before, name), rel=1e-6)
            assert getattr(now, name) == expected, f"{now.id} {name}: run {REMAKE}"
        exact = attrgetter("fits", "layout", "labels", "used")
        assert exact(now) == exact(before), now.id


def test_the_document_is_that_of_the_shipped_report() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert page == document(report(shipped_comparison())), f"run {REMAKE}"


@pytest.mark.usefixtures("no_pricing")
def test_every_option_that_only_prints_works(tmp_path: Path, printed: Any, capsys: Any) -> None:
    where = ["complete=true", "trainer=torchtitan,megatron"]
    whole, some = printed(rows=True), printed(where=where, rows=True)
    count = len(public_lines())
    assert (whole["headline"]["overall"]["rows"], len(whole["rows"])) == (count, count)
    assert whole["num_fitted"] == 745
    trainers = {one["name"] for one in some["headline"]["groups"]["trainer"]}
    assert trainers == {"trainer torchtitan", "trainer megatron"}
    assert 0 < len(some["rows"]) < count
    assert {"id", "measured_step_seconds", "step_seconds", "fits"} <= some["rows"][0].keys()
    asked(where=["trainer=fsdp"], rows=True, markdown=tmp_path / "fsdp.md", json=False)
    assert "A cluster never seen" in capsys.readouterr().out
    assert "## Every row" in (tmp_path / "fsdp.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_pricing")
def test_without_the_rows_it_is_not_made_anew(monkeypatch: Any, printed: Any) -> None:
    monkeypatch.setattr(accuracy, "PUBLIC_ROWS", Path("/not/installed"))
    assert printed()["headline"]["overall"]["rows"] > 300
    with pytest.raises(SpecError, match=r"needs the published rows.*give --jobs FILE") as caught:
        printed(recompute=True)
    assert len(caught.value.faults) == 1


def test_other_rows_than_it_was_made_of_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "public.jsonl"
    changed.write_text(PUBLIC_ROWS.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(accuracy, "PUBLIC_ROWS", changed)
    asked()
    assert "digest of the rows" in capsys.readouterr().err
    shipped = shipped_comparison()
    assert [words.split()[0] for words in shipped.stale("other", None)] == ["calibration"]


def test_what_was_computed_is_read_back_without_loss(tmp_path: Path, printed: Any) -> None:
    shipped = shipped_comparison()
    assert Comparison.from_document(shipped.as_document()) == shipped
    few, saved = tmp_path / "few.jsonl", tmp_path / "few.json"
    few.write_text("\n".join(public_lines()[:2]), encoding="utf-8")
    printed(jobs=str(few), save=saved)
    found = Comparison.from_document(saved.read_text(encoding="utf-8"))
    assert (found.rows, found.left_out) == (shipped.rows[:2], {})
    with pytest.raises(SpecError, match="--save"):
        printed(save=saved)


def test_scatter_within_units_is_that_of_the_published_runs() -> None:
    """Pooled over units, about their means; runs predicted without their source."""
    misses: dict[str, list[float]] = {}
    for row in shipped_comparison().left_out["group"]:
        if row.predicted_seconds and row.measured_seconds:
            miss = math.log(row.measured_seconds / row.predicted_seconds)
            misses.setdefault(row.label("unit"), []).append(miss)
    for kind, known in SCATTER.items():
        alike = [np.array(found) for unit, found in misses.items() if kind_of(unit) == kind]
        squares = sum(((found - found.mean()) ** 2).sum() for found in alike)
        deviation = (squares / sum(len(found) - 1 for found in alike)) ** 0.5
        assert known == pytest.approx(deviation, abs=0.01), kind
    assert stands_for("megatron on h100-sxm-80gb, bf16, dense")
    assert not stands_for("megatron on h100-sxm-80gb, bf16, experts")


# By how much one own run makes the rest of a kind worse, where it is more than a point: all are
# units of which the mean miss (2%) is less than its runs differ by (4 and 8%), so that no run
# can tell what the rest takes. A run that is believed by g raises such an error by sqrt(1 + g^2).
WORSE = {
    "fsdp on a100-sxm-80gb, bf16, dense": 0.012,  # 6.9 -> 8.1%; before 7.6 -> 8.2%
    "fsdp on h100-sxm-80gb, float8-delayed, dense": 0.013,
    "megatron on gb200-nvl72-186gb, nvfp4, dense": 0.0225,
    "megatron on gb200-nvl72-186gb, bf16, experts": 0.0102,  # 1.012; of two models, 17% either way
}


def test_one_own_run_makes_no_kind_of_four_rows_worse_by_more_than_a_point() -> None:
    shipped = shipped_comparison()
    rows = Counter(row.label("unit") for row in shipped.left_out["group"])
    kinds: dict[str, list[tuple[float, float]]] = {}
    for unit, after in shipped.own_runs[1].items():  # not of units with a single row
        pair = (shipped.own_runs[0][unit].error, after.error)
        kinds.setdefault(unit.partition(": ")[2], []).append(pair)
    sizes = {kind: sum(rows[unit] for unit in rows if unit.endswith(f": {kind}")) for kind in kinds}
    rise = {kind: float(np.diff(np.mean(pairs, axis=0))[0]) for kind, pairs in kinds.items()}
    large = {kind: rise[kind] for kind in rise if sizes[kind] >= 4}
    assert len(large) >= 25
    assert {kind: by for kind, by in large.items() if by > WORSE.get(kind, 0.01)} == {}


# mbr and mci leave something open
HOPPER, AMPERE = ("dgxc-013", "dgxc-014", "mbr-039"), ("kor-001", "mci-7b-001")
TITAN, OPEN_ALONE = ("tt-001", "tt-002"), ("bs-022",)
KEEP = ["complete=True", "platform=megatron on hopper, megatron on ampere"]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Published rows: too few to fit again, so what is told of them is in sample."""
    lines = {json.loads(line)["id"]: line for line in public_lines()}
    few = "\n".join(lines[name] for name in (*HOPPER, *AMPERE, *TITAN, *OPEN_ALONE))
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text(few, encoding="utf-8")
    return str(path)


def test_a_platform_has_its_complete_rows_beside_it(few: str, printed: Any) -> None:
    platforms = printed(jobs=few)["in_sample"]["groups"]["platform"]
    assert [(one["name"], one["rows"]) for one in platforms] == [
        ("platform megatron on hopper", 3),
        ("platform megatron on hopper, complete", 2),
        ("platform megatron on ampere", 2),
        ("platform megatron on ampere, complete", 1),
        ("platform torchtitan on hopper", 2),
        ("platform torchtitan on hopper, complete", 2),
        ("platform megatron-deepspeed on ampere", 1),
    ]


def test_figures_of_rows_are_those_of_their_groups_together(few: str, printed: Any) -> None:
    everything, chosen = (printed(jobs=few, where=one)["in_sample"] for one in (None, KEEP))
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
        asked(jobs=few, where=where)


def test_the_table_names_complete_rows_of_a_platform(few: str, tmp_path: Path, capsys: Any) -> None:
    unseen = tmp_path / "unseen.jsonl"
    rows = [json.loads(line) for line in Path(few).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "step_seconds" in row["measured"]:
            row["measured"]["step_seconds"] *= 1.01
    unseen.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    written = tmp_path / "accuracy.md"
    asked(jobs=str(unseen), markdown=written, json=False)
    printed = capsys.readouterr().out
    assert "megatron on hopper, complete" in printed
    assert "| megatron on hopper, complete | 2 |" in written.read_text(encoding="utf-8")
