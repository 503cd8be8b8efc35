"""Updates a calibration with one's own runs and timed kernels.

The shipped posterior is the prior. On one's own cluster what a stack's runs have in common is no
nuisance: it is what one wants to know, and most of what one run shows. It stays in the calibration
as the offset of that stack and unit, and no other stack follows it. The knobs of trainer and GPU
move by what the offset does not explain, and the differences of hosts and networks are part of
them.
Letters: P unknowns, L kinds of kernels.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration.kernels import (
    KernelShape,
    KernelTiming,
    alone,
    alone_gradient,
    alone_sd,
    by_kind,
    shape_seconds,
    timing_fingerprint,
    within_reach,
)
from planner.calibration.own_runs import (
    PricedRun,
    priced,
    stands_for,
    waiting,
    with_runs,
    with_unit,
)
from planner.columns import FloatColumn
from planner.cost.machine.knobs import PLACE, Calibration
from planner.cost.machine.stacks import UNIT
from planner.cost.price import Pricer
from planner.specs.job import Job
from planner.specs.measurement import TEACHING, Measurement
from planner.trainers.registry import code_of

ID_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Isolated kernels timed on the machine of a job, whose layout does not matter.

    timings: oldest first.
    """

    job: Job
    timings: tuple[KernelTiming, ...]


def learn(
    calibration: Calibration, measurements: Sequence[Measurement], kernels: Sequence[KernelRun] = ()
) -> Calibration:
    """The calibration after these runs and kernels; the same one when none of them has a time."""
    return learn_priced(
        calibration, priced(calibration, [one for one in measurements if teaches(one)]), kernels
    )


def learn_priced(
    calibration: Calibration, runs: Sequence[PricedRun], kernels: Sequence[KernelRun] = ()
) -> Calibration:
    """Learns from runs that are priced at this calibration's knobs already.

    Repeated runs of one layout by one program are averaged: what the model misses about it is the
    same each time. A layout that is far off waits for a second one (`own_runs.waiting`); the first
    of its unit moves only that unit, if it says more of the unit than of itself
    (`own_runs.stands_for`).
    The same runs give the same id. Runs that the calibration was already
    fitted to are not used again.
    """
    by_layout: dict[tuple[str, str | None], list[PricedRun]] = {}
    for run in sorted(runs, key=lambda one: one.id):
        if run.fingerprint not in calibration.fitted:
            by_layout.setdefault((run.layout, run.program), []).append(run)
    timed = [run for run in kernels if run.timings]
    if not by_layout and not timed:
        return calibration
    used = [run for alike in by_layout.values() for run in alike]
    scopes = sorted(
        {(run.trainer, run.family) for run in used} | {_scopes(run.job) for run in timed}
    )
    believed = calibration.at_one_place(scopes)
    for scope in scopes:
        believed = _told_by_kernels(believed, [run for run in timed if _scopes(run.job) == scope])
    layouts = list(by_layout.values())
    alone = waiting(calibration, believed, layouts) if layouts else {}
    firsts = _firsts(layouts, alone, believed)
    heard = [runs for index, runs in enumerate(layouts) if index not in alone]
    furthest_last = sorted(alone.items(), key=lambda item: abs(math.log(item[1])))
    held_back = {layouts[at][0].stack: factor for at, factor in furthest_last if at not in firsts}
    believed = replace(believed, waiting=held_back)
    if heard:
        believed = with_runs(calibration, believed, heard)
    for index in firsts:
        believed = with_unit(calibration, believed, layouts[index])
        heard.append(layouts[index])
    if heard:
        units = Counter(alike[0].unit for alike in heard)
        own = Counter(calibration.own_runs) + units
        believed = replace(believed, own_runs=dict(sorted(own.items())))
    fingerprints = sorted(
        timing_fingerprint(run.job.cluster.gpu.name, timing)
        for run in timed
        for timing in run.timings
    )
    taught = "".join([*(run.id for run in used), *fingerprints])
    digest = hashlib.sha256(f"{calibration.id}{taught}".encode()).hexdigest()[:ID_DIGITS]
    return replace(
        believed,
        id=f"{calibration.id}+{len(heard)}-{digest}",
        sensitivity=calibration.sensitivity,
        seen=calibration.seen.union(*(run.seen for alike in heard for run in alike)),
        fitted=calibration.fitted | set(fingerprints),
    )


