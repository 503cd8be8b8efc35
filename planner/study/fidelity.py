"""Which fidelity to evaluate a candidate at: the one with the most expected gain per GPU-second.

Fidelities from cheap to exact: a micro-probe of kernels, one emulated rank, the layout itself.
Gains are in log step seconds, about a share of the step.
Pure functions of the posterior of one candidate, costs and variances.
Letters: Z nodes of a quadrature over a standard normal.
"""

from dataclasses import dataclass

import numpy as np

from planner.study import normal

NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
ITERATIONS = 20  # of the ratio; it converges superlinearly (Dinkelbach 1967)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One way to evaluate one candidate.

    gpu_seconds: expected cost.
    sd: error of its log time as a measure of the layout's own; 0 for the layout itself.
    """

    name: str
    gpu_seconds: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The posterior of one candidate.

    gap: expected log seconds above the best so far.
    sd: standard deviation of its log seconds.
    fits: probability that it fits.
    """

    gap: float
    sd: float
    fits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityChoice:
    """Next evaluation of a candidate.

    rate: expected gain per GPU-second, evaluations that follow included.
    full_probability: probability that the layout itself follows; None where nothing does.
    """

    evaluation: Evaluation
    rate: float
    full_probability: float | None = None

    def reason(self, full: Evaluation) -> str:
        """The choice as a sentence, with its numbers."""
        chosen = self.evaluation
        if chosen.name == full.name:
            return f"{chosen.name}: gains {self.rate:.2e} a GPU-second"
        if self.full_probability is None:
            return (
                f"{chosen.name} alone ({chosen.gpu_seconds:.3g} GPU-seconds): gains "
                f"{self.rate:.2e} a GPU-second"
            )
        return (
            f"{chosen.name} first ({chosen.gpu_seconds:.3g} instead of {full.gpu_seconds:.3g} "
            f"GPU-seconds): gains {self.rate:.2e} a GPU-second; the layout itself follows with "
            f"probability {self.full_probability:.0%}"
        )


def choose_evaluation(
    prospect: Prospect, emulation: Evaluation, full: Evaluation | None
) -> FidelityChoice:
    """The evaluation with the better rate, the layout itself of equals.

    full: the layout itself; None if it cannot be run.
    """
    if full is None:
        return direct(prospect, emulation)
    return max(
        direct(prospect, full),
        _emulated_first(prospect, emulation, full),
        key=lambda choice: choice.rate,
    )


def direct(prospect: Prospect, evaluation: Evaluation) -> FidelityChoice:
    """An evaluation by which the winner is chosen, without another after it.

    The expectation after it is m + s Z with s = v / sqrt(v + t) (v: prior variance, t: variance of
    the evaluation, 0 of the layout itself), and the gain is P(fits) x E[max(0, -(m + s Z))]: the
    expected improvement.
    """
    moved = np.array(_moved(prospect, evaluation))
    gain = prospect.fits * float(normal.expected_excess(np.array(prospect.gap), moved))
    return FidelityChoice(evaluation=evaluation, rate=gain / evaluation.gpu_seconds)


def _moved(prospect: Prospect, evaluation: Evaluation) -> float:
    """Standard deviation by which an evaluation moves the expectation."""
    variance = prospect.sd**2
    return float(variance / np.sqrt(variance + evaluation.sd**2)) if variance > 0 else 0.0


def _emulated_first(prospect: Prospect, emulation: Evaluation, full: Evaluation) -> FidelityChoice:
    """An emulation first, then the layout itself only if that still pays.

    The rate is the best ratio of expected gain to expected GPU-seconds. After the emulation the
    expectation is m + s Z with s = v / sqrt(v + t) (v: prior variance, t: its own), and the
    variance v - s^2. It shows memory, and so ends there with probability 1 - P(fits).
    The layout itself follows if the gain exceeds ratio x cost (Dinkelbach's condition).
    """
    moved = _moved(prospect, emulation)
    left = np.sqrt(max(prospect.sd**2 - moved**2, 0.0))
    gains = normal.expected_excess(prospect.gap + moved * NODES, np.full(len(NODES), left))
    ratio, follows = 0.0, 1.0
    for _ in range(ITERATIONS):
        going = gains >= ratio * full.gpu_seconds
        follows = prospect.fits * float(WEIGHTS @ going)
        cost = emulation.gpu_seconds + follows * full.gpu_seconds
        better = prospect.fits * float(WEIGHTS @ (gains * going)) / cost
        if better <= ratio * (1.0 + 1e-9):
            break
        ratio = better
    return FidelityChoice(evaluation=emulation, rate=ratio, full_probability=follows)
