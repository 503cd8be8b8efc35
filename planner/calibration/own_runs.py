"""Runs of one's own as learning reads them: priced once, and never again.

What a run says of the knobs depends on its job, its layout and the model alone, so it is found once
and kept: a further run costs the pricing of that run.
Letters: R runs, K knobs, P unknowns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from planner.calibration.basis import Seen, seen
from planner.calibration.fit import Data, fingerprint, gradient_of, predict
from planner.calibration.linear_model import (
    PLACE_KEY,
    Linear,
    Names,
    Scales,
    Solution,
    Unknowns,
    by_key,
)
from planner.columns import BoolColumn, FloatColumn
from planner.cost.machine.knobs import PLACE, Calibration
from planner.cost.machine.stacks import DENSE, EXPERTS, STACK, UNIT, kind_of
from planner.specs.job import Job
from planner.specs.measurement import Measurement

# The planner's own program trains by a trainer's rules, and its steps take longer by this much (log
# seconds), give or take. Measured: three layouts on an H200 by it and by TorchTitan
# (benchmarks/measured/first-day, part 5); the spread of others is a judgement.
REFERENCE = "reference"
REFERENCE_OFFSET, REFERENCE_SD = 0.014, 0.03
SHARED_WEIGHT = 0.25  # of a run beside other users of its GPU; judgement: twice the noise
BELIEVED_ALONE = 0.15  # the most that one layout is off and moves others; judgement
# What runs of one unit differ by (standard deviation of log measured over predicted seconds about
# the unit's mean) among the published runs, predicted without their source (docs/accuracy.md).
SCATTER = {DENSE: 0.07, EXPERTS: 0.18}
PRIOR_RUNS = 2.0  # judgement: units of a kind scatter by very different amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A measured run with what the model says of it at a calibration's knobs.

    layout: names its job and layout; runs of the same are averaged.
    log_seconds: predicted, simulated. gradient (K): its derivative by each knob.
    fingerprint: see `fit.fingerprint`.
    program: that ran, see `Measured.trainer`.
    weight: how much it counts; 1 but for disturbed runs.
    """

    id: str
    layout: str
    trainer: str
    family: str
    stack: str
    unit: str
    fingerprint: str
    step_seconds: float
    log_seconds: float
    gradient: tuple[float, ...]
    seen: Seen
    program: str | None = None
    weight: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """JSON form of what was priced, without what only this run measured."""
        values = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("id", "layout", "step_seconds")
        }
        return {**values, "knobs": list(PLACE), "seen": sorted(map(list, self.seen))}

    @classmethod
    def from_dict(
        cls, values: Any, *, run_id: str, layout: str, step_seconds: float
    ) -> "PricedRun | None":
        """Reads the mapping of `as_dict`; None if it has other knobs than today's."""
        known = dict(values)
        if known.pop("knobs") != list(PLACE):
            return None
        known["gradient"] = tuple(map(float, known["gradient"]))
        known["seen"] = frozenset((one, two, three) for one, two, three in known["seen"])
        return cls(**known, id=run_id, layout=layout, step_seconds=step_seconds)


def layout_of(measurement: Measurement) -> str:
    key = measurement.key()
    return f"{key.job_hash}{key.layout_hash}"


def priced(calibration: Calibration, measurements: Sequence[Measurement]) -> list[PricedRun]:
    """These runs, which have a layout and step seconds, priced at this calibration's knobs."""
    jobs: dict[str, Job] = {}
    layouts = [layout_of(one) for one in measurements]
    for layout, one in zip(layouts, measurements, strict=True):
        jobs.setdefault(layout, one.job)
    if not jobs:
        return []
    data = Data.of(list(jobs.values()), [1.0] * len(jobs), own=True)
    log_seconds, gradient = predict(data, calibration), gradient_of(data, calibration)
    row = {layout: index for index, layout in enumerate(jobs)}
    names = data.names
    found = []
    for layout, one in zip(layouts, measurements, strict=True):
        at, seconds = row[layout], one.measured.step_seconds or 0.0
        found.append(
            PricedRun(
                id=one.id,
                layout=layout,
                trainer=names.trainers[at],
                family=names.families[at],
                stack=names.stacks[at],
                unit=names.units[at],
                fingerprint=fingerprint(one.job, seconds),
                step_seconds=seconds,
                log_seconds=float(log_seconds[at]),
                gradient=tuple(map(float, gradient[at])),
                seen=seen([one.job]),
                program=one.measured.trainer,
                weight=SHARED_WEIGHT if one.measured.shared else 1.0,
            )
        )
    return found


