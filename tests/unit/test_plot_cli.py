"""`--plot`: what it writes, and what it refuses before any work is done."""

from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.files import check_plot, plot_plan
from planner.api.errors import codes_of
from planner.errors import MissingPackageError, SpecError
from planner.specs.plan import Plan
from tests.conftest import needed


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_a_plan_becomes_a_file(plan: Plan, tmp_path: Path, suffix: str) -> None:
    needed("vl_convert")
    target = tmp_path / f"plan{suffix}"
    check_plot(target)
    plot_plan(target, plan)
    assert len(target.read_bytes()) > 1000
    assert list(tmp_path.iterdir()) == [target], "no partial file is left"


def test_text_goes_to_stdout(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    plot_plan(Path("-"), plan)
    assert "tokens/s/GPU" in capsys.readouterr().out


@pytest.mark.parametrize(("path", "text", "rule"), [
    ("plan.gif", True, "is no format of a chart"),
    ("-", False, "is no format of a chart"),
    ("no/such/folder/plan.svg", True, "is in no folder"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused_first(path: str, text: Any, rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        check_plot(Path(path), text=text)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.api.errors.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[plot\]'") as caught:
        check_plot(Path("plan.svg"))
    assert codes_of(caught.value).exit_code == 4
    check_plot(Path("-"), text=True)
