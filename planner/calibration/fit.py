"""Fits a calibration to measured runs: maximum a posteriori, with a Laplace posterior.

    log measured = log f(knobs) + offset(source) + noise

f is the cost model. The fit is Gauss-Newton with Huber weights. A source's offset (its cluster, its
software's age) keeps many runs of one place from outvoting the rest. So do a source's own shifts in
the knobs that differ from place to place (hosts, networks).
Letters: R runs, P unknowns (knobs' shared and own shifts, then those of sources), J derivative of
log seconds (R, P).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.machine.device import FP16
from planner.cost.machine.knobs import (
    KNOBS,
    OWN_SHARE,
    PLACE_SD,
    VENDOR_ATTENTION,
    Calibration,
    Key,
    kernels_at,
    profile_at,
)
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.specs.job import Job
from planner.trainers.registry import TRAINERS

HUBER = 2.0  # beyond this many standard deviations a run counts linearly
STEP = 0.03
ROUNDS, REWEIGHTINGS = 3, 12
# how the first half of a source's own key begins: "source" for its offset, "source <knob>"
# for a shift
SOURCE = "source"
FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measured runs that share model, cluster and training, priced as one batch.

    rows: their places among all runs.
    """

    job: Job
    batch: LayoutBatch
    rows: IntColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """All runs, in groups that are priced together.

    Holds measured log seconds (R,), and the source of each run (R).
    """

    groups: tuple[Runs, ...]
    log_seconds: FloatColumn
    sources: tuple[str, ...]

    @classmethod
    def of(cls, jobs: Sequence[Job], step_seconds: Sequence[float]) -> "Data":
        """From jobs with layouts and their measured step seconds.

        A job's `group` label is its source; a job without one is its own source.
        """
        places: dict[tuple[object, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            places.setdefault((job.model, job.cluster.model_dump_json(), job.training), []).append(
                row
            )
        groups = []
        for rows in places.values():
            layouts = [layout for row in rows if (layout := jobs[row].layout) is not None]
            groups.append(
                Runs(
                    job=jobs[rows[0]], batch=LayoutBatch.from_layouts(layouts), rows=np.array(rows)
                )
            )
        sources = tuple(str(job.labels.get("group", row)) for row, job in enumerate(jobs))
        return cls(
            groups=tuple(groups),
            log_seconds=np.log(np.asarray(step_seconds, dtype=np.float64)),
            sources=sources,
        )

    def take(self, keep: BoolColumn) -> "Data":
        """The runs where this mask is true; rows are renumbered."""
        number = np.cumsum(keep) - 1
        groups = []
        for group in self.groups:
            inside = keep[group.rows]
            if inside.any():
                groups.append(
                    replace(group, batch=group.batch.take(inside), rows=number[group.rows[inside]])
                )
        sources = tuple(source for source, kept in zip(self.sources, keep, strict=True) if kept)
        return Data(groups=tuple(groups), log_seconds=self.log_seconds[keep], sources=sources)

    def scopes(self, scope: str) -> list[str]:
        """Trainers or GPU families that occur."""
        return sorted({_scope(group.job, scope) for group in self.groups})


def fingerprint(job: Job, step_seconds: float) -> str:
    """A short name of a run: what was trained, where, how, and how long a step took."""
    layout = None if job.layout is None else job.layout.model_dump(mode="json")
    parts = [
        job.model.name,
        job.cluster.gpu.name,
        job.cluster.num_gpus,
        job.training.seq_len,
        job.training.global_batch_size,
        layout,
    ]
    text = json.dumps([*parts, f"{step_seconds:.6g}"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    """What is solved for: keys (P), prior mean (P,) and prior precision (P, P).

    A source's own unknowns come last.
    place_sd (K,): by how much each knob differs from place to place.
    """

    keys: tuple[Key, ...]
    mean: FloatColumn
    precision: FloatColumn
    run_sd: float
    group_sd: float
    place_sd: FloatColumn

    @classmethod
    def of(cls, data: Data, prior: Calibration) -> "Unknowns":
        """Every shift that the runs can move.

        Those that the prior calibration has start from its posterior.
        """
        fresh: list[tuple[Key, float]] = []
        for knob in KNOBS:
            for scope in ("", *data.scopes(knob.scope)):
                if (knob.name, scope) not in prior.keys:
                    fresh.append(((knob.name, scope), knob.sd * (OWN_SHARE if scope else 1.0)))
        place_sd = prior.place * PLACE_SD
        differing = [
            (f"{SOURCE} {knob.name}", float(sd))
            for knob, sd in zip(KNOBS, place_sd, strict=True)
            if sd > 0
        ]
        own = [(SOURCE, prior.group_sd), *differing]
        fresh += [((name, source), sd) for source in sorted(set(data.sources)) for name, sd in own]
        known = len(prior.keys)
        precision = np.diag(
            np.concatenate([np.zeros(known), np.array([sd for _, sd in fresh]) ** -2.0])
        )
        if known:
            precision[:known, :known] = np.linalg.inv(prior.covariance)
        return cls(
            keys=(*prior.keys, *(key for key, _ in fresh)),
            mean=np.concatenate([prior.shifts, np.zeros(len(fresh))]),
            precision=precision,
            run_sd=prior.run_sd,
            group_sd=prior.group_sd,
            place_sd=place_sd,
        )

    @property
    def of_knobs(self) -> BoolColumn:
        """Mask of keys that are not one source's own."""
        return np.array([not knob.startswith(SOURCE) for knob, _ in self.keys])


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The model linearised at x0, with everything that `solve` needs.

    log seconds = predicted + derivatives_k . (x - x0) + offsets
    """

    unknowns: Unknowns
    at: FloatColumn
    derivatives: FloatColumn
    gradient: FloatColumn
    predicted: FloatColumn
    measured: FloatColumn

    def solve(self, keep: BoolColumn | None = None) -> tuple[FloatColumn, FloatColumn]:
        """(unknowns (P,), covariance (P, P)) given the runs that `keep` selects."""
        kept = np.ones(len(self.measured), dtype=np.bool_) if keep is None else keep
        u, j = self.unknowns, self.derivatives[kept]
        # A source's own unknowns enter the prediction only here, so their part of x0
        # counts as zero.
        target = (self.measured - self.predicted)[kept] + j @ np.where(u.of_knobs, self.at, 0.0)
        x = self.at.copy()
        for _ in range(REWEIGHTINGS):
            residual = np.abs(target - j @ x)
            weight = np.minimum(1.0, HUBER * u.run_sd / np.maximum(residual, 1e-12)) / u.run_sd**2
            information = j.T @ (weight[:, None] * j) + u.precision
            x = np.asarray(
                np.linalg.solve(information, j.T @ (weight * target) + u.precision @ u.mean),
                dtype=np.float64,
            )
        return np.asarray(x), np.asarray(np.linalg.inv(information))

    def left_out(self, labels: Sequence[str]) -> tuple[FloatColumn, FloatColumn]:
        """(log seconds (R,), their standard deviation (R,)) predicted by runs with other labels.

        A new run's plan cannot know a source's own shifts. They are left out of the prediction and
        counted in the deviation.
        """
        names = np.array(labels)
        log_seconds, deviation = np.zeros(len(names)), np.zeros(len(names))
        knobs = self.unknowns.of_knobs
        for label in sorted(set(labels)):
            out = names == label
            x, covariance = self.solve(~out)
            j = self.derivatives[out][:, knobs]
            log_seconds[out] = self.predicted[out] + j @ (x - self.at)[knobs]
            inside = np.einsum("rp,pq,rq->r", j, covariance[np.ix_(knobs, knobs)], j)
            places = (self.gradient[out] ** 2) @ self.unknowns.place_sd**2
            deviation[out] = np.sqrt(
                inside + places + self.unknowns.run_sd**2 + self.unknowns.group_sd**2
            )
        return log_seconds, deviation


def predict(data: Data, calibration: Calibration, *, simulated: bool = True) -> FloatColumn:
    """Log step seconds of all runs, (R,)."""
    out = np.zeros(len(data.log_seconds))
    for group in data.groups:
        pricer = _pricer(group.job, calibration.shift(*_scopes_of(group.job)))
        out[group.rows] = _log_seconds(pricer, group.batch, simulated)
    return out


def linearise(data: Data, calibration: Calibration, unknowns: Unknowns) -> Linear:
    """Linearises the model around a calibration that has all of `unknowns`' knobs.

    Derivatives are forward differences of the screened price.
    """
    base = predict(data, calibration, simulated=False)
    gradient = np.zeros((len(base), len(KNOBS)))
    for group in data.groups:
        shifts = calibration.shift(*_scopes_of(group.job))
        for index, knob in enumerate(KNOBS):
            if not _touches(knob.name, group):
                continue
            moved = shifts.copy()
            moved[index] += STEP
            ahead = _log_seconds(_pricer(group.job, moved), group.batch, simulated=False)
            gradient[group.rows, index] = (ahead - base[group.rows]) / STEP
    at = dict(zip(calibration.keys, calibration.shifts, strict=True))
    return Linear(
        unknowns=unknowns,
        at=np.array([at.get(key, 0.0) for key in unknowns.keys]),
        derivatives=_by_key(data, unknowns, gradient),
        gradient=gradient,
        predicted=predict(data, calibration),
        measured=data.log_seconds,
    )


def _touches(knob: str, group: Runs) -> bool:
    """Whether a knob can affect any of these runs; saves pricing if it cannot."""
    batch, job = group.batch, group.job
    split = {
        "tp_hidden": batch.tp,
        "async_tp_hidden": batch.tp,
        "ep_hidden": batch.ep * job.training.overlap.ep,
        "cp_hidden": batch.cp,
    }
    if knob in split:
        return bool(np.any(split[knob] > 1))
    if knob in ("low_precision_gemm", "low_precision_half_depth", "low_precision"):
        return bool(np.any(batch.precision > FP16))
    if knob in ("flash2", "vendor"):
        kernel, *_ = TRAINERS[job.training.trainer].fused_attention(
            job.training, job.cluster.gpu, mla=job.model.uses_mla
        )
        fused = job.training.attention_kernel != "unfused"
        return fused and (knob == "vendor") == (kernel in VENDOR_ATTENTION)
    return {
        "inter_node": job.cluster.num_nodes > 1,
        "straggler_delay": job.cluster.num_gpus > 1,
    }.get(knob, True)


def fit(data: Data, prior: Calibration | None = None) -> tuple[Calibration, Linear]:
    """Fits a calibration to these runs; returns it with its linearisation.

    prior: the calibration to start from; unless given, the prior before any run.
    """
    start = prior or Calibration.prior()
    unknowns = Unknowns.of(data, start)
    knobs = unknowns.of_knobs
    keys = tuple(key for key, mine in zip(unknowns.keys, knobs, strict=True) if mine)
    believed = np.asarray(np.linalg.inv(unknowns.precision), dtype=np.float64)[np.ix_(knobs, knobs)]
    calibration = replace(start, keys=keys, shifts=unknowns.mean[knobs], covariance=believed)
    for _ in range(ROUNDS):
        linear = linearise(data, calibration, unknowns)
        x, covariance = linear.solve()
        calibration = replace(
            calibration, shifts=x[knobs], covariance=covariance[np.ix_(knobs, knobs)]
        )
    linear = linearise(data, calibration, unknowns)
    return replace(
        calibration, sensitivity=linear.gradient.T @ linear.gradient / len(data.log_seconds)
    ), linear


def _pricer(job: Job, shifts: FloatColumn) -> Pricer:
    trainer, gpu = job.training.trainer, job.cluster.gpu
    return Pricer.build(
        job.model,
        job.cluster,
        job.training,
        profile=profile_at(trainer, shifts),
        kernels=kernels_at(gpu, shifts),
    )


def _log_seconds(pricer: Pricer, batch: LayoutBatch, simulated: bool) -> FloatColumn:
    prices = pricer.price(batch)
    return np.asarray(
        np.log(refine(pricer, batch, prices).step_seconds if simulated else prices.step_seconds)
    )


def _by_key(data: Data, unknowns: Unknowns, gradient: FloatColumn) -> FloatColumn:
    """Derivatives (R, P) of every unknown from those by knob (R, K).

    A run depends on the shared shift, its trainer's or family's own, and its source's.
    """
    place = {knob.name: index for index, knob in enumerate(KNOBS)}
    scope = {knob.name: knob.scope for knob in KNOBS}
    names: Mapping[str, list[str]] = {kind: [""] * len(gradient) for kind in ("trainer", "family")}
    for group in data.groups:
        for kind, column in names.items():
            for row in group.rows:
                column[int(row)] = _scope(group.job, kind)
    out = np.zeros((len(gradient), len(unknowns.keys)))
    for index, (knob, own) in enumerate(unknowns.keys):
        if knob.startswith(SOURCE):
            mine = np.array(data.sources) == own
            out[:, index] = (
                mine
                if knob == SOURCE
                else gradient[:, place[knob.removeprefix(f"{SOURCE} ")]] * mine
            )
        else:
            out[:, index] = gradient[:, place[knob]] * (
                np.array(names[scope[knob]]) == own if own else 1.0
            )
    return out


def _scope(job: Job, scope: str) -> str:
    return job.training.trainer if scope == "trainer" else job.cluster.gpu.family


def _scopes_of(job: Job) -> tuple[str, str]:
    return job.training.trainer, job.cluster.gpu.family