def waiting(
    calibration: Calibration, believed: Calibration, by_layout: Sequence[Sequence[PricedRun]]
) -> dict[int, float]:
    """Places of layouts that are not believed yet, with measured over predicted seconds.

    Their runs are further off than BELIEVED_ALONE, and no second layout of their stack is as far
    off the same way: a disturbed run, or a layout of which the model misses something, says nothing
    of other units, and nothing of its own where another layout of it was measured.
    """
    firsts = [runs[0] for runs in by_layout]
    gradient = np.array([run.gradient for run in firsts], dtype=np.float64)
    off = _measured(by_layout) - _predicted(firsts, gradient, calibration, believed)
    alone = far_alone(off, [run.stack for run in firsts], [run.layout for run in firsts])
    return {int(place): float(np.exp(off[place])) for place in np.flatnonzero(alone)}


def with_unit(
    calibration: Calibration, believed: Calibration, runs: Sequence[PricedRun]
) -> Calibration:
    """The calibration after a far layout that is the first of its unit: only the unit moves.

    The unit's sum of offsets, its stack's and its own, takes all that the model misses, by one
    observation: mean + G v, (1 - G) V. The rest of the stack stays as it was known.
    """
    first = runs[0]
    gradient = np.array([first.gradient], dtype=np.float64)
    offsets = believed.offsets(first.trainer, first.family, first.stack, [first.unit])
    off = _measured([runs]) - _predicted([first], gradient, calibration, believed)
    variance = float(offsets.covariance[0, 0])
    knobs = believed.effective_covariance(first.trainer, first.family)
    expected = variance + float(gradient[0] @ knobs @ gradient[0])
    gain = expected / (expected + believed.own_run_sd**2 / first.weight)
    keys, shifts, covariance = believed.keys, believed.shifts, believed.covariance
    stack = (STACK, first.stack)
    if stack not in keys:
        keys, shifts = (*keys, stack), np.append(shifts, 0.0)
        covariance = np.pad(covariance, (0, 1))
        covariance[-1, -1] = believed.stack_sd**2
    # the unit's own offset is that sum less the stack's
    at, covariance = keys.index(stack), np.pad(covariance, (0, 1))
    covariance[-1] = covariance[:, -1] = -covariance[at]
    covariance[-1, -1] = covariance[at, at] + (1.0 - gain) * variance
    shifts = np.append(shifts, gain * float(off[0] - offsets.mean[0]))
    return replace(believed, keys=(*keys, (UNIT, first.unit)), shifts=shifts, covariance=covariance)


def run_scale(misses: FloatColumn, own_run_sd: float) -> float:
    """Scale of log seconds of one's own runs in a unit about what they have in common.

    s^2 = (n0 s0^2 + sum (miss - mean)^2) / (n0 + n - 1)
    misses (n,): log of measured over predicted seconds of its layouts, n >= 1.
    s0: own_run_sd, over all units. n0: PRIOR_RUNS, for how many runs it stands.
    Source: Gelman et al. 2013, Bayesian Data Analysis, section 2.6 (scaled inverse chi-square).
    """
    squares = float(((misses - misses.mean()) ** 2).sum())
    weight = PRIOR_RUNS + len(misses) - 1
    return float(np.sqrt((PRIOR_RUNS * own_run_sd**2 + squares) / weight))


def stands_for(unit: str) -> bool:
    """Whether one far layout says more of its unit than of itself.

    So it does where runs of a unit differ by less than is far. With experts they differ by more:
    after one own run published units were predicted worse by up to 10 points of the step time.
    """
    return SCATTER[kind_of(unit)] < BELIEVED_ALONE


def far_alone(off: FloatColumn, stacks: Sequence[str], layouts: Sequence[object]) -> BoolColumn:
    """Layouts further off than BELIEVED_ALONE without a second of their stack on that side, (R,).

    off (R,): log of measured over predicted seconds. layouts (R): what counts as one; two programs
        may have run the same.
    """
    far = np.abs(np.expm1(off)) > BELIEVED_ALONE
    sides = list(zip(stacks, (off > 0.0).tolist(), strict=True))
    rows = zip(sides, layouts, far, strict=True)
    distant = {(side, layout) for side, layout, is_far in rows if is_far}
    alike = Counter(side for side, _ in distant)
    return far & np.array([alike[side] < 2 for side in sides], dtype=np.bool_)


def _measured(by_layout: Sequence[Sequence[PricedRun]]) -> FloatColumn:
    """Mean log seconds of each layout's runs, (R,)."""
    return np.array([np.mean([np.log(run.step_seconds) for run in runs]) for runs in by_layout])


