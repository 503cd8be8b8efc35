"""Which fidelity to evaluate a candidate at: the one with the most expected gain per GPU-second.

Fidelities from cheap to exact: a micro-probe of kernels, one emulated rank, the layout itself.
Gains are in log step seconds, about a share of the step.
Pure functions of the posterior of one candidate, costs and variances.
Letters: N candidates, Z nodes of a quadrature over a standard normal, Q shared directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.kernels import KernelShape, within_reach
from planner.columns import FloatColumn
from planner.study import normal

NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
ITERATIONS = 20  # of the ratio; it converges superlinearly (Dinkelbach 1967)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One fidelity option for one candidate.

    num_gpus: used at once.
    gpu_seconds: expected cost.
    sd: error of its log time as a measure of the layout's own; 0 for the layout itself.
    shows_memory: whether it shows if the layout fits.
    """

    name: str
    num_gpus: int
    gpu_seconds: float
    sd: float
    shows_memory: bool


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
    """How to evaluate a candidate next.

    rate: expected gain per GPU-second, evaluations that follow included.
    full_probability: probability that the layout itself is probed next; None if it cannot be.
    """

    evaluation: Evaluation
    rate: float
    full_probability: float | None

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
    prospect: Prospect, cheaper: Sequence[Evaluation], full: Evaluation
) -> FidelityChoice:
    """The evaluation with the best rate, the cheaper one of equals.

    full: the layout itself, which is always possible.
    """
    choices = [direct(prospect, full)]
    choices += [
        _cheaper_first(prospect, one, full) for one in cheaper if one.gpu_seconds < full.gpu_seconds
    ]
    return max(choices, key=lambda choice: (choice.rate, -choice.evaluation.gpu_seconds))


def choose_without_full(prospect: Prospect, cheaper: Sequence[Evaluation]) -> FidelityChoice:
    """The evaluation with the best rate if the layout itself cannot be run.

    The winner is then chosen by low-fidelity evaluations only. After one, the expectation is
    m + s Z with s = v / sqrt(v + t) (v: prior variance, t: variance of the evaluation), and the
    gain is P(fits) x E[max(0, -(m + s Z))].
    """
    variance = prospect.sd**2
    moved = [variance / np.sqrt(variance + one.sd**2) if variance > 0 else 0.0 for one in cheaper]
    gains = prospect.fits * normal.expected_excess(
        np.full(len(cheaper), prospect.gap), np.array(moved)
    )
    choices = [
        FidelityChoice(evaluation=one, rate=float(gain) / one.gpu_seconds, full_probability=None)
        for one, gain in zip(cheaper, gains, strict=True)
    ]
    return max(choices, key=lambda choice: (choice.rate, -choice.evaluation.gpu_seconds))


def direct(prospect: Prospect, full: Evaluation) -> FidelityChoice:
    """A probe of the layout itself: P(fits) x expected improvement over its GPU-seconds."""
    gain = prospect.fits * float(
        normal.expected_excess(np.array(prospect.gap), np.array(prospect.sd))
    )
    return FidelityChoice(evaluation=full, rate=gain / full.gpu_seconds, full_probability=1.0)


def _cheaper_first(prospect: Prospect, cheaper: Evaluation, full: Evaluation) -> FidelityChoice:
    """A cheaper evaluation first, then the layout itself only if that still pays.

    The rate is the best ratio of expected gain to expected GPU-seconds. After the cheaper
    evaluation the expectation is m + s Z with s = v / sqrt(v + t) (v: prior variance, t: its own),
    and the variance v - s^2. One that shows memory ends there with probability 1 - P(fits).
    The layout itself follows if the gain exceeds ratio x cost (Dinkelbach's condition).
    """
    variance = prospect.sd**2
    moved = variance / np.sqrt(variance + cheaper.sd**2) if variance > 0 else 0.0
    left = np.sqrt(max(variance - moved**2, 0.0))
    alive = prospect.fits if cheaper.shows_memory else 1.0
    later = 1.0 if cheaper.shows_memory else prospect.fits
    gains = later * normal.expected_excess(prospect.gap + moved * NODES, np.full(len(NODES), left))
    ratio, follows = 0.0, 1.0
    for _ in range(ITERATIONS):
        going = gains >= ratio * full.gpu_seconds
        follows = alive * float(WEIGHTS @ going)
        cost = cheaper.gpu_seconds + follows * full.gpu_seconds
        better = alive * float(WEIGHTS @ (gains * going)) / cost
        if better <= ratio * (1.0 + 1e-9):
            break
        ratio = better
    return FidelityChoice(evaluation=cheaper, rate=ratio, full_probability=follows)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEffect:
    """What timing one kind of kernel shows about the step times of candidates.

    loading (Q,): along the prior's shared directions, the columns of `Prior.factor`.
    sd: of the measured log ratio around what the directions predict.
    """

    name: str
    loading: tuple[float, ...]
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroProbe:
    """Kernels or collectives timed in isolation in one launch.

    kernels: their shapes, most valuable first.
    gpu_seconds: expected cost.
    """

    name: str
    effects: tuple[KernelEffect, ...]
    gpu_seconds: float
    kernels: tuple[KernelShape, ...] = ()

    @property
    def num_gpus(self) -> int:
        """GPUs used at once."""
        return max((shape.num_gpus for shape in self.kernels), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEffect:
    """A kernel effect with its measurement. log_ratio: measured over predicted."""

    effect: KernelEffect
    log_ratio: float

    @property
    def along_loading(self) -> tuple[float, float]:
        """(value along the loading, its variance)."""
        length = float(np.linalg.norm(self.effect.loading))
        return within_reach(self.log_ratio, length, self.effect.sd)


def knowledge_gradient(
    log_seconds: FloatColumn, covariance: FloatColumn, variance: float, sd: float
) -> float:
    """Expected drop of the least expected log seconds when something shared is measured.

    E_Z[min_i m_i] - E_Z[min_i (m_i + c_i Z)], c = covariance / sqrt(variance + sd^2):
    the knowledge gradient (Frazier, Powell, Dayanik 2009).

    log_seconds (N,): m, expected log seconds of every candidate.
    covariance (N,): of each candidate's log seconds with what is measured.
    variance: of what is measured.
    sd: of the measurement itself.
    """
    best = int(np.argmin(log_seconds))
    spread = covariance / np.sqrt(variance + sd**2)
    apart = spread - spread[best]  # what all share changes no winner
    reach = np.abs(apart) * float(np.abs(NODES).max())
    near = np.flatnonzero(log_seconds - reach <= log_seconds[best])
    moved = log_seconds[near, None] + apart[near, None] * NODES
    return max(float(log_seconds[best] - WEIGHTS @ moved.min(axis=0)), 0.0)
