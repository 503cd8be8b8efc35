"""The choice of fidelity, against simulation and at its limits."""

from dataclasses import replace

import numpy as np
import pytest

from planner.study.fidelity import Evaluation, Prospect, choose_evaluation, direct
from planner.study.micro_probes import KernelEffect, ObservedEffect, knowledge_gradient
from planner.study.normal import expected_excess

FULL = Evaluation(name="probed", gpu_seconds=5000.0, sd=0.0)
EMULATED = Evaluation(name="emulated", gpu_seconds=60.0, sd=0.06)
BLIND, DEAR = replace(EMULATED, sd=10.0), replace(EMULATED, gpu_seconds=5000.0, sd=0.01)


def test_direct_is_expected_improvement_over_cost() -> None:
    choice = direct(Prospect(gap=0.02, sd=0.1, fits=0.8), FULL)
    excess = float(expected_excess(np.array(0.02), np.array(0.1)))
    assert choice.rate == pytest.approx(0.8 * excess / 5000.0)
    assert "probed" in choice.reason(FULL)


LOOKS = [
    pytest.param((0.0, 0.05, 0.3), EMULATED, EMULATED, id="cheaply where memory is in doubt"),
    pytest.param((0.0, 0.05, 1.0), BLIND, FULL, id="not by ranks that say nothing new"),
    pytest.param((0.0, 0.2, 0.2), DEAR, FULL, id="not by ranks as dear as the layout"),
    pytest.param((0.02, 0.0, 0.0), EMULATED, FULL, id="not where nothing can be gained"),
]


@pytest.mark.parametrize(("belief", "emulation", "chosen"), LOOKS)
def test_a_layout_is_looked_at_first(
    belief: tuple[float, float, float], emulation: Evaluation, chosen: Evaluation
) -> None:
    prospect = Prospect(**dict(zip(("gap", "sd", "fits"), belief, strict=True)))
    assert choose_evaluation(prospect, emulation, FULL).evaluation == chosen


@pytest.mark.parametrize(
    ("gap", "sd", "fits"), [(0.05, 0.1, 0.9), (0.0, 0.2, 0.5), (0.2, 0.1, 1.0)]
)
def test_the_rate_of_a_rung_is_what_following_it_brings(gap: float, sd: float, fits: float) -> None:
    """Draws the truth, the rung's word on it and the decision; mean gain over mean cost."""
    belief = Prospect(gap=gap, sd=sd, fits=fits)
    choice = choose_evaluation(belief, EMULATED, FULL)
    assert choice.evaluation is EMULATED
    rng = np.random.default_rng(0)
    truth = belief.gap + belief.sd * rng.standard_normal(400_000)
    heard = truth + EMULATED.sd * rng.standard_normal(len(truth))
    variance = belief.sd**2
    share = variance / (variance + EMULATED.sd**2)
    after, left = belief.gap + share * (heard - belief.gap), np.sqrt(variance * (1.0 - share))
    pays = expected_excess(after, np.full(len(after), left)) >= choice.rate * FULL.gpu_seconds
    followed = (rng.random(len(truth)) < belief.fits) & pays
    gain = np.where(followed, np.maximum(-truth, 0.0), 0.0).mean()
    cost = EMULATED.gpu_seconds + followed.mean() * FULL.gpu_seconds
    assert gain / cost == pytest.approx(choice.rate, rel=0.05)
    assert followed.mean() == pytest.approx(choice.full_probability, abs=0.06)


def test_a_look_alone_is_worth_the_winner_that_it_changes() -> None:
    """Where the layout itself cannot be run, the choice by the look's word gains this much."""
    belief = Prospect(gap=0.04, sd=0.15, fits=0.8)
    rng = np.random.default_rng(0)
    truth = belief.gap + belief.sd * rng.standard_normal(400_000)
    for sd in (0.3, 0.02):
        look = replace(EMULATED, sd=sd)
        choice = choose_evaluation(belief, look, None)
        heard = truth + sd * rng.standard_normal(len(truth))
        after = belief.gap + belief.sd**2 / (belief.sd**2 + sd**2) * (heard - belief.gap)
        gain = belief.fits * np.where(after < 0.0, -truth, 0.0).mean()
        assert choice.rate == pytest.approx(gain / look.gpu_seconds, rel=0.03)
        assert choice.full_probability is None
        assert "emulated alone" in choice.reason(FULL)


def test_the_threshold_is_the_best_one() -> None:
    """No other rule of going on has a better ratio of gain to cost."""
    belief = Prospect(gap=0.03, sd=0.12, fits=0.8)
    best = choose_evaluation(belief, EMULATED, FULL).rate
    nodes = np.linspace(-6.0, 6.0, 2001)
    weights = np.exp(-0.5 * nodes**2)
    weights /= weights.sum()
    moved = belief.sd**2 / np.sqrt(belief.sd**2 + EMULATED.sd**2)
    left = np.full(len(nodes), np.sqrt(belief.sd**2 - moved**2))
    gains = expected_excess(belief.gap + moved * nodes, left)
    for threshold in np.linspace(-2.5, 2.5, 21):
        going = nodes < threshold
        cost = EMULATED.gpu_seconds + belief.fits * (weights @ going) * FULL.gpu_seconds
        assert belief.fits * (weights @ (gains * going)) / cost <= best * 1.03


def test_nothing_to_gain_is_worth_nothing() -> None:
    choice = choose_evaluation(Prospect(gap=0.5, sd=0.0, fits=1.0), EMULATED, FULL)
    assert choice.rate == 0.0


def test_a_micro_probe_is_worth_what_it_can_change() -> None:
    log_seconds = np.array([0.0, 0.01, 0.5])
    same, apart = np.full(3, 0.05), np.array([0.05, -0.05, 0.0])
    assert knowledge_gradient(log_seconds, same, 1.0, 0.1) == pytest.approx(0.0, abs=1e-9)
    sharp, dull = (knowledge_gradient(log_seconds, apart, 1.0, sd) for sd in (0.1, 5.0))
    assert sharp > max(0.01, dull)
    far = knowledge_gradient(np.array([0.0, 2.0]), apart[:2], 1.0, 0.1)
    assert far == pytest.approx(0.0, abs=1e-9)


def test_an_answer_beyond_the_reach_of_directions_hardly_moves_them() -> None:
    look = KernelEffect(name="gemm bf16", loading=(0.3, 0.4), sd=0.1)
    near, far = (ObservedEffect(effect=look, log_ratio=value) for value in (-0.4, -4.0))
    assert near.along_loading == pytest.approx((-0.4, 0.01))
    assert far.along_loading[0] == pytest.approx(-np.hypot(0.5, 0.1))
    # Along the direction, by its conjugate normal update.
    answers = (near.along_loading, far.along_loading)
    moved = [abs(value) * 0.25 / (0.25 + variance) for value, variance in answers]
    assert moved[1] < 0.1 * moved[0]


def test_two_candidates_by_the_closed_form() -> None:
    """E[min] of two whose difference moves by s Z: expected excess of the gap under s."""
    log_seconds, effect, sd = np.array([0.0, 0.03]), np.array([0.04, -0.02]), 0.5
    spread = (0.04 + 0.02) / np.sqrt(1.0 + sd**2)
    expected = float(expected_excess(np.array(0.03), np.array(spread)))
    assert knowledge_gradient(log_seconds, effect, 1.0, sd) == pytest.approx(expected, rel=0.05)
