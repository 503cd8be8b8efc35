"""Tables: no word is cut; what does not fit goes below its row, then columns are left out."""

import pytest

from planner.api.render.grid import Column, grid, number, wrapped

LAYOUT = (
    "fsdp/zero2 8 · pp 2 Interleaved1F1B x4 · ac memory-budget-0.73 · float8-tensorwise+gather · "
    "compile"
)
COLUMNS = (
    number("#"), Column(name="layout", wraps=True, below=True), number("tok/s/GPU"),
    number("MFU", drop=1), number("step"), number("memory", drop=2), Column(name="source", drop=0),
)  # fmt: skip
ROWS = [
    ("1", LAYOUT, "10,927", "64.0%", "6 s", "75.2 GiB", "simulated"),
    ("2", "fsdp 8", "914", "6.0%", "61.3 s", "8.5 GiB", "screened"),
]


@pytest.mark.parametrize("width", [30, 40, 60, 72, 80, 100, 120, 200])
def test_no_word_is_cut_and_no_line_is_too_long(width: int) -> None:
    lines = grid(COLUMNS, ROWS, width).plain.split("\n")
    assert max(map(len, lines)) <= width
    assert {*LAYOUT.split(), "10,927", "6"} <= {word for line in lines for word in line.split()}


def test_wide_terminals_have_one_line_a_row() -> None:
    assert len(grid(COLUMNS, ROWS, 200).plain.split("\n")) == 4


def test_a_layout_without_room_stands_below_its_row() -> None:
    lines = grid(COLUMNS, ROWS, 64).plain.split("\n")
    assert "layout" not in lines[0]
    assert lines[0].split() == ["#", "tok/s/GPU", "MFU", "step", "memory", "source"]
    assert lines[3].startswith("    fsdp/zero2 8")


@pytest.mark.parametrize(
    ("width", "columns"), [(38, "# tok/s/GPU MFU step memory"), (30, "# tok/s/GPU step memory")]
)
def test_columns_leave_the_least_telling_first(width: int, columns: str) -> None:
    assert grid(COLUMNS, ROWS, width).plain.split("\n")[0].split() == columns.split()


def test_columns_line_up() -> None:
    lines = grid(COLUMNS, ROWS, 200).plain.split("\n")
    end = lines[0].index("tok/s/GPU") + len("tok/s/GPU")
    assert (lines[2][end - 6 : end], lines[3][end - 3 : end]) == ("10,927", "914")


def test_a_word_that_is_too_long_has_a_line_of_its_own() -> None:
    assert wrapped("a verylongword b", 5) == ["a", "verylongword", "b"]
