"""Micro-probes: kernels timed in isolation, what they show of all candidates, and their worth.

Letters: N candidates, Q shared directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.kernels import KernelShape, KernelTiming, within_reach
from planner.columns import FloatColumn
from planner.study.fidelity import NODES, WEIGHTS, Evaluation
from planner.study.posterior import StudyPosterior
from planner.study.records import RUN_SD


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEffect:
    """Effect of one isolated kind of kernel on the step times of candidates.

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
    observed: reads timings of them as effects.
    """

    name: str
    effects: tuple[KernelEffect, ...]
    gpu_seconds: float
    kernels: tuple[KernelShape, ...] = ()
    observed: Callable[[Sequence[KernelTiming]], "tuple[ObservedEffect, ...]"] = lambda _: ()


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


def most_valuable(
    probes: Sequence[MicroProbe], posterior: StudyPosterior
) -> tuple[MicroProbe, float]:
    """The micro-probe with the most gain per GPU-second, and that gain."""
    rates = [micro_rate(probe, posterior) for probe in probes]
    place = int(np.argmax(rates))
    return probes[place], rates[place]


def micro_rate(probe: MicroProbe, posterior: StudyPosterior) -> float:
    """Gain per GPU-second of its most informative effect, a lower bound of all together."""
    if not probe.effects:
        return 0.0
    covariances, variances = posterior.time.along_each([effect.loading for effect in probe.effects])
    values = [
        knowledge_gradient(posterior.log_seconds, covariance, float(variance), effect.sd)
        for effect, covariance, variance in zip(probe.effects, covariances, variances, strict=True)
    ]
    return max(values) / probe.gpu_seconds


def evaluation_rate(evaluation: Evaluation, row: int, posterior: StudyPosterior) -> float:
    """Gain per GPU-second of evaluating a candidate, by its effect on all others."""
    covariance = posterior.time.with_row(row)
    gain = knowledge_gradient(
        posterior.log_seconds, covariance, float(covariance[row]), RUN_SD + evaluation.sd
    )
    return gain / evaluation.gpu_seconds
