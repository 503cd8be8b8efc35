"""What is shown of a ranking, and its front of time against memory: small cases by hand."""

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.search.choice.pareto import different, front
from tests.pricing import rows as batch_of

GB = 1e9


def shown(batch: LayoutBatch, step: list[float], gigabytes: list[float], count: int) -> list[int]:
    device = np.array(gigabytes) * GB
    return different(batch, np.array(step), device, np.arange(len(batch)), count).tolist()


def test_of_equally_fast_rows_the_smaller_is_on_the_front_and_rounding_is_no_less() -> None:
    assert front(np.array([1.0, 1.0]), np.array([5.0, 4.0])).tolist() == [1]
    assert front(np.array([1.0, 2.0]), np.array([5.0, 5.0 * (1.0 - 1e-12)])).tolist() == [0]


@pytest.mark.parametrize(("most", "rows"), [(5, [0, 1, 2, 3, 4]), (3, [0, 2, 4]), (2, [0, 4])])
def test_a_long_front_is_thinned_evenly_and_keeps_its_ends(most: int, rows: list[int]) -> None:
    step = np.arange(1.0, 6.0)
    assert front(step, step[::-1], most=most).tolist() == rows


def test_one_structure_is_shown_once_however_far_apart_its_layouts_are() -> None:
    batch = batch_of({"micro_batch_size": 1}, {"micro_batch_size": 2}, {"tp": 2})
    assert shown(batch, [1.0, 2.0, 3.0], [10.0, 40.0, 10.0], 2) == [0, 2]


# 1% slower and 9% larger: one layout to a reader
APART = [(1.01, 10.9, [0, 2]), (1.03, 10.9, [0, 1]), (1.01, 11.1, [0, 1])]


@pytest.mark.parametrize(("step", "memory", "rows"), APART)
def test_other_checkpointing_is_another_layout(step: float, memory: float, rows: list[int]) -> None:
    batch = batch_of({"ac": "full"}, {"ac": "none"}, {"tp": 2, "ac": "none"})
    assert shown(batch, [1.0, step, 5.0], [10.0, memory, 50.0], 2) == rows


def test_near_copies_fill_up_in_the_order_given() -> None:
    batch = batch_of({"micro_batch_size": 1}, {"micro_batch_size": 2}, {"tp": 2})
    device = np.full(3, 10 * GB)
    found = different(batch, np.array([3.0, 1.0, 2.0]), device, np.array([1, 2, 0]), 3)
    assert found.tolist() == [1, 2, 0]
    assert shown(batch, [1.0, 2.0, 3.0], [10.0, 10.0, 10.0], 3) == [0, 2, 1]
