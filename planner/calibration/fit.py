"""Calibration: the profiles that measured runs support, by maximum a posteriori with a Laplace posterior.

Every knob is a number of `Profile` (one value a trainer) or of `KernelProfile` (one value a GPU family), with a prior that does not
know the runs. Trainers share a common shift of each knob, so that a trainer never measured moves with the others.
Letters: R runs, P unknowns (shared shifts, then own shifts), J Jacobian (R, P).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.cost.profile import PROFILES, AttentionCurve, KernelProfile, Profile, kernel_profile
from planner.specs.job import Job

NOISE_SD = 0.06  # a run repeated elsewhere: clocks, fabric, placement; judgement, in log seconds
HUBER = 2.0  # beyond this many NOISE_SD a run counts linearly
STEP = 0.02
ITERATIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One number that may move. prior: its centre before any run.  sd: of the shared shift; own shifts have OWN_SHARE of it.

    share: the number is a share in (0, 1) and moves on the logit scale, else on the logarithm.  kernel: of the GPU family.
    """

    name: str
    prior: float
    sd: float
    share: bool = False
    kernel: bool = False

    def moved(self, shift: float) -> float:
        """The number after a shift on its own scale."""
        if not self.share:
            return float(self.prior * np.exp(shift))
        odds = self.prior / (1.0 - self.prior) * np.exp(shift)
        return float(odds / (1.0 + odds))


