"""The core for a weekend (docs/explanation/core.md): its files, their steps, their lines."""

from benchmarks.core import MOST_LINES, core, lines_of

STEPS = ["spec", "table", "ops", "machine", "price", "space", "frontier", "plan"]


def test_the_core_is_there_in_its_order_and_small_enough_for_a_weekend() -> None:
    steps, files = zip(*core(), strict=True)
    assert list(dict.fromkeys(steps)) == STEPS
    assert steps == tuple(sorted(steps, key=STEPS.index)), "one step after the other"
    assert len(set(files)) == len(files) > 15
    assert [path for path in files if not path.is_file()] == []
    assert sum(map(lines_of, files)) <= MOST_LINES