def with_runs(
    calibration: Calibration, believed: Calibration, by_layout: Sequence[Sequence[PricedRun]]
) -> Calibration:
    """The calibration after these runs: one linear solve around where they were priced.

    calibration: at whose knobs they were priced. believed: what is known without them, with every
    shift of their trainers and families.
    by_layout: runs of each layout, whose logarithms are averaged.

    Pricing again at the knobs found, as a fit to hundreds of stacks does, moves what is then
    predicted by less than a run's own noise (`tests/unit/test_own_runs.py`), and would price every
    run again for each that is added.
    """
    firsts = [runs[0] for runs in by_layout]
    names = Names(
        trainers=tuple(run.trainer for run in firsts),
        families=tuple(run.family for run in firsts),
        stacks=tuple(run.stack for run in firsts),
        units=tuple(run.unit for run in firsts),
    )
    unknowns = Unknowns.of(names, believed)
    gradient = np.array([run.gradient for run in firsts], dtype=np.float64)
    shifts = dict(zip(believed.keys, believed.shifts, strict=True))
    by_reference = np.array([run.program == REFERENCE for run in firsts])
    derivatives = np.column_stack([by_key(names, unknowns, gradient), by_reference])
    unknowns = _with_reference(unknowns)
    at = [shifts[key] if key[0] in PLACE else 0.0 for key in unknowns.keys]  # offsets begin at 0
    linear = Linear(
        unknowns=unknowns,
        at=np.array(at),
        derivatives=derivatives,
        gradient=gradient,
        predicted=_predicted(firsts, gradient, calibration, believed),
        measured=_measured(by_layout),
        units=names.units,
    )
    scales = Scales(run=believed.own_run_sd, stack=believed.stack_sd, unit=believed.unit_sd)
    weights = np.sqrt([np.mean([run.weight for run in runs]) for runs in by_layout])
    misses, units = linear.measured - linear.predicted, np.array(names.units)
    for unit in set(names.units):
        own = run_scale(misses[units == unit], believed.own_run_sd)
        weights[units == unit] *= believed.own_run_sd / own
    solution = linear.weighted(weights).solve(scales, estimate=False, strange=False)
    x, covariance = _within_units(unknowns.keys, solution, firsts)
    keep = np.array([not name.startswith(PLACE_KEY) for name, _ in unknowns.keys])
    return replace(
        believed,
        keys=tuple(key for key, kept in zip(unknowns.keys, keep, strict=True) if kept),
        shifts=x[keep],
        covariance=covariance[np.ix_(keep, keep)],
    )


def _with_reference(unknowns: Unknowns) -> Unknowns:
    """With what steps of the reference program take more than the trainer's own.

    It joins both programs' runs to one stack, and runs of both tell it; like a place's shifts it
    does not stay in the calibration.
    """
    size = len(unknowns.keys)
    precision = np.zeros((size + 1, size + 1))
    precision[:size, :size] = unknowns.precision
    precision[size, size] = REFERENCE_SD**-2
    return replace(
        unknowns,
        keys=(*unknowns.keys, (f"{PLACE_KEY}program", REFERENCE)),
        mean=np.append(unknowns.mean, REFERENCE_OFFSET),
        precision=precision,
    )


def _within_units(
    keys: Sequence[tuple[str, str]], solution: Solution, runs: Sequence[PricedRun]
) -> tuple[FloatColumn, FloatColumn]:
    """(unknowns, their covariance): what is far off in one unit alone stays in that unit.

    Of a stack's offset the part beyond BELIEVED_ALONE moves to the offset of its only unit with
    runs. Other units, which are unlike it, are as unsure as that part is large.
    """
    x, covariance = solution.x.copy(), solution.covariance.copy()
    at = {key: place for place, key in enumerate(keys)}
    for stack in {run.stack for run in runs}:
        units = {run.unit for run in runs if run.stack == stack}
        offset = x[at[STACK, stack]]
        beyond = offset - np.clip(offset, np.log1p(-BELIEVED_ALONE), np.log1p(BELIEVED_ALONE))
        if len(units) == 1 and beyond:
            apart = np.zeros(len(x))
            apart[at[STACK, stack]], apart[at[UNIT, units.pop()]] = -beyond, beyond
            x, covariance = x + apart, covariance + np.outer(apart, apart)
    return x, covariance


def _predicted(
    runs: Sequence[PricedRun], gradient: FloatColumn, calibration: Calibration, now: Calibration
) -> FloatColumn:
    """Log seconds of runs under `now`; `gradient` is that under `calibration`, (R,)."""
    moved = {
        scopes: now.shift(*scopes) - calibration.shift(*scopes)
        for scopes in {(run.trainer, run.family) for run in runs}
    }
    return np.array(
        [
            run.log_seconds + float(slopes @ moved[run.trainer, run.family])
            for run, slopes in zip(runs, gradient, strict=True)
        ]
    )