OWN_SHARE = 0.7
KNOBS: tuple[Knob, ...] = (
    Knob(name="compute", prior=0.80, sd=0.12),
    Knob(name="elementwise", prior=1.0, sd=0.25),
    Knob(name="tp_hidden", prior=0.20, sd=1.0, share=True),
    Knob(name="async_tp_hidden", prior=0.65, sd=0.5, share=True),
    Knob(name="ep_hidden", prior=0.35, sd=1.0, share=True),
    Knob(name="dp_hidden", prior=0.80, sd=0.7, share=True),
    Knob(name="launch_seconds", prior=9e-6, sd=0.4),
    Knob(name="fused_launch_seconds", prior=20e-6, sd=1.0),
    Knob(name="fixed_step_seconds", prior=0.02, sd=0.7),
    Knob(name="inter_node", prior=0.95, sd=0.15),
    Knob(name="intra_node", prior=0.95, sd=0.10),
    Knob(name="gemm_bf16", prior=1.0, sd=0.06, kernel=True),
    Knob(name="gemm_fp8", prior=1.0, sd=0.10, kernel=True),
    Knob(name="memory", prior=1.0, sd=0.08, kernel=True),
    Knob(name="attention", prior=1.0, sd=0.12, kernel=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measured runs that share model, cluster and training, priced as one batch. rows: their places among all runs."""

    job: Job
    batch: LayoutBatch
    rows: IntColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """All runs: groups that are priced together, and measured log seconds (R,)."""

    groups: tuple[Runs, ...]
    log_seconds: FloatColumn

    @classmethod
    def of(cls, jobs: Sequence[Job], step_seconds: Sequence[float]) -> "Data":
        """From jobs with layouts and their measured step seconds."""
        places: dict[tuple[object, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            places.setdefault((job.model, job.cluster.model_dump_json(), job.training), []).append(row)
        groups = []
        for rows in places.values():
            layouts = [layout for row in rows if (layout := jobs[row].layout) is not None]
            groups.append(Runs(job=jobs[rows[0]], batch=LayoutBatch.from_layouts(layouts), rows=np.array(rows)))
        return cls(groups=tuple(groups), log_seconds=np.log(np.asarray(step_seconds, dtype=np.float64)))

    def take(self, keep: BoolColumn) -> "Data":
        """The runs where this mask is true; rows are renumbered."""
        number = np.cumsum(keep) - 1
        groups = []
        for group in self.groups:
            inside = keep[group.rows]
            if inside.any():
                groups.append(replace(group, batch=group.batch.take(inside), rows=number[group.rows[inside]]))
        return Data(groups=tuple(groups), log_seconds=self.log_seconds[keep])


Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Shifts of every knob: shared ("knob", "") and own ("knob", trainer or family), with their joint covariance.

    keys (P): order of the unknowns in covariance (P, P).
    """

    keys: tuple[Key, ...]
    shifts: FloatColumn
    covariance: FloatColumn

    def shift(self, knob: Knob, scope: str) -> float:
        """Shared plus own shift; a scope never measured has the shared one alone."""
        at = {key: place for place, key in enumerate(self.keys)}
        return float(sum(self.shifts[at[key]] for key in ((knob.name, ""), (knob.name, scope)) if key in at))

    def profile(self, trainer: str) -> Profile:
        """The trainer's calibrated profile."""
        values: dict[str, Any] = {k.name: k.moved(self.shift(k, trainer)) for k in KNOBS if not k.kernel}
        return replace(PROFILES[trainer], **values)

    def kernels(self, base: KernelProfile, family: str) -> KernelProfile:
        """The family's calibrated kernels."""
        scale = {k.name: k.moved(self.shift(k, family)) for k in KNOBS if k.kernel}
        gemm = {key: share * scale["gemm_bf16"] * (1.0 if key == "gemm_bf16" else scale["gemm_fp8"]) for key, share in base.gemm.items()}
        return replace(
            base,
            gemm=gemm,
            memory=base.memory * scale["memory"],
            flash2=_scaled(base.flash2, scale["attention"]),
            vendor=_scaled(base.vendor, scale["attention"]),
        )


def _scaled(curve: AttentionCurve, factor: float) -> AttentionCurve:
    return replace(curve, forward=curve.forward * factor, backward=curve.backward * factor)


def predict(data: Data, calibration: Calibration, only: Iterable[int] | None = None) -> FloatColumn:
    """Log step seconds of all runs (R,), or of the groups in `only` (NaN elsewhere)."""
    out = np.full(len(data.log_seconds), np.nan)
    for place in range(len(data.groups)) if only is None else only:
        group = data.groups[place]
        job = group.job
        kernels = calibration.kernels(kernel_profile(job.cluster.gpu), job.cluster.gpu.family)
        pricer = Pricer.build(job.model, job.cluster, job.training, calibration.profile(job.training.trainer), kernels)
        out[group.rows] = np.log(pricer.price(group.batch).step_seconds)
    return out


def fit(data: Data) -> Calibration:
    """The maximum a posteriori calibration of these runs, by Gauss-Newton with Huber weights."""
    scopes = _scopes(data)
    keys = tuple((knob.name, "") for knob in KNOBS) + tuple((knob.name, scope) for knob in KNOBS for scope in scopes[knob.kernel])
    sds = {knob.name: knob.sd for knob in KNOBS}
    prior_sd = np.array([sds[name] * (OWN_SHARE if scope else 1.0) for name, scope in keys])
    calibration = Calibration(keys=keys, shifts=np.zeros(len(keys)), covariance=np.diag(prior_sd**2))
    for _ in range(ITERATIONS):
        predicted = predict(data, calibration)
        jacobian = _jacobian(data, calibration, predicted)
        residual = data.log_seconds - predicted
        weight = np.minimum(1.0, HUBER * NOISE_SD / np.maximum(np.abs(residual), 1e-12)) / NOISE_SD**2
        information = jacobian.T @ (weight[:, None] * jacobian) + np.diag(prior_sd**-2.0)
        covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
        change = covariance @ (jacobian.T @ (weight * residual) - calibration.shifts / prior_sd**2)
        calibration = replace(calibration, shifts=calibration.shifts + np.clip(change, -0.7, 0.7), covariance=covariance)
    return calibration


def predictive_sd(data: Data, calibration: Calibration) -> FloatColumn:
    """Standard deviation of log measured around log predicted, (R,): posterior of the knobs plus noise; unseen scopes keep their prior."""
    predicted = predict(data, calibration)
    extended = _with_scopes(calibration, _scopes(data))
    jacobian = _jacobian(data, extended, predicted)
    return np.asarray(np.sqrt(np.einsum("rp,pq,rq->r", jacobian, extended.covariance, jacobian) + NOISE_SD**2))


def _with_scopes(calibration: Calibration, scopes: Mapping[bool, Sequence[str]]) -> Calibration:
    missing = [(k.name, s, OWN_SHARE * k.sd) for k in KNOBS for s in scopes[k.kernel] if (k.name, s) not in calibration.keys]
    size = len(calibration.keys)
    covariance = np.diag(np.concatenate([np.zeros(size), [sd**2 for *_, sd in missing]]))
    covariance[:size, :size] = calibration.covariance
    keys = calibration.keys + tuple((name, scope) for name, scope, _ in missing)
    return Calibration(keys=keys, shifts=np.concatenate([calibration.shifts, np.zeros(len(missing))]), covariance=covariance)


def _scopes(data: Data) -> Mapping[bool, Sequence[str]]:
    """Trainers (False) and GPU families (True) that occur."""
    return {
        False: sorted({group.job.training.trainer for group in data.groups}),
        True: sorted({group.job.cluster.gpu.family for group in data.groups}),
    }


def _jacobian(data: Data, calibration: Calibration, predicted: FloatColumn) -> FloatColumn:
    """Derivatives of log seconds by each unknown, (R, P), forward differences; a shared column sums its scopes'."""
    at = {key: place for place, key in enumerate(calibration.keys)}
    jacobian = np.zeros((len(predicted), len(calibration.keys)))
    for knob in KNOBS:
        for scope in _scopes(data)[knob.kernel]:
            groups = [p for p, group in enumerate(data.groups) if _scope(group.job, knob) == scope]
            shifts = calibration.shifts.copy()
            shifts[at[knob.name, scope]] += STEP
            moved = predict(data, replace(calibration, shifts=shifts), groups)
            column = np.where(np.isnan(moved), 0.0, (moved - predicted) / STEP)
            jacobian[:, at[knob.name, scope]] = column
            jacobian[:, at[knob.name, ""]] += column
    return jacobian


def _scope(job: Job, knob: Knob) -> str:
    return job.cluster.gpu.family if knob.kernel else job.training.trainer
