"""Held-out predictions: measured runs predicted by a calibration that has not seen them.

The fit is repeated without the run's source, model or GPU, in the linearisation at its solution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration import student
from planner.calibration.accuracy import Row
from planner.calibration.basis import WIDER
from planner.calibration.classes import UNMEASURED, Misses, class_of
from planner.calibration.comparison import Compared, Comparison, OwnRuns
from planner.calibration.fit import Data, fingerprint, linearise
from planner.calibration.kernel_doubt import UNMEASURED_GPU_SD, attention_sd
from planner.calibration.linear_model import Linear, Scales, Solution, Unknowns
from planner.calibration.mechanisms import used_by
from planner.calibration.own_runs import far_alone, run_scale, stands_for
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.price import Pricer
from planner.trainers.registry import code_of
from planner.version import MODEL_VERSION

LEFT_OUT_BY = ("group", "model", "gpu")
OWN_RUNS = (1, 3, 4)
MOST_CHOICES = 30  # of own runs within a unit that are tried
SEED = 0


def comparison_of(rows: Sequence[Row], calibration: Calibration, rows_digest: str) -> Comparison:
    """Repeats the fit without each source, model and GPU in turn: minutes for some hundred rows."""
    seen = [is_fitted(row, calibration) for row in rows]
    fitted = Fitted.find(rows, calibration) if any(seen) else None

    def compared(found: Sequence[Row]) -> tuple[Compared, ...]:
        return tuple(row.compared(seen=known) for row, known in zip(found, seen, strict=True))

    out = {} if fitted is None else {by: fitted.left_out(rows, by) for by in LEFT_OUT_BY}
    return Comparison(
        calibration_id=calibration.id,
        model_version=MODEL_VERSION,
        rows_digest=rows_digest,
        rows=compared(rows),
        left_out={by: compared(found) for by, found in out.items()},
        own_runs={} if fitted is None else fitted.after_own_runs(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The rows that the calibration was fitted to, and the model linearised there.

    places: of those rows among all rows.
    used (R): the mechanisms that each row uses (`basis`).
    kernel_sd (R,): deviation from not knowing the attention kernel (`kernel_doubt`).
    """

    rows: tuple[Row, ...]
    places: tuple[int, ...]
    data: Data
    linear: Linear
    scales: Scales
    own_run_sd: float
    used: tuple[frozenset[str], ...]
    kernel_sd: FloatColumn

    @classmethod
    def find(cls, rows: Sequence[Row], calibration: Calibration) -> "Fitted | None":
        """Finds the rows of the fit; None unless all of its runs are among them.

        The fit cannot be repeated without them.
        """
        places = [index for index, row in enumerate(rows) if is_fitted(row, calibration)]
        known = {fingerprint(rows[p].job, rows[p].measured_seconds or 0.0) for p in places}
        if not places or known != calibration.fitted:
            return None
        mine = [rows[index] for index in places]
        data = Data.of([row.job for row in mine], [row.measured_seconds or 0.0 for row in mine])
        linear = linearise(data, calibration, Unknowns.of(data.names, Calibration.prior()))
        scales = Scales(
            run=calibration.run_sd, stack=calibration.stack_sd, unit=calibration.unit_sd
        )
        return cls(
            rows=tuple(mine),
            places=tuple(places),
            data=data,
            linear=linear,
            scales=scales,
            own_run_sd=calibration.own_run_sd,
            used=tuple(_used(row) for row in mine),
            kernel_sd=np.array([_kernel_sd(row, calibration) for row in mine]),
        )

    def folds(self, by: str) -> list[BoolColumn]:
        """Masks (R,) of the runs that are left out together, by one of `accuracy.LABELS`.

        By source ("group") the trainer stays in the fit: a trainer is a knob of its own, and
        users ask about trainers that have been measured. Where a trainer has one source only, one
        of its units is left out after the other; where that has one unit only, one of its models.
        """
        labels = np.array([row.label(by) for row in self.rows])
        trainers = np.array([code_of(row.job.training) for row in self.rows])
        units = np.array(self.data.names.units)
        models = np.array([row.job.model.name for row in self.rows])
        found = []
        for label in sorted(set(labels)):
            for trainer in sorted(set(trainers[labels == label])) if by == "group" else [""]:
                out = (labels == label) & ((trainers == trainer) if trainer else True)
                if not trainer or (trainers[~out] == trainer).any():
                    found.append(out)
                    continue
                finer = units if len(set(units[out])) > 1 else models
                found += [out & (finer == name) for name in sorted(set(finer[out]))]
        return found

    def left_out(self, rows: Sequence[Row], by: str) -> list[Row]:
        """All rows; a row of the fit is predicted anew, without its own fold.

        Their step time and its interval are predicted by the runs of other folds.
        """
        folds = self.folds(by)
        misses, _ = self._unseen(folds)
        log_seconds = self.linear.measured - misses.log_seconds
        scale = misses.scales * misses.factors_elsewhere(folds)
        out = list(rows)
        for place, log_second, sd in zip(self.places, log_seconds, scale, strict=True):
            out[place] = _with_time(rows[place], float(log_second), float(sd))
        return out

    def interval_factors(self) -> Mapping[str, float]:
        """Factor on intervals of each class that keeps one (`classes`)."""
        folds = self.folds("group")
        misses, _ = self._unseen(folds)
        return misses.take(misses.factors_elsewhere(folds) != 1.0).factors()

    def _unseen(self, folds: Sequence[BoolColumn]) -> tuple[Misses, list[Solution]]:
        """`Linear.left_out`, the scales widened but before the factors of their classes."""
        log_seconds, scale, solutions = self.linear.left_out(folds, self.scales)
        wider = np.ones(len(scale))
        for fold in folds:
            doubt = np.hypot(self.kernel_sd[fold], self._gpu_sd(fold))
            wider[fold] = self._wider(fold, ~fold)
            scale[fold] = wider[fold] * np.hypot(scale[fold], doubt)
        classes = [
            class_of(row.job.model, row.job.cluster.gpu.family) + UNMEASURED * bool(w > 1)
            for row, w in zip(self.rows, wider, strict=True)
        ]
        misses = Misses(
            log_seconds=self.linear.measured - log_seconds,
            scales=scale,
            classes=np.array(classes),
            units=np.array(self.data.names.units),
        )
        return misses, solutions

    def after_own_runs(self) -> Mapping[int, Mapping[str, OwnRuns]]:
        """By number of own runs, by unit: how the rest of the unit is predicted after them.

        The calibration has not seen the unit's source (`folds`). Every run is tried as the one own
        run, and MOST_CHOICES random choices of more. 0 own runs: all of the unit, with intervals by
        class, which own runs replace (`classes.factor_of`). What is far off
        waits for a second layout that is (`own_runs.far_alone`), unless it is the only own run and
        stands for its unit (`own_runs.stands_for`).
        """
        folds = self.folds("group")
        misses, solutions = self._unseen(folds)
        factor = misses.factors_elsewhere(folds)
        chance = np.random.default_rng(SEED)
        found: dict[int, dict[str, list[OwnRuns]]] = {count: {} for count in (0, *OWN_RUNS)}
        for out, solution in zip(folds, solutions, strict=True):
            units = np.array(self.data.names.units)
            for unit in sorted(set(units[out])):
                here = out & (units == unit)
                for count, into in found.items():
                    if here.sum() > count:
                        by = 1.0 if count else factor[here]
                        rest = self._rest(solution, out, here, count, by, chance)
                        into.setdefault(unit, []).append(rest)
        return {
            count: {unit: OwnRuns.mean(parts) for unit, parts in into.items()}
            for count, into in found.items()
        }

    def _rest(
        self,
        solution: Solution,
        out: BoolColumn,
        here: BoolColumn,
        count: int,
        factor: FloatColumn | float,
        chance: np.random.Generator,
    ) -> OwnRuns:
        """The mean over choices of own runs; a Gaussian's condition on what they show.

        Their noise is `own_runs.run_scale`.
        """
        shared = replace(solution, scales=replace(solution.scales, run=0.0))
        log_seconds, spread = self.linear.elsewhere(shared, here)
        doubt = self.kernel_sd[here]
        spread = spread + doubt[:, None] * doubt + self._gpu_sd(out)[here[out]][:, None] ** 2
        places, unit = np.flatnonzero(here), self.data.names.units[int(np.argmax(here))]
        missed = log_seconds - self.linear.measured[here]
        errors, inside = [], []
        for own in _choices(len(missed), count, chance):
            rest = np.setdiff1d(np.arange(len(missed)), own)
            if len(own) > 1 or not stands_for(unit):
                own = own[~far_alone(-missed[own], [""] * len(own), own.tolist())]
            known = ~out
            known[places[own]] = True
            between = spread[np.ix_(own, own)]
            if len(own):
                noise = run_scale(missed[own], self.own_run_sd)
                between = between + noise**2 * np.eye(len(own))
            gain = np.linalg.solve(between, spread[np.ix_(own, rest)])
            left = missed[rest] - missed[own] @ gain
            left_over = np.diag(spread)[rest] - (spread[np.ix_(own, rest)] * gain).sum(axis=0)
            scale = np.sqrt(np.maximum(left_over, 0.0) + solution.scales.run**2)
            errors.append(np.abs(np.expm1(left)).mean())
            scale *= (self._wider(here, known) * factor)[rest]
            inside.append((np.abs(left) <= student.TWO_SIDED_90 * scale).mean())
        return OwnRuns(error=float(np.mean(errors)), coverage=float(np.mean(inside)))

    def _wider(self, rows: BoolColumn, known: BoolColumn) -> FloatColumn:
        """`basis.widening` of these rows, where the runs `known` are all that was seen, (N,)."""
        measured: dict[tuple[str, str], set[str]] = {}
        for place in np.flatnonzero(known):
            measured.setdefault(self._setting(int(place)), set()).update(self.used[place])
        found = [
            self.used[place] <= measured.get(self._setting(int(place)), set())
            for place in np.flatnonzero(rows)
        ]
        return np.where(found, 1.0, WIDER)

    def _setting(self, place: int) -> tuple[str, str]:
        job = self.rows[place].job
        return code_of(job.training), job.cluster.gpu.family

    def _gpu_sd(self, fold: BoolColumn) -> FloatColumn:
        """`kernel_doubt.unmeasured_gpu_sd` of the fold's rows where the others were seen, (N,)."""
        gpus = np.array([row.job.cluster.gpu.name for row in self.rows])
        return np.where(np.isin(gpus[fold], gpus[~fold]), 0.0, UNMEASURED_GPU_SD)


