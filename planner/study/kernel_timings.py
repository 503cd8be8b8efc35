"""Micro-probes of a study: which kernels to time, and what their timings show.

Worth timing are kernels that the candidates run and no timing covers yet. Each timing gives
measured over predicted seconds of an isolated kernel. The calibration's principal directions give
the error of that prediction, kernel by kernel, and the same directions move the step times of
candidates. So a timing is an observation along them. Letters: D directions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.coverage import UncoveredKernel, Use, choose, probe_seconds, uses
from planner.calibration.kernels import (
    KernelShape,
    KernelTiming,
    alone,
    alone_gradient,
    alone_sd,
    by_kind,
    shape_seconds,
    timing_fingerprint,
)
from planner.columns import FloatColumn
from planner.cost.price import Pricer
from planner.search.fit import OOM_LIMIT
from planner.study.candidates import Candidates
from planner.study.micro_probes import KernelEffect, MicroProbe, ObservedEffect
from planner.trainers.registry import code_of

LOOKED_AT = 32  # candidates whose kernels are worth timing: the fastest expected; judgement
BUDGET_GPU_SECONDS = 20.0  # of timed kernels in one launch; judgement
MOST_KERNELS = 100  # of one launch; judgement
LEAST_LOADING = 0.01  # a kind of kernel that no direction moves by this much is not informative
ALONE, TOGETHER = "kernels", "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyKernels:
    """The kernels of a study's fastest candidates.

    used: each kernel's seconds in a step and its share.
    alone: predicted seconds of each kernel in isolation.
    gradient: derivative of the logarithm of `alone` by each knob, (K,).
    directions (D, K), covariance (K, K): of the knobs.
    num_factors: columns of the candidates' shared errors, directions first.
    fitted: fingerprints of timings that the calibration was fitted to.
    """

    used: Mapping[KernelShape, Use]
    alone: Mapping[KernelShape, float]
    gradient: Mapping[KernelShape, FloatColumn]
    directions: FloatColumn
    num_factors: int
    covariance: FloatColumn
    gpu: str
    fitted: frozenset[str]

    @classmethod
    def of(cls, pricer: Pricer, candidates: Candidates) -> "StudyKernels":
        """The kernels of the LOOKED_AT fastest candidates that fit."""
        rows = np.flatnonzero(candidates.prior.oom_probability <= OOM_LIMIT)[:LOOKED_AT]
        batch = candidates.batch.take(rows if len(rows) else np.arange(1))
        used = {use.shape: use for use in uses(pricer, batch) if use.seconds > 0}
        shapes = list(used)
        calibration, trainer, gpu = pricer.calibration, code_of(pricer.training), pricer.cluster.gpu
        return cls(
            used=used,
            alone=dict(zip(shapes, shape_seconds(alone(pricer), shapes).tolist(), strict=True)),
            gradient=dict(zip(shapes, alone_gradient(pricer, shapes), strict=True)),
            directions=calibration.directions(trainer, gpu.family)[0],
            num_factors=candidates.prior.factor.shape[1],
            covariance=calibration.effective_covariance(trainer, gpu.family),
            gpu=gpu.name,
            fitted=calibration.fitted,
        )

    def effect(self, name: str, shapes: Iterable[KernelShape]) -> KernelEffect:
        """Effect of timings of these shapes together, each weighted by its share of a step.

        The last loadings, of offsets that all runs of a unit share, are 0. Errors of the knobs
        outside the directions are noise of the effect.
        """
        known = [shape for shape in shapes if shape in self.used]
        gradient = self._mean(known, lambda shape: self.gradient[shape])
        loading = self.directions @ gradient
        beside = max(float(gradient @ self.covariance @ gradient - loading @ loading), 0.0)
        sd = float(np.sqrt(alone_sd(known) ** 2 + beside))
        offsets = [0.0] * (self.num_factors - len(loading))
        return KernelEffect(name=name, loading=(*loading.tolist(), *offsets), sd=sd)

    def observed(self, timings: Sequence[KernelTiming]) -> tuple[ObservedEffect, ...]:
        """Effects observed in these timings, by kind of kernel; the newest of a shape counts.

        Shapes that no candidate runs are ignored. So is a kind that the calibration was fitted to:
        more shapes of it have the same error as the first ones.
        """
        known = by_kind(
            one.shape for one in timings if timing_fingerprint(self.gpu, one) in self.fitted
        )
        seconds = {one.shape: one.seconds for one in timings if one.seconds > 0}
        found = []
        for name, shapes in by_kind(shape for shape in seconds if self.alone.get(shape)).items():
            effect = self.effect(name, shapes)
            if name not in known and _tells(effect):
                ratio = self._mean(shapes, lambda shape: np.log(seconds[shape] / self.alone[shape]))
                found.append(ObservedEffect(effect=effect, log_ratio=float(ratio)))
        return tuple(found)

    def probes(
        self, covered: Sequence[KernelShape], *, num_gpus: int, start_seconds: float
    ) -> tuple[MicroProbe, ...]:
        """The launches that would cover what no timing covers yet.

        One times kernels of one GPU, one the collectives between all available GPUs.
        """
        chosen = choose(
            self.used.values(), covered, budget_seconds=BUDGET_GPU_SECONDS, num_gpus=num_gpus
        )[:MOST_KERNELS]
        made = []
        for name, gaps in (
            (ALONE, [gap for gap in chosen if not _shared(gap)]),
            (TOGETHER, [gap for gap in chosen if _shared(gap)]),
        ):
            kinds = by_kind(gap.use.shape for gap in gaps)
            found = (self.effect(kind, shapes) for kind, shapes in kinds.items())
            effects = tuple(filter(_tells, found))
            if effects:
                gpus = max(gap.use.shape.num_gpus for gap in gaps)
                seconds = start_seconds + sum(probe_seconds(gap.use) for gap in gaps)
                made.append(
                    MicroProbe(
                        name=name,
                        effects=effects,
                        gpu_seconds=gpus * seconds,
                        kernels=tuple(gap.use.shape for gap in gaps),
                        observed=self.observed,
                    )
                )
        return tuple(made)

    def _mean(
        self, shapes: Sequence[KernelShape], of: Callable[[KernelShape], FloatColumn]
    ) -> FloatColumn:
        shares = np.array([max(self.used[shape].share, 1e-12) for shape in shapes])
        return np.asarray(shares @ np.array([of(shape) for shape in shapes]) / shares.sum())


def _shared(gap: UncoveredKernel) -> bool:
    return gap.use.shape.kind == "collective"


def _tells(effect: KernelEffect) -> bool:
    return max(map(abs, effect.loading)) >= LEAST_LOADING
