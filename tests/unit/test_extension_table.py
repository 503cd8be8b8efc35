"""The declared extension points, of which CONTRIBUTING.md's table is written: they exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

POINTS = yaml.safe_load((ROOT / "docs" / "extension-points.yaml").read_text(encoding="utf-8"))
PATH = re.compile(r"(?:planner|probes|api|benchmarks|tests)/[\w./]*")
OUTSIDE = "tests/unit/test_extension_points.py"


@pytest.mark.parametrize("point", POINTS, ids=[point["add"] for point in POINTS])
def test_its_places_and_its_test_exist(point: dict[str, Any]) -> None:
    said = f"{point['file']} {point.get('line', '')} {point.get('also', '')}"
    for path in PATH.findall(re.sub(r"NAME\.\w+", "", said)):
        assert (ROOT / path.rstrip(".")).exists(), path
    file, _, name = point["test"].partition("::")
    assert not name or re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_test_of_an_extension_from_outside_has_a_row() -> None:
    """One test of each kind at least, named by its row."""
    named = {point["test"].partition("::")[2] for point in POINTS if OUTSIDE in point["test"]}
    sections = re.findall(r"^# ---- ([\w ]+) -", (ROOT / OUTSIDE).read_text(), re.MULTILINE)
    assert len(named) >= len(sections), (named, sections)


def test_the_map_of_the_house_has_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {
        f"{path.parent.relative_to(ROOT)}/"
        for folder in ("planner", "planner/cost")
        for path in (ROOT / folder).glob("*/__init__.py")
        if not path.parent.is_symlink()
    }
    assert rooms <= set(re.findall(r"^\| `([\w/]+/)`", text, re.MULTILINE))


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_a_page_names_exists(page: Path) -> None:
    named = r"`((?:planner|api|probes|tests|benchmarks|docs)/[\w./-]+)(?:::(\w+))?`"
    for path, test in re.findall(named, page.read_text()):
        if "NAME" not in path and "own-GPU" not in path:
            assert (ROOT / path).exists(), path
            assert not test or f"def {test}(" in (ROOT / path).read_text(), test
