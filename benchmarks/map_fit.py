"""Fits a calibration to measured runs: maximum a posteriori, with a Laplace posterior.

The knobs are found by Gauss-Newton steps that are halved until they help, the rest in each step by
expectation maximisation (`planner.calibration.fit` has the model).
"""

from dataclasses import fields, replace
from itertools import compress

import numpy as np

from planner.calibration.fit import Data, linearise, predict
from planner.calibration.linear_model import PLACE_KEY, Linear, Scales, Unknowns
from planner.columns import BoolColumn, FloatColumn
from planner.cost.machine.knobs import Calibration

# A round that gains less log likelihood than ENOUGH ends the fit. HALVINGS: of a step that does not
# help.
ENOUGH, MOST_ROUNDS, HALVINGS = 0.5, 15, 4


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


def take(data: Data, keep: BoolColumn) -> Data:
    """The runs where this mask is true; rows are renumbered."""
    number = np.cumsum(keep) - 1
    groups = []
    for group in data.groups:
        inside = keep[group.rows]
        if inside.any():
            rows = number[group.rows[inside]]
            groups.append(replace(group, batch=group.batch.take(inside), rows=rows))
    names = {
        one.name: tuple(compress(getattr(data.names, one.name), keep)) for one in fields(data.names)
    }
    return replace(
        data,
        groups=tuple(groups),
        log_seconds=data.log_seconds[keep],
        names=replace(data.names, **names),
    )
