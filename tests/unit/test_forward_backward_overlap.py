"""What an overlapped forward and backward hide of each other's communication, by hand."""

import numpy as np
import pytest

from planner.cost.layer.forward_backward_overlap import PairColumns, relief


def column(seconds: float) -> np.ndarray:
    """The same for each of three units, of one layout."""
    return np.full((3, 1), seconds)


def pair(**changes: float) -> PairColumns:
    seconds = {
        "forward_tp": 1.0, "forward_ep": 3.0, "backward_tp": 0.5, "backward_ep": 1.5,
        "forward_cover": 10.0, "backward_cover": 20.0,
    } | changes  # fmt: skip
    return PairColumns(slowdown=0.25, **{name: column(value) for name, value in seconds.items()})


def saved(pairs: PairColumns, virtual_stages: int = 1) -> tuple[float, float, float]:
    units = np.array([[2.0], [1.0], [1.0]])
    found = relief(pairs, units, np.array([virtual_stages]))
    return float(found.tp[0]), float(found.ep[0]), float(found.saved[0])


def test_all_of_it_hides_under_enough_compute() -> None:
    assert saved(pair()) == pytest.approx((4 * 1.5, 4 * 4.5, 0.75 * 4 * 6.0))


def test_no_more_hides_than_the_partner_computes() -> None:
    """The forward's 4 s under 2 s of backward: half. The backward's 2 s under 0.5 s: a quarter."""
    tp, ep, seconds = saved(pair(forward_cover=0.5, backward_cover=2.0))
    assert (tp, ep) == pytest.approx((4 * (0.5 + 0.125), 4 * (1.5 + 0.375)))
    assert seconds == pytest.approx(0.75 * (tp + ep))


def test_a_pair_is_of_one_stage() -> None:
    assert saved(pair(), virtual_stages=2) == pytest.approx((3.0, 9.0, 0.75 * 12.0))
