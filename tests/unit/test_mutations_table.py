"""The table of mutations is about the code as it stands."""

import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from mutations import files_of, mutations, occurrences


def test_every_row_breaks_one_line_that_is_there_and_has_tests() -> None:
    stale = [one.name for one in mutations() if occurrences(one) != 1 or one.old == one.new]
    stale += [one.name for one in mutations() if not files_of(one)]
    assert stale == []


def test_names_are_unique() -> None:
    names = [one.name for one in mutations()]
    assert len(set(names)) == len(names) >= 60