def _used(row: Row) -> frozenset[str]:
    layout = row.job.layout
    return frozenset(one.name for one in used_by(layout, row.job)) if layout else frozenset()


def _kernel_sd(row: Row, calibration: Calibration) -> float:
    job = row.job
    if job.layout is None:
        return 0.0
    pricer = Pricer.build(job.model, job.cluster, job.training, calibration)
    return float(attention_sd(pricer, LayoutBatch.from_layouts([job.layout]))[0])


def _choices(runs: int, count: int, chance: np.random.Generator) -> list[IntColumn]:
    if count == 0:
        return [np.zeros(0, dtype=np.int64)]
    if count == 1:
        return [np.array([row]) for row in range(runs)]
    return [chance.choice(runs, count, replace=False) for _ in range(MOST_CHOICES)]


def is_fitted(row: Row, calibration: Calibration) -> bool:
    return (
        row.measured_seconds is not None
        and fingerprint(row.job, row.measured_seconds) in calibration.fitted
    )


def _with_time(row: Row, log_second: float, scale: float) -> Row:
    if row.estimate.interval is None:
        return row
    low, middle, high = (
        float(np.exp(log_second + side * student.TWO_SIDED_90 * scale)) for side in (-1.0, 0.0, 1.0)
    )
    interval = row.estimate.interval.model_copy(update={"step_seconds": (low, high)})
    return replace(
        row, estimate=row.estimate.model_copy(update={"step_seconds": middle, "interval": interval})
    )
