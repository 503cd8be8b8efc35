"""Calibrations as the service lists them: each number before and after the runs."""

import numpy as np

from planner.api.calibration.read import rests_on_shipped
from planner.api.http.schemas import CalibrationLine, KnobValue
from planner.api.storage.paging import encoded
from planner.api.storage.records import CalibrationRecord, Page
from planner.api.wiring import Wiring
from planner.cost.machine.knobs import KNOBS, Calibration, Knob
from planner.cost.machine.shipped import from_document, shipped_calibration

UNSEEN = "none that was measured"
SCALES = ("run_sd", "stack_sd", "unit_sd", "own_run_sd", "memory_sd", "memory_sd_bytes")


def calibration_page(wiring: Wiring, cursor: str | None, limit: int) -> Page[CalibrationLine]:
    """Calibrations that an estimate may name: what ships, the prior, then what was learned here.

    in_use: of the shipped one and of the newest of every trainer and GPU.

    Raises SpecError for a wrong cursor.
    """
    packaged = (shipped_calibration(), Calibration.prior())
    places = [encoded(one.id) for one in packaged]
    start = 0 if cursor is None else places.index(cursor) + 1 if cursor in places else len(packaged)
    lines = [_line(one, in_use=one is packaged[0]) for one in packaged[start : start + limit]]
    if len(lines) == limit:
        last = start + limit == len(packaged) and not wiring.calibrations.list(None, 1).items
        return Page(items=lines, next_cursor=None if last else places[start + limit - 1])
    page = wiring.calibrations.list(
        None if cursor is None or cursor in places else cursor, limit - len(lines)
    )
    stored = [_stored_line(record) for record in page.items]
    return Page(items=[*lines, *stored], next_cursor=page.next_cursor)


def _stored_line(record: CalibrationRecord) -> CalibrationLine:
    in_use = record.superseded_at is None and rests_on_shipped(record)
    own: dict[str, object] = {
        "runs": record.num_runs,
        "trainer": record.trainer,
        "gpu": record.gpu,
        "software": dict(record.software),
        "owner": record.owner or None,
    }
    calibration = from_document(record.document)
    if calibration.stale is not None:
        stale = calibration.stale
        own |= {
            "stale_runs": stale.runs,
            "stale_since": stale.since,
            "stale_because": stale.statement,
        }
    return _line(calibration, in_use=in_use).model_copy(update=own)


def _line(calibration: Calibration, *, in_use: bool) -> CalibrationLine:
    return CalibrationLine(
        id=calibration.id,
        in_use=in_use,
        runs=len(calibration.fitted),
        **{name: getattr(calibration, name) for name in SCALES},
        own_runs=dict(calibration.own_runs),
        knobs=[
            value for index, knob in enumerate(KNOBS) for value in _values(calibration, knob, index)
        ],
    )


def _values(calibration: Calibration, knob: Knob, place: int) -> list[KnobValue]:
    """One value for each trainer or GPU family with runs of its own; the rest share the first."""
    own = sorted({scope for name, scope in calibration.keys if name == knob.name and scope})
    values = []
    for scope in ["", *own]:
        trainer = family = scope or UNSEEN
        shift = float(calibration.shift(trainer, family)[place])
        sd = float(np.sqrt(calibration.effective_covariance(trainer, family)[place, place]))
        values.append(
            KnobValue(
                name=knob.name,
                scope=knob.scope,
                of=scope or None,
                prior=knob.prior,
                value=knob.moved(shift),
                shift_sd=sd,
            )
        )
    return values
