"""Which rung first: a micro-probe, an emulated rank, an imitation, or the layout itself, by value
of information per GPU-second.

Value is expected gain in log step seconds (about a share of the step). Pure functions of beliefs,
costs and variances.
Letters: N candidates, Z nodes of a quadrature over a standard normal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.kernels import Shape, within_reach
from planner.columns import FloatColumn
from planner.study import normal

NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
ITERATIONS = 20  # of the ratio; it converges superlinearly (Dinkelbach 1967)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A way to look at one candidate. gpu_seconds: of one look.  sd: what its time says of the
    layout's own log step is off by this.

    shows_memory: whether it tells if the layout fits.  num_gpus: held at once.  The layout itself
        (`probed`) has sd 0 and shows memory.
    """

    name: str
    num_gpus: int
    gpu_seconds: float
    sd: float
    shows_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Of one candidate: expected log seconds above the best so far (gap), standard deviation,
    probability of fitting.
    """

    gap: float
    sd: float
    fits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to do next about a candidate. rate: expected gain per GPU-second of the whole way that
    starts with this rung.

    goes_on: probability that the layout itself is probed after this rung; None where it cannot be,
        whatever comes.
    """

    rung: Rung
    rate: float
    goes_on: float | None

    def reason(self, full: Rung) -> str:
        """In words, with the numbers."""
        if self.rung.name == full.name:
            return f"{self.rung.name}: gains {self.rate:.2e} a GPU-second"
        if self.goes_on is None:
            return (
                f"{self.rung.name} alone ({self.rung.gpu_seconds:.3g} GPU-seconds): gains "
                f"{self.rate:.2e} a GPU-second"
            )
        return (
            f"{self.rung.name} first ({self.rung.gpu_seconds:.3g} instead of "
            f"{full.gpu_seconds:.3g} GPU-seconds): gains {self.rate:.2e} "
            f"a GPU-second; the layout itself follows with probability {self.goes_on:.0%}"
        )


def choose_rung(belief: Belief, rungs: Sequence[Rung], full: Rung) -> Choice:
    """The rung with the best rate, the cheaper one of equals; `full` is the layout itself and
    always possible.
    """
    options = [
        _through(belief, rung, full) for rung in rungs if rung.gpu_seconds < full.gpu_seconds
    ]
    return max(
        [direct(belief, full), *options], key=lambda choice: (choice.rate, -choice.rung.gpu_seconds)
    )


def look_alone(belief: Belief, rungs: Sequence[Rung]) -> Choice:
    """The rung with the best rate where the layout itself cannot be run: what the winner gains when
    it is chosen by what looks say.

    After the rung the expectation is m + s Z, s = v / sqrt(v + t) (v: belief variance, t: rung's):
    P(fits) x E[max(0, -(m + s Z))].
    """
    variance = belief.sd**2
    moved = [variance / np.sqrt(variance + rung.sd**2) if variance > 0 else 0.0 for rung in rungs]
    gains = belief.fits * normal.expected_excess(np.full(len(rungs), belief.gap), np.array(moved))
    choices = [
        Choice(rung=rung, rate=float(gain) / rung.gpu_seconds, goes_on=None)
        for rung, gain in zip(rungs, gains, strict=True)
    ]
    return max(choices, key=lambda choice: (choice.rate, -choice.rung.gpu_seconds))


def direct(belief: Belief, full: Rung) -> Choice:
    """Probing the layout itself: P(fits) x expected improvement over its GPU-seconds."""
    gain = belief.fits * float(normal.expected_excess(np.array(belief.gap), np.array(belief.sd)))
    return Choice(rung=full, rate=gain / full.gpu_seconds, goes_on=1.0)


def _through(belief: Belief, rung: Rung, full: Rung) -> Choice:
    """A cheaper rung first, and the layout itself only where it still pays: the best ratio of
    expected gain to expected GPU-seconds.

    After the rung the expectation is m + s Z with s = v / sqrt(v + t) (v: belief variance, t:
    rung's), variance v - s^2; a rung that shows memory ends there with probability 1 - P(fits). It
    goes on where the gain then exceeds ratio x cost (Dinkelbach's condition).
    """
    variance = belief.sd**2
    moved = variance / np.sqrt(variance + rung.sd**2) if variance > 0 else 0.0
    left = np.sqrt(max(variance - moved**2, 0.0))
    alive = belief.fits if rung.shows_memory else 1.0
    later = 1.0 if rung.shows_memory else belief.fits
    gains = later * normal.expected_excess(belief.gap + moved * NODES, np.full(len(NODES), left))
    ratio, goes_on = 0.0, 1.0
    for _ in range(ITERATIONS):
        going = gains >= ratio * full.gpu_seconds
        goes_on = alive * float(WEIGHTS @ going)
        cost = rung.gpu_seconds + goes_on * full.gpu_seconds
        better = alive * float(WEIGHTS @ (gains * going)) / cost
        if better <= ratio * (1.0 + 1e-9):
            break
        ratio = better
    return Choice(rung=rung, rate=ratio, goes_on=goes_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one kind of kernel tells. loading (Q,): along the prior's shared directions (columns of
    `Prior.factor`).

    sd: of the measured log ratio around what the directions say.
    """

    name: str
    loading: tuple[float, ...]
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroProbe:
    """Kernels or collectives timed alone in one launch. kernels: their shapes, most valuable first.
    gpu_seconds: its cost.
    """

    name: str
    looks: tuple[Look, ...]
    gpu_seconds: float
    kernels: tuple[Shape, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Held at once."""
        return max((shape.num_gpus for shape in self.kernels), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A look and its answer. log_ratio: measured over predicted."""

    look: Look
    log_ratio: float

    @property
    def seen(self) -> tuple[float, float]:
        """(value along the loading, its variance)."""
        return within_reach(self.log_ratio, float(np.linalg.norm(self.look.loading)), self.look.sd)


def value_of_look(
    log_seconds: FloatColumn, effect: FloatColumn, variance: float, sd: float
) -> float:
    """Expected drop of the least expected log seconds (N,) when something that candidates have in
    common is measured.

    effect (N,): covariance of each candidate's log seconds with what is measured, whose own
    variance is `variance`, measured to `sd`. E_Z[min_i m_i] - E_Z[min_i (m_i + c_i Z)], c = effect
    / sqrt(variance + sd^2): the knowledge gradient (Frazier, Powell, Dayanik 2009).
    """
    spread = effect / np.sqrt(variance + sd**2)
    reach = float(np.abs(spread).max(initial=0.0)) * float(np.abs(NODES).max())
    near = log_seconds <= log_seconds.min() + 2.0 * reach
    least = np.array([np.min(log_seconds[near] + spread[near] * node) for node in NODES])
    return max(float(log_seconds.min() - WEIGHTS @ least), 0.0)
