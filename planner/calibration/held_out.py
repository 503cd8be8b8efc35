"""Held-out predictions: measured runs predicted by a calibration that has not seen them.

The fit is repeated without the run's source, model or GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration.accuracy import Row
from planner.calibration.conformal import held_out_stretch
from planner.calibration.fit import Data, Linear, Unknowns, fingerprint, linearise
from planner.calibration.intervals import TWO_SIDED_90
from planner.columns import FloatColumn
from planner.cost.machine.knobs import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The rows that the calibration was fitted to, and the model linearised there.

    places: of those rows among all rows.
    """

    rows: tuple[Row, ...]
    places: tuple[int, ...]
    linear: Linear
    sources: tuple[str, ...]

    @classmethod
    def find(cls, rows: Sequence[Row], calibration: Calibration) -> "Fitted | None":
        """Finds the rows of the fit; None unless all of its runs are among them.

        The fit cannot be repeated without them.
        """
        places = [index for index, row in enumerate(rows) if is_fitted(row, calibration)]
        if (
            not places
            or {fingerprint(rows[p].job, rows[p].measured_seconds or 0.0) for p in places}
            != calibration.fitted
        ):
            return None
        mine = [rows[index] for index in places]
        data = Data.of([row.job for row in mine], [row.measured_seconds or 0.0 for row in mine])
        linear = linearise(data, calibration, Unknowns.of(data, Calibration.prior()))
        return cls(rows=tuple(mine), places=tuple(places), linear=linear, sources=data.sources)

    def left_out(self, rows: Sequence[Row], by: str) -> list[Row]:
        """All rows, with new predictions for those of the fit.

        Their step time and its interval are predicted by the runs with another label `by`.
        """
        log_seconds, deviation = self.linear.left_out([row.label(by) for row in self.rows])
        scores = np.abs(log_seconds - self.linear.measured) / deviation
        stretch = held_out_stretch(
            scores, [row.job.training.trainer for row in self.rows], self.sources
        )
        out = list(rows)
        for place, log_second, sd in zip(
            self.places, log_seconds, stretch * deviation, strict=True
        ):
            out[place] = _with_time(rows[place], np.array([log_second]), float(sd))
        return out


def is_fitted(row: Row, calibration: Calibration) -> bool:
    """Whether the calibration was fitted to this run."""
    return (
        row.measured_seconds is not None
        and fingerprint(row.job, row.measured_seconds) in calibration.fitted
    )


def _with_time(row: Row, log_second: FloatColumn, deviation: float) -> Row:
    if row.estimate.interval is None:
        return row
    low, middle, high = (
        float(np.exp(log_second[0] + side * TWO_SIDED_90 * deviation)) for side in (-1.0, 0.0, 1.0)
    )
    interval = row.estimate.interval.model_copy(update={"step_seconds": (low, high)})
    return replace(
        row, estimate=row.estimate.model_copy(update={"step_seconds": middle, "interval": interval})
    )
