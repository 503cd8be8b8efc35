"""Fits a calibration to measured runs: maximum a posteriori, with a Laplace posterior.

    log measured = log f(knobs) + offset(stack) + offset(unit) + noise

f is the cost model. A stack is one trainer on one GPU in one source, a unit its runs in one number
format, dense or with experts (`cost.machine.stacks`). Their offsets hold what such runs have in
common and the model does not know, so that sixty runs of one place do not outvote the rest. So do a
stack's own shifts in the knobs that differ from place to place (hosts, networks). Noise and offsets
follow Student's t (`student`), whose scales are estimated from the runs.

A stack that lies far from all others does so for reasons that the model does not know, and they
touch each of its runs. So its runs count as little as its offset does: offset and runs share the
scale of their Student t, as in its multivariate form.

Runs of one unit are alike: neighbouring layouts of one model, whose errors the model's form makes
and not chance. So n of them count as sqrt(n) runs.

The knobs are found by Gauss-Newton steps that are halved until they help, the rest in each step by
expectation maximisation.
Source of the scales: Dempster, Laird and Rubin 1977, section 4.4 (variance components); with t:
`student.weights`.
Letters: R runs, P unknowns (knobs' shared and own shifts, then those of stacks and units), J
derivative of log seconds (R, P).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration import student
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.machine.device import FP16
from planner.cost.machine.knobs import (
    KNOBS,
    PLACE,
    PLACE_SD,
    VENDOR_ATTENTION,
    Calibration,
    Key,
    kernels_at,
    profile_at,
)
from planner.cost.machine.stacks import STACK, UNIT, stack_name, unit_name
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.specs.job import Job
from planner.specs.measurement import ADDED_LATER
from planner.trainers.registry import TRAINERS, code_of

STEP = 0.03
# A round that gains less log likelihood than ENOUGH ends the fit. HALVINGS: of a step that does not
# help.
ENOUGH, MOST_ROUNDS, HALVINGS = 0.5, 15, 4
SWEEPS = 25  # of expectation maximisation
PLACE_KEY = "place "  # begins the first half of the key of a stack's own shift in a knob
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

    log_seconds (R,): measured. stacks, units (R): their names.
    """

    groups: tuple[Runs, ...]
    log_seconds: FloatColumn
    stacks: tuple[str, ...]
    units: tuple[str, ...]

    @classmethod
    def of(cls, jobs: Sequence[Job], step_seconds: Sequence[float], *, own: bool = False) -> "Data":
        """From jobs with layouts and their measured step seconds.

        A job's `group` label is its source; a job without one is its own source.
        own: runs of one's own, whose stacks are those that estimates ask for.
        """
        places: dict[tuple[object, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            places.setdefault((job.model, job.cluster.model_dump_json(), job.training), []).append(
                row
            )
        layouts = [job.layout for job in jobs if job.layout is not None]
        groups = [
            Runs(
                job=jobs[rows[0]],
                batch=LayoutBatch.from_layouts([layouts[row] for row in rows]),
                rows=np.array(rows),
            )
            for rows in places.values()
        ]
        stacks = tuple(
            stack_name(
                code_of(job.training),
                job.cluster.gpu.name,
                "" if own else str(job.labels.get("group", row)),
            )
            for row, job in enumerate(jobs)
        )
        return cls(
            groups=tuple(groups),
            log_seconds=np.log(np.asarray(step_seconds, dtype=np.float64)),
            stacks=stacks,
            units=tuple(
                unit_name(stack, layout.precision, job.model)
                for stack, layout, job in zip(stacks, layouts, jobs, strict=True)
            ),
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
        stacks, units = (
            tuple(name for name, kept in zip(names, keep, strict=True) if kept)
            for names in (self.stacks, self.units)
        )
        return Data(
            groups=tuple(groups), log_seconds=self.log_seconds[keep], stacks=stacks, units=units
        )

    @property
    def names(self) -> "Names":
        places = {int(row): group.job for group in self.groups for row in group.rows}
        jobs = [places[row] for row in range(len(self.log_seconds))]
        return Names(
            trainers=tuple(code_of(job.training) for job in jobs),
            families=tuple(job.cluster.gpu.family for job in jobs),
            stacks=self.stacks,
            units=self.units,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Trainer, GPU family, stack and unit of each run, (R) each."""

    trainers: tuple[str, ...]
    families: tuple[str, ...]
    stacks: tuple[str, ...]
    units: tuple[str, ...]

    def of(self, scope: str) -> tuple[str, ...]:
        """Trainers or GPU families, (R)."""
        return self.trainers if scope == "trainer" else self.families


def fingerprint(job: Job, step_seconds: float) -> str:
    """A short name of a run: what was trained, where, how, and how long a step took."""
    layout = None if job.layout is None else job.layout.model_dump(mode="json")
    if layout is not None:  # fields that came after the first fingerprints
        for name in ("optimizer_offload_fraction", "activation_offload_layers"):
            if layout[name] == ADDED_LATER[name]:
                del layout[name]
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
class Scales:
    """Scales of log seconds: of a run, of a stack's offset and of a unit's, see `Calibration`."""

    run: float
    stack: float
    unit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    """What is solved for: keys (P), prior mean (P,) and prior precision (P, P).

    Knobs come first. The precision of fresh offsets is 0 here: `levels` says where they are, and
    their scale is estimated.
    levels: rows of P of the stacks' and of the units' fresh offsets.
    place_sd (K,): by how much each knob differs from place to place.
    """

    keys: tuple[Key, ...]
    mean: FloatColumn
    precision: FloatColumn
    levels: tuple[IntColumn, IntColumn]
    place_sd: FloatColumn

    @classmethod
    def of(cls, names: Names, prior: Calibration) -> "Unknowns":
        """Every shift that runs of these names can move.

        Those that the prior calibration has start from its posterior.
        """
        fresh: list[tuple[Key, float]] = []
        for knob in KNOBS:
            for scope in ("", *sorted(set(names.of(knob.scope)))):
                if (knob.name, scope) not in prior.keys:
                    fresh.append(((knob.name, scope), knob.variance(scope) ** -1.0))
        place_sd = prior.place * PLACE_SD
        stacks, units = sorted(set(names.stacks)), sorted(set(names.units))
        fresh += [
            ((PLACE_KEY + knob.name, stack), float(sd) ** -2.0)
            for stack in stacks
            for knob, sd in zip(KNOBS, place_sd, strict=True)
            if sd > 0
        ]
        fresh += [
            ((level, name), 0.0)
            for level, found in ((STACK, stacks), (UNIT, units))
            for name in found
            if (level, name) not in prior.keys
        ]
        known = len(prior.keys)
        precision = np.diag(np.concatenate([np.zeros(known), [value for _, value in fresh]]))
        if known:
            precision[:known, :known] = np.linalg.inv(prior.covariance)
        keys = (*prior.keys, *(key for key, _ in fresh))
        stack_rows, unit_rows = (
            np.array([row for row in range(known, len(keys)) if keys[row][0] == level], dtype=int)
            for level in (STACK, UNIT)
        )
        return cls(
            keys=keys,
            mean=np.concatenate([prior.shifts, np.zeros(len(fresh))]),
            precision=precision,
            levels=(stack_rows, unit_rows),
            place_sd=place_sd,
        )

    @property
    def of_knobs(self) -> BoolColumn:
        return np.array([knob in PLACE for knob, _ in self.keys])


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Unknowns (P,), their covariance (P, P), and the scales."""

    x: FloatColumn
    covariance: FloatColumn
    scales: Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The model linearised at x0, with everything that `solve` needs.

    log seconds = predicted + derivatives_k . (x - x0) + offsets
    at (P,): x0; 0 for offsets, which enter the prediction only here.
    gradient (R, K): derivative of log seconds by each knob.
    units (R): names.
    """

    unknowns: Unknowns
    at: FloatColumn
    derivatives: FloatColumn
    gradient: FloatColumn
    predicted: FloatColumn
    measured: FloatColumn
    units: tuple[str, ...]

    def solve(
        self,
        scales: Scales,
        keep: BoolColumn | None = None,
        *,
        estimate: bool = True,
        alike: bool = True,
        strange: bool = True,
    ) -> Solution:
        """The unknowns given the runs that `keep` selects.

        scales: where to start; they are estimated too unless told otherwise.
        alike: runs of one unit count as the root of their number; otherwise all of them fully.
        strange: runs of a stack far from all others count less (`_trusted`). Not so one's own.

        Without a run nothing is learnt: the unknowns are their prior, the scales those given.
        """
        kept = np.ones(len(self.measured), dtype=np.bool_) if keep is None else keep
        u, j = self.unknowns, self.derivatives[kept]
        target = (self.measured - self.predicted)[kept] + j @ self.at
        # offsets of stacks without a run do not tell how large offsets are
        levels = [rows[np.abs(j[:, rows]).any(axis=0)] for rows in u.levels]
        run, offsets = scales.run**2, [scales.stack**2, scales.unit**2]
        counts = _counts(self.units, kept) ** (-0.5 if alike else 0.0)
        weight = np.ones(len(target))
        heavy = [np.ones(len(rows)) for rows in u.levels]
        trusted = np.ones(len(target))
        for _ in range(SWEEPS):
            precision = u.precision.copy()
            for rows, weights, variance in zip(u.levels, heavy, offsets, strict=True):
                precision[rows, rows] = weights / variance
            counted = counts * weight * trusted / run
            information = (j.T * counted) @ j + precision
            covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
            x = covariance @ (j.T @ (counted * target) + u.precision @ u.mean)
            squared = (target - j @ x) ** 2 + ((j @ covariance) * j).sum(axis=1)
            weight = student.weights(squared / run)
            if estimate and len(target):
                run = float((counts * weight * trusted * squared).sum() / counts.sum())
            for place, (rows, found) in enumerate(zip(u.levels, levels, strict=True)):
                seconds = x[rows] ** 2 + np.diag(covariance)[rows]
                heavy[place] = student.weights(seconds / offsets[place])
                inside = np.isin(rows, found)
                if estimate and inside.any():
                    offsets[place] = float((heavy[place] * seconds)[inside].mean())
            if strange:
                trusted = _trusted(j[:, u.levels[0]], heavy[0])
        found_scales = Scales(run=run**0.5, stack=offsets[0] ** 0.5, unit=offsets[1] ** 0.5)
        return Solution(x=np.asarray(x), covariance=covariance, scales=found_scales)

    def weighted(self, weights: FloatColumn) -> "Linear":
        """Runs whose noise is so many times smaller, weights (R,)."""
        return replace(
            self,
            derivatives=self.derivatives * weights[:, None],
            predicted=self.predicted * weights,
            measured=self.measured * weights,
        )

    def loss(
        self, scales: Scales, shifts: FloatColumn, predicted: FloatColumn, *, strange: bool = True
    ) -> float:
        """Negative log posterior, less a constant, at knobs' shifts that predict these log seconds.

        The offsets are the best at these scales.
        """
        u, knobs = self.unknowns, self.unknowns.of_knobs
        fixed = replace(
            self,
            at=np.zeros(len(self.at)),
            derivatives=np.where(knobs, 0.0, self.derivatives),
            predicted=predicted,
        )
        x = np.where(knobs, 0.0, fixed.solve(scales, estimate=False, strange=strange).x)
        x[knobs] = shifts
        away = x - u.mean
        total = 0.5 * float(away @ u.precision @ away)
        residual = self.measured - predicted - fixed.derivatives @ x
        everything = np.ones(len(residual), dtype=np.bool_)
        alike = _counts(self.units, everything) ** -0.5
        if strange:
            stacks = u.levels[0]
            weights = student.weights((x[stacks] / scales.stack) ** 2)
            alike = alike * _trusted(self.derivatives[:, stacks], weights)
        total += student.loss((residual / scales.run) ** 2, alike)
        for rows, scale in zip(u.levels, (scales.stack, scales.unit), strict=True):
            total += student.loss((x[rows] / scale) ** 2)
        return total

    def left_out(
        self, folds: Sequence[BoolColumn], scales: Scales
    ) -> tuple[FloatColumn, FloatColumn, list[Solution]]:
        """(log seconds (R,), their scales (R,), solution of each fold) without the fold's runs.

        A plan for a new place cannot know its offsets. They are left out of the prediction and
        counted in the scale.
        """
        log_seconds, deviation = np.zeros(len(self.measured)), np.zeros(len(self.measured))
        found = []
        for out in folds:
            solution = self.solve(scales, ~out)
            log_seconds[out], spread = self.elsewhere(solution, out)
            deviation[out] = np.sqrt(np.diag(spread))
            found.append(solution)
        return log_seconds, deviation, found

    def elsewhere(self, solution: Solution, out: BoolColumn) -> tuple[FloatColumn, FloatColumn]:
        """(log seconds (N,), squared scales (N, N)) of runs as if each unit's place were new.

        The runs of `out` are taken to be of one unit; the diagonal holds for any.
        """
        knobs, place_sd = self.unknowns.of_knobs, self.unknowns.place_sd
        j, gradient = self.derivatives[out][:, knobs], self.gradient[out]
        inside = j @ solution.covariance[np.ix_(knobs, knobs)] @ j.T
        places = (gradient * place_sd**2) @ gradient.T
        s = solution.scales
        shared = s.stack**2 + s.unit**2
        log_seconds = self.predicted[out] + j @ (solution.x - self.at)[knobs]
        return log_seconds, inside + places + shared + s.run**2 * np.eye(len(j))


def _trusted(inside: FloatColumn, weights: FloatColumn) -> FloatColumn:
    """How much each run counts by its stack's offset, (R,), at most 1.

    inside (R, S): 1 where a run is of a stack. weights (S,): Student's, of the offsets.
    """
    return np.where(inside.any(axis=1), np.minimum(inside @ weights, 1.0), 1.0)


def _counts(units: Sequence[str], kept: BoolColumn) -> FloatColumn:
    """How many of the kept runs are of the same unit as each of them, (N,)."""
    _, number, counts = np.unique(np.array(units)[kept], return_inverse=True, return_counts=True)
    return np.asarray(counts[number], dtype=np.float64)


def predict(data: Data, calibration: Calibration, *, simulated: bool = True) -> FloatColumn:
    out = np.zeros(len(data.log_seconds))
    for group in data.groups:
        pricer = _pricer(group.job, calibration.shift(*_scopes_of(group.job)))
        out[group.rows] = _log_seconds(pricer, group.batch, simulated)
    return out


def linearise(data: Data, calibration: Calibration, unknowns: Unknowns) -> Linear:
    gradient = gradient_of(data, calibration)
    at = dict(zip(calibration.keys, calibration.shifts, strict=True))
    return Linear(
        unknowns=unknowns,
        at=np.array([at.get(key, 0.0) for key in unknowns.keys]),
        derivatives=by_key(data.names, unknowns, gradient),
        gradient=gradient,
        predicted=predict(data, calibration),
        measured=data.log_seconds,
        units=data.units,
    )


def gradient_of(data: Data, calibration: Calibration) -> FloatColumn:
    """Derivative of log seconds by each knob, (R, K): forward differences of the screened price."""
    base = predict(data, calibration, simulated=False)
    gradient = np.zeros((len(base), len(KNOBS)))
    for group in data.groups:
        shifts = calibration.shift(*_scopes_of(group.job))
        touched = [index for index, knob in enumerate(KNOBS) if _touches(knob.name, group)]
        moved = [_pricer(group.job, shifts + STEP * np.eye(len(KNOBS))[index]) for index in touched]
        ahead = np.log(moved[0].step_seconds_on(moved, group.batch))
        gradient[group.rows[:, None], np.array(touched)] = ((ahead - base[group.rows]) / STEP).T
    return gradient


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


def fit(
    data: Data,
    prior: Calibration | None = None,
    *,
    own: bool = False,
    begin: Calibration | None = None,
) -> tuple[Calibration, Linear]:
    """Fits a calibration to these runs; returns it with its linearisation.

    prior: the calibration to start from; unless given, the prior before any run.
    own: the runs are one's own: what their stacks have in common stays in the calibration, and the
        scales stay as they are.
    begin: a calibration whose knobs the search begins at; it ends sooner there, at the same place.
    """
    start = prior or Calibration.prior()
    unknowns = Unknowns.of(data.names, start)
    knobs = unknowns.of_knobs
    run_sd = start.own_run_sd if own else start.run_sd
    scales = Scales(run=run_sd, stack=start.stack_sd, unit=start.unit_sd)
    shifts = unknowns.mean[knobs]
    if begin is not None:
        known = dict(zip(begin.keys, begin.shifts, strict=True))
        names = [key for key, mine in zip(unknowns.keys, knobs, strict=True) if mine]
        shifts = np.array([known.get(key, mean) for key, mean in zip(names, shifts, strict=True)])
    at = _at(start, unknowns, shifts)
    linear = linearise(data, at, unknowns)
    for _ in range(MOST_ROUNDS):
        solution = linear.solve(scales, estimate=not own, strange=not own)
        scales = solution.scales
        before = linear.loss(scales, shifts, linear.predicted, strange=not own)
        gain = 0.0
        for halving in range(HALVINGS):
            tried = shifts + 0.5**halving * (solution.x[knobs] - shifts)
            predicted = predict(data, _at(start, unknowns, tried))
            gain = before - linear.loss(scales, tried, predicted, strange=not own)
            if gain > 0.0:
                shifts = tried
                break
        if gain <= 0.0:
            break
        linear = linearise(data, _at(start, unknowns, shifts), unknowns)
        if gain < ENOUGH:
            break
    solution = linear.solve(scales, estimate=not own, strange=not own)
    found = solution.scales
    within = start.own_run_sd if own else linear.solve(found, alike=False).scales.run
    keys = np.array([own or mine for mine in knobs]) & np.array(
        [not name.startswith(PLACE_KEY) for name, _ in unknowns.keys]
    )
    values = solution.x.copy()
    values[knobs] = shifts
    return replace(
        start,
        keys=tuple(key for key, mine in zip(unknowns.keys, keys, strict=True) if mine),
        shifts=values[keys],
        covariance=solution.covariance[np.ix_(keys, keys)],
        sensitivity=linear.gradient.T @ linear.gradient / len(data.log_seconds),
        run_sd=start.run_sd if own else found.run,
        stack_sd=found.stack,
        unit_sd=found.unit,
        own_run_sd=within,
    ), linear


def _at(start: Calibration, unknowns: Unknowns, shifts: FloatColumn) -> Calibration:
    knobs = unknowns.of_knobs
    keys = tuple(key for key, mine in zip(unknowns.keys, knobs, strict=True) if mine)
    return replace(start, keys=keys, shifts=shifts, covariance=np.eye(len(keys)))


def _pricer(job: Job, shifts: FloatColumn) -> Pricer:
    trainer, gpu = code_of(job.training), job.cluster.gpu
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


def by_key(names: Names, unknowns: Unknowns, gradient: FloatColumn) -> FloatColumn:
    """Derivatives (R, P) of every unknown from those by knob (R, K).

    A run depends on the shared shift, its trainer's or family's own, its stack's and its unit's.
    """
    scope = {knob.name: knob.scope for knob in KNOBS}
    column = {
        STACK: np.array(names.stacks),
        UNIT: np.array(names.units),
        "trainer": np.array(names.trainers),
        "family": np.array(names.families),
    }
    out = np.zeros((len(gradient), len(unknowns.keys)))
    for index, (name, own) in enumerate(unknowns.keys):
        if name in (STACK, UNIT):
            out[:, index] = column[name] == own
        elif name.startswith(PLACE_KEY):
            moved = gradient[:, PLACE[name.removeprefix(PLACE_KEY)]]
            out[:, index] = moved * (column[STACK] == own)
        else:
            mine = column[scope[name]] == own if own else 1.0
            out[:, index] = gradient[:, PLACE[name]] * mine
    return out


def _scopes_of(job: Job) -> tuple[str, str]:
    return code_of(job.training), job.cluster.gpu.family
