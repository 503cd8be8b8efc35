"""Width of 90% intervals by class of runs: a kind of model on a generation of GPUs.

One scale for all runs is too wide for dense models on GPUs that many runs were timed on, so a class
has a factor on it: the one of least interval score over runs that were predicted without their
source. A class keeps its factor only if factors by the other sources lower the score of a source's
runs. In a unit n runs count as sqrt(n), as they do in the fit.
Source: Gneiting and Raftery 2007, Strictly Proper Scoring Rules, section 6.2 (interval score).
Letters: R runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration import student
from planner.calibration.basis import WIDER
from planner.columns import BoolColumn, FloatColumn
from planner.columns.table import Table
from planner.cost.machine.knobs import Calibration
from planner.specs.model import ModelSpec

MISSED = 0.1  # share of runs outside of a 90% interval
GENERATIONS = dict.fromkeys(("hopper", "ampere"), "Hopper and Ampere") | {"blackwell": "Blackwell"}
TRIED = np.geomspace(0.2, 2.0, 47)
# Ends the class of runs that use what no other run had: they have a factor of their own.
UNMEASURED = ", beyond what was measured"
# Units that a class's factor of 1 counts for: few units tell little of the next one; judgement.
PRIOR_UNITS = 1.0


def class_of(model: ModelSpec, family: str) -> str:
    """The class of runs of a model on GPUs of this family."""
    return f"{'experts' if model.is_moe else 'dense'}, {GENERATIONS.get(family, 'other GPUs')}"


def factor_of(
    calibration: Calibration, model: ModelSpec, family: str, *, unmeasured: bool = False
) -> float:
    """Factor on the width of this model's intervals; 1 for a class that has none.

    unmeasured: of layouts that `basis.widening` widens. Dense models on Hopper and Ampere were off
    no further with mechanisms that no other source used; elsewhere twice as far.
    It is for clusters never seen: after one own run intervals hold 89% without it, 85% with it. A
    model with a mixer that no run had is of a kind that no class has, and is never narrowed.
    """
    if calibration.own_runs:
        return 1.0
    name = class_of(model, family) + UNMEASURED * unmeasured
    factor = calibration.interval_factors.get(name, 1.0)
    new = {*model.mixers} - {"attention", *(name for _, _, name in calibration.seen)}
    return max(factor, 1.0) if new else factor


def interval_score(misses: FloatColumn, half_widths: FloatColumn) -> FloatColumn:
    """Width of each 90% interval, and 20 times by how much the run lies outside; less is better.

    misses: log of measured over predicted seconds.
    half_widths: of the interval of log seconds.
    """
    outside = np.maximum(np.abs(misses) - half_widths, 0.0)
    return np.asarray(2.0 * half_widths + 2.0 / MISSED * outside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses(Table):
    """Runs that were predicted without their source.

    log_seconds, scales (R,): log of measured over predicted seconds, and the predicted scale of it.
    classes, units (R): names.
    """

    log_seconds: FloatColumn
    scales: FloatColumn
    classes: NDArray[np.str_]
    units: NDArray[np.str_]

    def factors(self) -> dict[str, float]:
        """Factor on the scale by class, drawn towards 1 where the class has few units.

        Layouts beyond the measured ones are never narrower than those.
        """
        found = {}
        for name in sorted(set(self.classes.tolist())):
            these = self.take(self.classes == name)
            best = TRIED[int(np.argmin([these.score(factor) for factor in TRIED]))]
            units = len(np.unique(these.units))
            found[name] = round(float(best ** (units / (units + PRIOR_UNITS))), 3)
            if name.endswith(UNMEASURED):  # sorted behind the measured ones
                least = found.get(name.removesuffix(UNMEASURED), 1.0) / WIDER
                found[name] = max(found[name], least)
        return found

    def score(self, factor: FloatColumn | float) -> float:
        """Interval score, the sum over runs by their weight, of scales times the factor (R,)."""
        _, number, count = np.unique(self.units, return_inverse=True, return_counts=True)
        half_widths = student.TWO_SIDED_90 * factor * self.scales
        return float(interval_score(self.log_seconds, half_widths) @ count[number] ** -0.5)

    def factors_elsewhere(self, folds: Sequence[BoolColumn]) -> FloatColumn:
        """Each run's factor by the runs of other folds, (R,); 1 where that does not help a class.

        It cannot help a class that one fold holds all runs of.
        """
        column, names = np.ones(len(self.scales)), self.classes
        for out in folds:
            by = self.take(~out).factors()
            column[out] = [by.get(name, 1.0) for name in names[out]]
        for name in set(names.tolist()):
            these = self.take(names == name)
            if these.score(column[names == name]) >= these.score(1.0):
                column[names == name] = 1.0
        return column
