"""docs/coverage.md names a place and a test for every row; `test_extension_table.py` finds that
both exist.
"""

from tests.conftest import ROOT

LINES = (ROOT / "docs" / "coverage.md").read_text().splitlines()
CELLS = [line.strip("|").split("|") for line in LINES if line.startswith("| ")]


def test_every_row_has_a_place_and_a_test() -> None:
    rows = [row for row in CELLS if len(row) == 3 and not row[0].startswith((" **", " Phrase"))]
    assert len(rows) >= 40
    without = [row for row in rows if "`" not in row[1]]
    without += [row for row in rows if "tests/" not in row[2] and "by hand" not in row[2]]
    assert without == []