def _firsts(
    layouts: Sequence[Sequence[PricedRun]], far: Iterable[int], believed: Calibration
) -> list[int]:
    """Indices of far layouts that stand for their unit: no other of it was measured; one a unit."""
    measured = Counter(unit for unit, _ in {(runs[0].unit, runs[0].layout) for runs in layouts})
    by_unit = {layouts[index][0].unit: index for index in far}
    new = (unit for unit in sorted(by_unit) if (UNIT, unit) not in believed.keys)
    return [by_unit[unit] for unit in new if measured[unit] == 1 and stands_for(unit)]


def _told_by_kernels(calibration: Calibration, runs: Sequence[KernelRun]) -> Calibration:
    """The posterior after one observation of each kind of kernel.

    A linear Gaussian update along the knobs that affect isolated kernels:
    x' = x + G v,  C' = C - G S C,  G = C S' (S C S' + noise)^-1
    S (L, P): slopes.
    v (L,): measured less predicted, within reach.
    """
    if not runs:
        return calibration
    trainer, family = _scopes(runs[0].job)
    ratios: dict[str, list[float]] = {}
    gradients: dict[str, list[FloatColumn]] = {}
    noise: dict[str, float] = {}
    for job, newest in _by_machine(runs):
        pricer = Pricer.build(job.model, job.cluster, job.training, calibration)
        shapes = list(newest)
        seconds = dict(zip(shapes, shape_seconds(alone(pricer), shapes), strict=True))
        slopes_of = dict(zip(shapes, alone_gradient(pricer, shapes), strict=True))
        for kind, members in by_kind(shape for shape in shapes if seconds[shape] > 0).items():
            ratios.setdefault(kind, []).extend(
                math.log(newest[shape] / seconds[shape]) for shape in members
            )
            gradients.setdefault(kind, []).extend(slopes_of[shape] for shape in members)
            noise[kind] = alone_sd(members)
    if not ratios:
        return calibration
    felt = np.array([np.mean(gradients[kind], axis=0) for kind in ratios])
    mine = [scope in ("", trainer, family) for _, scope in calibration.keys]
    slopes = np.zeros((len(felt), len(mine)))
    for index, (knob, _) in enumerate(calibration.keys):
        if mine[index] and knob in PLACE:
            slopes[:, index] = felt[:, PLACE[knob]]
    spread = slopes @ calibration.covariance @ slopes.T
    seen_values = [
        within_reach(
            float(np.mean(ratios[kind])), float(np.sqrt(spread[index, index])), noise[kind]
        )
        for index, kind in enumerate(ratios)
    ]
    values, variances = (np.array(column) for column in zip(*seen_values, strict=True))
    gain = calibration.covariance @ slopes.T @ np.linalg.inv(spread + np.diag(variances))
    covariance = calibration.covariance - gain @ slopes @ calibration.covariance
    return replace(
        calibration,
        shifts=calibration.shifts + gain @ values,
        covariance=0.5 * (covariance + covariance.T),
    )


def _by_machine(runs: Sequence[KernelRun]) -> list[tuple[Job, dict[KernelShape, float]]]:
    """A job of each cluster with the newest seconds of each shape there."""
    found: dict[str, tuple[Job, dict[KernelShape, float]]] = {}
    for run in runs:
        _, newest = found.setdefault(run.job.cluster.model_dump_json(), (run.job, {}))
        newest.update(
            {timing.shape: timing.seconds for timing in run.timings if timing.seconds > 0}
        )
    return list(found.values())


def _scopes(job: Job) -> tuple[str, str]:
    return code_of(job.training), job.cluster.gpu.family


def teaches(measurement: Measurement) -> bool:
    """Whether learning can use it: an undisturbed run of the layout itself that gave a time."""
    measured = measurement.measured
    return (
        measured.status == "ok"
        and bool(measured.step_seconds)
        and measured.rung in TEACHING
        and measured.disturbed is None
        and measurement.job.layout is not None
    )
