"""Calibrations as the service lists them: which numbers of the cost model were moved by measured runs, how far, and how sure they are."""

from typing import TYPE_CHECKING

import numpy as np

from api.schemas import CalibrationLine, KnobValue

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.cost.calibration import Calibration, Knob


UNSEEN = "none that was measured"
MOST_LISTED = 50


def calibration_list(wiring: "Wiring") -> list[CalibrationLine]:
    """Every calibration that an estimate may name: the shipped one, the prior, then what was learnt here, newest first.

    in_use: of the shipped one and of the newest of every trainer and GPU.
    """
    from planner.catalog.calibrations import from_document, shipped_calibration
    from planner.cost.calibration import Calibration

    lines = [_line(shipped_calibration(), in_use=True), _line(Calibration.prior(), in_use=False)]
    newest = set[tuple[str, str]]()
    for record in wiring.calibrations.list(None, MOST_LISTED).items:
        line = _line(from_document(record.document), in_use=(record.trainer, record.gpu) not in newest)
        newest.add((record.trainer, record.gpu))
        own = {"runs": record.num_runs, "trainer": record.trainer, "gpu": record.gpu, "software": dict(record.software)}
        lines.append(line.model_copy(update=own))
    return lines


def _line(calibration: "Calibration", *, in_use: bool) -> CalibrationLine:
    from planner.cost.calibration import KNOBS

    return CalibrationLine(
        id=calibration.id, in_use=in_use, runs=len(calibration.fitted), run_sd=calibration.run_sd, group_sd=calibration.group_sd,
        memory_sd=calibration.memory_sd, memory_sd_bytes=calibration.memory_sd_bytes, time_factor=dict(calibration.time_factor),
        knobs=[value for place, knob in enumerate(KNOBS) for value in _values(calibration, knob, place)],
    )  # fmt: skip


def _values(calibration: "Calibration", knob: "Knob", place: int) -> list[KnobValue]:
    """One value for each trainer, or each GPU family, that the calibration knows apart; the rest share the first."""
    own = sorted({scope for name, scope in calibration.keys if name == knob.name and scope})
    values = []
    for scope in ["", *own]:
        trainer = family = scope or UNSEEN
        shift = float(calibration.shift(trainer, family)[place])
        sd = float(np.sqrt(calibration.effective_covariance(trainer, family)[place, place]))
        values.append(KnobValue(name=knob.name, scope=knob.scope, of=scope or None, prior=knob.prior, value=knob.moved(shift), shift_sd=sd))
    return values
