"""The cost model linearised at some knobs, and its solution by expectation maximisation.

Letters, assumptions and sources as in `fit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration import student
from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.cost.machine.knobs import KNOBS, PLACE, PLACE_SD, Calibration, Key
from planner.cost.machine.stacks import STACK, UNIT

SWEEPS = 25  # of expectation maximisation
PLACE_KEY = "place "  # begins the first half of the key of a stack's own shift in a knob


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales of log seconds: of a run, of a stack's offset and of a unit's, see `Calibration`."""

    run: float
    stack: float
    unit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    """Unknowns of the fit: keys (P), prior mean (P,) and prior precision (P, P).

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
