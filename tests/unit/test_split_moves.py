"""Starts and moves of layer splits, and a climb that leaves out what cannot gain."""

from typing import Any

import numpy as np
import pytest

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.intake.jobs import read_job
from planner.schedules import SCHEDULES
from planner.search.one_size import search_size
from planner.search.variations import split_moves
from planner.search.variations.split_moves import balanced, holders_of, possible, sloped
from planner.search.variations.splits import Climb, Tried
from tests.conftest import job_values

ONE_EACH = ((0,), (1,), (2,))
LOOPED = holders_of(SCHEDULES["Interleaved1F1B"], 3, 2)
V_SHAPED = holders_of(SCHEDULES["ZBVZeroBubble"], 3, 2)


def test_stages_of_each_rank() -> None:
    assert LOOPED == ((0, 3), (1, 4), (2, 5))
    assert V_SHAPED == ((0, 5), (1, 4), (2, 3))


def test_a_slope_is_layers_more_on_each_rank() -> None:
    assert sloped((4, 4, 4), 1.0, ONE_EACH) == (3, 4, 5)
    assert sloped((4, 4, 4), 2.0, ONE_EACH) == (2, 4, 6)
    assert sloped((2, 2, 2, 2, 2, 2), 2.0, LOOPED) == (0, 2, 3, 2, 2, 3)
    assert sloped((1, 1, 1), 2.0, ONE_EACH) == (1, 1, 1)  # no stage gives its last layer and more


def test_layers_go_from_the_busiest_to_the_idlest() -> None:
    # a layer takes a second; the head alone takes three
    assert balanced((4, 4, 4), ONE_EACH, np.array([4.0, 4.0, 7.0])) == (5, 5, 2)
    assert balanced((4, 4, 4), ONE_EACH, np.array([4.0, 4.0, 4.5])) == (4, 4, 4)
    # the inner stages keep a layer each
    assert balanced((5, 1, 5), ONE_EACH, np.array([5.0, 9.0, 5.0])) == (5, 1, 5)


def test_moves_are_off_the_busiest_and_the_fullest_rank() -> None:
    split = (2, 3, 2, 9, 2, 2)
    pairs = split_moves.helpful_pairs(split, LOOPED, (0, 1), {1, 2})
    assert pairs == [*((3, to, layers) for to in (4, 2) for layers in (1, 2, 4)), (1, 2, 1)]
    assert split_moves.moved(split, 3, 4, 2) == (2, 3, 2, 7, 4, 2)


def test_inner_stages_keep_a_layer() -> None:
    assert possible((0, 1, 0))
    assert not possible((1, 0, 1))
    assert not possible((-1, 2, 2))
    assert split_moves.even(7, 3) == (3, 2, 2)
    assert len(split_moves.all_pairs((1,) * 12)) == 12 * 11
    assert len(split_moves.all_pairs((2, 3, 1, *(2,) * 12))) == 4 * 3


def test_distinct_splits_are_listed_once() -> None:
    splits = [(1, 2), (2, 1), (1, 2)]
    tried = Tried.of(np.arange(3), splits, np.array([5, 6, 7]))
    assert tried.splits == ((1, 2), (2, 1))
    assert [tried.splits[place] for place in tried.split] == splits
    last = tried.take(np.array([2]))
    assert (last.owner[0], last.splits[last.split[0]], last.budget[0]) == (2, (1, 2), 7)


GPU, PLAIN = "h100-sxm-80gb", {"pp": 4, "tp": 1, "pp_schedule": "1F1B"}
JOBS: dict[str, dict[str, Any]] = {
    "one stage a rank": job_values("llama3-8b", GPU, 8, 4096, 32, search={"fix": PLAIN}),
    "all schedules": job_values(
        "llama3-70b", GPU, 64, 4096, 128, search={"fix": {"pp": 8, "tp": 1}}
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_not_faster_is_left_out_of_a_climb_and_misses_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[int] = []
    faster = Climb._faster

    def counted(self: Climb, batch: LayoutBatch, value: FloatColumn) -> IntColumn:
        rows = faster(self, batch, value)
        left_out.append(len(batch) - len(rows))
        return rows

    def everything(self: Climb, batch: LayoutBatch, value: FloatColumn) -> IntColumn:
        return np.arange(len(batch))

    found = []
    for way in (counted, everything):
        monkeypatch.setattr(Climb, "_faster", way)
        job = read_job(JOBS[name])
        found.append(search_size(job, job.cluster, lambda _: None).candidates)
    assert sum(left_out) > 100
    assert found[0] == found[1]
