"""Fits a calibration to measured runs with a linear model.

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

Source of the scales: Dempster, Laird and Rubin 1977, section 4.4 (variance components); with t:
`student.weights`.
Letters: R runs, P unknowns (knobs' shared and own shifts, then those of stacks and units), J
derivative of log seconds (R, P).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.linear_model import Linear, Names, Unknowns, by_key
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.machine.device import FP16
from planner.cost.machine.knobs import KNOBS, VENDOR_ATTENTION, Calibration, kernels_at, profile_at
from planner.cost.machine.stacks import stack_name, unit_name
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.specs.job import Job
from planner.specs.measurement import ADDED_LATER
from planner.trainers.registry import TRAINERS, code_of

STEP = 0.03
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

    log_seconds (R,): measured.
    """

    groups: tuple[Runs, ...]
    log_seconds: FloatColumn
    names: Names

    @classmethod
    def of(cls, jobs: Sequence[Job], step_seconds: Sequence[float], *, own: bool = False) -> "Data":
        """From jobs with layouts and their measured step seconds.

        A job's `group` label is its source; a job without one is its own source.
        own: runs of one's own, whose stacks are those that estimates ask for.
        """
        places: dict[tuple[object, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            alike = (job.model, job.cluster.model_dump_json(), job.training)
            places.setdefault(alike, []).append(row)
        layouts = [job.layout for job in jobs if job.layout is not None]
        groups = [
            Runs(
                job=jobs[rows[0]],
                batch=LayoutBatch.from_layouts([layouts[row] for row in rows]),
                rows=np.array(rows),
            )
            for rows in places.values()
        ]
        sources = ["" if own else str(job.labels.get("group", row)) for row, job in enumerate(jobs)]
        trainers = tuple(code_of(job.training) for job in jobs)
        stacks = tuple(
            stack_name(trainer, job.cluster.gpu.name, source)
            for trainer, job, source in zip(trainers, jobs, sources, strict=True)
        )
        units = tuple(
            unit_name(stack, layout.precision, job.model)
            for stack, layout, job in zip(stacks, layouts, jobs, strict=True)
        )
        families = tuple(job.cluster.gpu.family for job in jobs)
        return cls(
            groups=tuple(groups),
            log_seconds=np.log(np.asarray(step_seconds, dtype=np.float64)),
            names=Names(trainers=trainers, families=families, stacks=stacks, units=units),
        )


def fingerprint(job: Job, step_seconds: float) -> str:
    """A short name of a run: what was trained, where, how, and how long a step took."""
    layout = None if job.layout is None else job.layout.model_dump(mode="json")
    if layout is not None:  # fields that came after the first fingerprints
        for name in ("optimizer_offload_fraction", "activation_offload_layers"):
            if layout[name] == ADDED_LATER[name]:
                del layout[name]
    parts = [job.model.name, job.cluster.gpu.name, job.cluster.num_gpus, job.training.seq_len]
    rest = [job.training.global_batch_size, layout, f"{step_seconds:.6g}"]
    text = json.dumps([*parts, *rest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


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
        units=data.names.units,
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
        "ep_hidden": batch.ep * (job.training.overlap.ep is not False),
        "cp_hidden": batch.cp,
    }
    if knob in split:
        return bool(np.any(split[knob] > 1))
    if knob in ("low_precision_gemm", "low_precision_half_depth", "low_precision"):
        return bool(np.any(batch.precision > FP16))
    if knob in ("flash2", "vendor"):
        kernel, *_ = TRAINERS[job.training.trainer].fused_attention(
            job.training, job.cluster.gpu, job.model
        )
        fused = job.training.attention_kernel != "unfused"
        return fused and (knob == "vendor") == (kernel in VENDOR_ATTENTION)
    return {
        "inter_node": job.cluster.num_nodes > 1,
        "straggler_delay": job.cluster.num_gpus > 1,
    }.get(knob, True)


def _pricer(job: Job, shifts: FloatColumn) -> Pricer:
    trainer, gpu = code_of(job.training), job.cluster.gpu
    profile, kernels = profile_at(trainer, shifts), kernels_at(gpu, shifts)
    return Pricer.build(job.model, job.cluster, job.training, profile=profile, kernels=kernels)


def _log_seconds(pricer: Pricer, batch: LayoutBatch, simulated: bool) -> FloatColumn:
    prices = pricer.price(batch)
    return np.asarray(
        np.log(refine(pricer, batch, prices).step_seconds if simulated else prices.step_seconds)
    )


def _scopes_of(job: Job) -> tuple[str, str]:
    return code_of(job.training), job.cluster.gpu.family
