"""Calibrations as the service lists them, and their accuracy on the measurements stored here."""

from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import BaseModel

from planner.api.calibration.read import rests_on_shipped
from planner.api.http.schemas import CalibrationLine, KnobValue
from planner.api.storage.common import encoded, told
from planner.api.storage.records import Page
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import Wiring
from planner.charts.accuracy import BAND, RunPoint, accuracy, within_band
from planner.cost.machine.knobs import KNOBS, Calibration, Knob
from planner.cost.machine.shipped import from_document, shipped_calibration
from planner.errors import PlannerError
from planner.estimates import Estimator

UNSEEN = "none that was measured"
SCALES = ("run_sd", "stack_sd", "unit_sd", "own_run_sd", "memory_sd", "memory_sd_bytes")
TITLE = "Predicted against measured here"


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
        last = start + limit == len(packaged) and not wiring.calibrations.list(limit=1).items
        return Page(items=lines, next_cursor=None if last else places[start + limit - 1])
    page = wiring.calibrations.list(
        None if cursor is None or cursor in places else cursor, limit - len(lines)
    )
    stored = [_stored_line(record) for record in page.items]
    return Page(items=[*lines, *stored], next_cursor=page.next_cursor)


def _stored_line(record: CalibrationRecord) -> CalibrationLine:
    in_use = record.superseded_at is None and rests_on_shipped(record)
    own = {"runs": record.num_runs, "owner": record.owner or None}
    calibration = from_document(record.document)
    if (stale := calibration.stale) is not None:
        own |= {"stale_runs": stale.runs, "stale_since": stale.since}
        own["stale_because"] = stale.statement
    own |= told(record, "trainer", "gpu", "software")
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


class OwnRun(BaseModel):
    """One measured run. rung: whether the layout itself ran.

    error: predicted over measured, less one. low_seconds, high_seconds: the 90% interval.
    """

    id: str
    layout: str
    model: str
    trainer: str
    gpu: str
    num_gpus: int
    rung: str
    measured_seconds: float
    predicted_seconds: float
    low_seconds: float | None
    high_seconds: float | None
    error: float


class OwnAccuracy(BaseModel):
    """The newest measured runs with their predictions, which have learned nothing from them.

    within_band: how many are predicted within `band`.
    refused: measured runs that the planner gives no prediction of.
    chart: a Vega-Lite specification.
    """

    runs: list[OwnRun]
    band: float
    within_band: int
    refused: int
    chart: dict[str, Any]


def own_accuracy(wiring: Wiring, limit: int) -> OwnAccuracy:
    """Accuracy on the newest measurements that gave a step time, at most `limit`."""
    found = wiring.measurements.list(limit=limit, status="ok").items
    believed = [one for one in found if one.refused is None]
    measured = [(one, one.step_seconds) for one in believed if one.job.layout and one.step_seconds]
    answers = Estimator().estimates([one.job for one, _ in measured])
    runs: list[OwnRun] = []
    points: list[RunPoint] = []
    for (one, seconds), answer in zip(measured, answers, strict=True):
        if isinstance(answer, PlannerError) or answer.step_seconds is None:
            continue
        interval = answer.interval.step_seconds if answer.interval else (None, None)
        point = RunPoint(
            id=one.id,
            layout="" if one.job.layout is None else one.job.layout.short(),
            model=one.job.model.name,
            trainer=one.job.training.trainer,
            gpu=one.job.cluster.gpu.name,
            measured_seconds=seconds,
            predicted_seconds=answer.step_seconds,
            low_seconds=interval[0],
            high_seconds=interval[1],
        )
        points.append(point)
        runs.append(
            OwnRun(
                **asdict(point),
                num_gpus=one.job.cluster.num_gpus,
                rung=one.measured.rung,
                error=point.error,
            )
        )
    return OwnAccuracy(
        runs=runs,
        band=BAND,
        within_band=within_band(points),
        refused=len(measured) - len(runs),
        chart=accuracy(points, title=TITLE),
    )
