"""What the screen keeps and where it stops, by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.search import screen
from planner.search.screen import CellQueue
from planner.search.shortlist import ENOUGH, Shortlist, _front_and_best, _worth_keeping


def limit(best: float, structures: list[float], slack: float = 1.1, count: int = 2) -> float:
    pool = Shortlist(keep=4, count=count, smallest=False)
    pool.best, pool.structures = best, dict(enumerate(structures))
    return pool.limit(slack)


@pytest.mark.parametrize(("structures", "expected"), [
    ([10.0, 10.5], 11.0),  # the front's slack, beyond the second structure
    ([10.0, 12.0, 13.0], 12.0),  # the second structure, beyond the slack
    ([10.0, 40.0], ENOUGH * 10.0), ([10.0], ENOUGH * 10.0),  # a second is still to be found
    ([], np.inf),  # nothing fits yet, and nothing is too slow
])  # fmt: skip
def test_the_screen_ends_behind_the_slack_and_the_last_structure_shown(
    structures: list[float], expected: float
) -> None:
    assert limit(min(structures, default=np.inf), structures) == pytest.approx(expected)


def test_the_best_are_kept_and_behind_them_what_needs_less_memory() -> None:
    """Rows by time: 3, 1, 4, 0, 2; row 4 does not fit."""
    order, fits = np.array([3, 1, 4, 0, 2]), np.array([True, True, True, True, False])
    device = np.array([5.0, 9.0, 4.0, 7.0, 1.0])
    assert _front_and_best(order, device, fits, 1).tolist() == [3, 0, 2]
    assert _front_and_best(order, device, fits, 2).tolist() == [3, 1, 0, 2]
    step = np.array([4.0, 2.0, 5.0, 1.0, 3.0])
    assert _worth_keeping(step, device, device, fits, 1).tolist() == [3, 0, 2]


def test_where_nothing_fits_the_smallest_eight_are_kept() -> None:
    device = np.arange(20.0, 0.0, -1.0)
    kept = _worth_keeping(device, device, device, np.zeros(20, dtype=np.bool_), 4)
    assert kept.tolist() == [19, 18, 17, 16, 15, 14, 13, 12]


def queue(seconds: list[float], device: list[float], limit: float, smallest: bool = False) -> Any:
    """Cells of these bounds; those above the limit cannot fit. Looser bounds are half as long."""
    own, needed = np.array(seconds), np.array(device)
    cell_bounds: Any = SimpleNamespace(
        cells=seconds, seconds=own, coarse_bound_seconds=own / 2.0, device_bytes=needed,
        within=lambda rows, most: rows[own[rows] <= most], know=lambda rows: None,
        may_fit=lambda rows: needed[rows] <= limit,
    )  # fmt: skip
    return CellQueue(cell_bounds, by_memory=smallest)


def taken(cells: Any, limit: float = np.inf, room: int = 1) -> list[int]:
    """All cells of the queue one after the other, each of one layout."""
    found: list[int] = []
    while len(part := cells.next(limit, np.ones(8, dtype=np.int64), room)):
        found += part.tolist()
    return found


def test_cells_are_taken_by_their_own_bound_and_those_too_large_are_left_out() -> None:
    cells = queue([4.0, 1.0, 3.0, 2.0], [10.0, 10.0, 50.0, 20.0], limit=30.0)
    assert taken(cells) == [1, 3, 0]
    assert cells.too_large().tolist() == [2]
    small = queue([4.0, 1.0, 3.0, 2.0], [10.0, 11.0, 50.0, 9.0], limit=30.0, smallest=True)
    assert taken(small) == [3, 0, 1]


def test_bands_are_priced_up_to_the_limit_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their looser bounds of 1 to 4 s; a cell is taken once no unknown one can be before it."""
    monkeypatch.setattr(screen, "BAND", 1)
    cells = queue([2.0, 4.0, 6.0, 8.0], [10.0] * 4, limit=30.0)
    assert taken(cells, limit=3.5) == [0]
    assert [*cells.order] == [3]  # nobody looked at it


@pytest.mark.parametrize("limit", [np.inf, 40.0])
def test_cells_come_in_the_order_of_their_bounds_however_many_are_sorted_at_once(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "BAND", 7)
    seconds = np.random.default_rng(5).integers(1, 60, 200).astype(float)  # many are equal
    cells = queue(seconds.tolist(), [10.0] * 200, limit=30.0)
    cells.loose = seconds  # as tight as they may be
    found: list[int] = []
    while len(part := cells.next(limit, np.ones(200, dtype=np.int64), 3)):
        found += part.tolist()
    order = np.argsort(seconds, kind="stable")
    assert found == order[seconds[order] <= limit].tolist()


def test_memory_is_asked_of_cells_that_compute_no_longer_than_the_limit() -> None:
    cells = queue([1.0, 5.0, 3.0, 9.0], [10.0, 50.0, 40.0, 60.0], limit=30.0)
    asked: list[int] = []
    fits = cells.cell_bounds.may_fit

    def may_fit(rows: Any) -> Any:
        asked.extend(rows.tolist())
        return fits(rows)

    cells.cell_bounds.may_fit = may_fit
    assert taken(cells, limit=4.0) == [0]
    assert sorted(asked) == [0, 2]
    assert cells.too_large().tolist() == [2]


def test_the_nearest_of_what_is_too_large_needs_least() -> None:
    cells = queue([1.0, 2.0, 3.0, 4.0], [90.0, 50.0, 10.0, 70.0], limit=30.0)
    assert taken(cells) == [2]
    assert cells.smallest(2).tolist() == [1, 3]
