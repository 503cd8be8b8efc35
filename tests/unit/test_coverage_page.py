"""docs/coverage.md names files and tests that exist, and a test for every row."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "coverage.md").read_text().splitlines()
PATHS = sorted(
    {
        found
        for line in LINES
        for found in re.findall(r"`((?:planner|api|probes|tests|benchmarks|docs)/[^`*]+)`", line)
    }
)
CELLS = [line.strip("|").split("|") for line in LINES if line.startswith("| ")]
ROWS = [[cell.strip() for cell in row] for row in CELLS]


@pytest.mark.parametrize("named", PATHS)
def test_what_is_named_exists(named: str) -> None:
    path, _, test = named.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text()


def test_every_row_has_a_place_and_a_test() -> None:
    rows = [row for row in ROWS if len(row) == 3 and not row[0].startswith(("**", "Phrase"))]
    assert (len(rows) >= 40, len(PATHS) > 100) == (True, True), "the page was not read"
    without = [row for row in rows if "`" not in row[1]]
    without += [row for row in rows if "tests/" not in row[2] and "by hand" not in row[2]]
    assert without == []
