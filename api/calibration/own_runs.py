"""The measurements in the database beside what the calibration that ships predicts of them."""

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from planner.api.storage.records import MeasurementFilter
from planner.api.wiring import Wiring
from planner.charts.accuracy import BAND, RunPoint, accuracy, within_band
from planner.errors import PlannerError
from planner.estimates import Estimator

TITLE = "Predicted against measured here"


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
    found = wiring.measurements.list(MeasurementFilter(status="ok"), None, limit).items
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
