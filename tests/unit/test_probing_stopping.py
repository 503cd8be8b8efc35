"""Expected regret: against closed forms, and at its limits."""

import numpy as np
import pytest

from planner.study.normal import expected_excess
from planner.study.regret import DRAWS, expected_regret


def test_of_two_candidates_is_the_expected_excess() -> None:
    mean, covariance = np.array([0.0, 0.02]), np.diag([1e-4, 9e-4])
    regret = expected_regret(mean, covariance, np.ones(2), 0)
    expected = float(expected_excess(np.array(0.02), np.array(np.sqrt(1e-3))))
    assert regret.expected_share == pytest.approx(expected, rel=0.15)
    assert regret.probability_other_better == pytest.approx(0.263, abs=0.04)


def test_errors_in_common_cancel() -> None:
    mean = np.array([0.0, 0.05, 0.08])
    together = np.full((3, 3), 0.04) + 1e-8 * np.eye(3)
    assert expected_regret(mean, together, np.ones(3), 0).expected_share < 1e-4
    assert expected_regret(mean, 0.04 * np.eye(3), np.ones(3), 0).expected_share > 0.05


def test_what_does_not_fit_is_no_loss() -> None:
    mean, covariance = np.array([0.0, -0.2]), 1e-6 * np.eye(2)
    assert expected_regret(mean, covariance, np.array([1.0, 0.0]), 0).expected_share == 0.0
    half = expected_regret(mean, covariance, np.array([1.0, 0.5]), 0)
    assert half.expected_share == pytest.approx(0.5 * np.expm1(0.2), rel=0.15)
    assert half.share_95 == pytest.approx(np.expm1(0.2), rel=0.02)


def test_the_seed_hardly_matters_and_the_same_seed_not_at_all() -> None:
    rng = np.random.default_rng(0)
    mean, root = np.sort(0.05 * rng.random(64)), 0.05 * rng.standard_normal((64, 64)) / 8.0
    given = mean, root @ root.T + 1e-6 * np.eye(64), np.ones(64), 0
    values = [expected_regret(*given, seed=seed).expected_share for seed in (0, 0, 1, 2)]
    assert values[0] == values[1]
    assert np.ptp(values) < 4.0 * np.mean(values) / np.sqrt(DRAWS)


def test_the_statement_says_the_number_and_the_side() -> None:
    regret = expected_regret(np.array([0.0, 0.02]), np.diag([1e-4, 9e-4]), np.ones(2), 0)
    assert f"{regret.expected_share:.2%}" in regret.statement(0.01)
    assert "below the tolerance of 1.00%" in regret.statement(0.01)
    assert "above the tolerance of 0.10%" in regret.statement(0.001)


def test_the_winner_itself_is_taken_to_fit() -> None:
    regret = expected_regret(np.array([0.0, 0.3]), 1e-8 * np.eye(2), np.array([0.0, 1.0]), 0)
    assert regret.expected_share == pytest.approx(0.0, abs=1e-3)


def test_draws_are_antithetic() -> None:
    """Of two alike, one is faster in a draw and the other in its opposite."""
    for seed in range(3):
        regret = expected_regret(np.zeros(2), 0.01 * np.eye(2), np.ones(2), 0, seed=seed)
        assert regret.probability_other_better == 0.5


def test_what_is_certain_is_the_difference_itself() -> None:
    regret = expected_regret(np.log([3.0, 2.0, 2.5]), np.zeros((3, 3)), np.ones(3), 0)
    assert regret.expected_share == pytest.approx(0.5)
    assert regret.share_95 == pytest.approx(0.5)
    assert regret.probability_other_better == 1.0
    best = expected_regret(np.log([3.0, 2.0, 2.5]), np.zeros((3, 3)), np.ones(3), 1)
    assert (best.expected_share, best.share_95, best.probability_other_better) == (0.0, 0.0, 0.0)


def test_one_case_in_twenty_exceeds_the_share() -> None:
    """Of one candidate beside a winner that is known: 1.645 of its deviations."""
    regret = expected_regret(np.zeros(2), np.diag([0.0, 0.01]), np.ones(2), 0)
    assert regret.share_95 == pytest.approx(np.expm1(0.1645), rel=0.1)


def test_a_covariance_that_rounding_made_negative_is_none() -> None:
    regret = expected_regret(np.log([3.0, 2.0]), np.diag([-1e-18, -1e-18]), np.ones(2), 0)
    assert regret.expected_share == pytest.approx(0.5)
