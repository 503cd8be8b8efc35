"""Measurements beside their predictions."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.api.render.figures import NONE, rate, seconds, size
from planner.api.render.grid import Column, Columns, listed, number
from planner.api.storage.common import told
from planner.api.storage.job_records import ProbeRecord
from planner.errors import PlannerError
from planner.estimates import estimate_job
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.measurement import Measurement

QUANTITIES = (
    ("step", "step_seconds", seconds),
    ("tokens/s/GPU", "tokens_per_second_per_gpu", rate),
    ("allocated", "peak_allocated_bytes", size),
    ("reserved", "peak_reserved_bytes", size),
    ("device", "device_bytes", size),
)
EVEN = 0.0005
SHOWN = (
    *("id", "state", "model", "gpu", "num_gpus", "layout"),
    *("plan_id", "plan_rank", "failure", "message"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Tokens a second a GPU of one measurement, measured and predicted by the shipped calibration.

    That calibration has learned nothing from it here. None: not measured (out of memory, say), or
    the planner refuses the layout.
    ratio: measured over predicted: below 1 the run is slower than was predicted.
    """

    id: str
    measured_tokens_per_second_per_gpu: float | None
    predicted_tokens_per_second_per_gpu: float | None
    predicted_step_seconds: float | None
    ratio: float | None

    def sentence(self) -> str:
        """Such as "Measured 5,762 tokens/s/GPU, predicted 5,870: ratio 0.98", or nothing."""
        if self.ratio is None:
            return ""
        return (
            f"measured {self.measured_tokens_per_second_per_gpu:,.0f} tokens/s/GPU, predicted "
            f"{self.predicted_tokens_per_second_per_gpu:,.0f}: ratio {self.ratio:.2f}"
        )


def beside(measurements: Sequence[Measurement]) -> list[Beside]:
    return [_beside(one) for one in measurements]


def _beside(measurement: Measurement) -> Beside:
    job, numbers = measurement.job, measurement.measured
    measured = numbers.tokens_per_second_per_gpu
    if measured is None and numbers.step_seconds:
        tokens = job.training.global_batch_size * job.training.seq_len
        measured = tokens / numbers.step_seconds / job.cluster.num_gpus
    predicted = predicted_seconds = None
    with suppress(PlannerError):  # no layout was stored, or nothing is known of the GPU any more
        estimate = estimate_job(job)
        predicted, predicted_seconds = estimate.tokens_per_second_per_gpu, estimate.step_seconds
    return Beside(
        id=measurement.id,
        measured_tokens_per_second_per_gpu=measured,
        predicted_tokens_per_second_per_gpu=predicted,
        predicted_step_seconds=predicted_seconds,
        ratio=measured / predicted if measured and predicted else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """One probe as it ended, what it measured, and the prediction; None where there is nothing."""

    record: ProbeRecord
    measurement: Measurement | None
    estimate: Estimate

    def as_dict(self) -> dict[str, object]:
        return {
            **told(self.record, *SHOWN),
            "measurement": None if self.measurement is None else self.measurement.as_row(),
            "estimate": self.estimate.model_dump(mode="json"),
            "results": list(self.record.results),
        }


def probes_view(probed: Sequence[Probed], *, full: bool) -> RenderableType:
    """A table a probe. full: with the traceback of what failed."""
    return Group(*(part for one in probed for part in _view(one, full=full)))


def _view(one: Probed, *, full: bool) -> list[RenderableType]:
    record = one.record
    place = f"rank {record.plan_rank} of {record.plan_id}: " if record.plan_rank is not None else ""
    title = f"{place}{record.model} on {record.num_gpus} x {record.gpu}: {record.layout}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    if one.measurement is not None and one.measurement.measured.status == "ok":
        parts += [_table(one.measurement, one.estimate), Text(_about(one.measurement))]
    elif record.failure is not None:
        parts.append(Text(f"{record.failure}: {record.message}"))
        traceback = _traceback(record) if full else ""
        if traceback:
            parts.append(Text(traceback, style="dim"))
    else:
        parts.append(Text(record.state))
    return [*parts, Text("")]


def _table(measurement: Measurement, estimate: Estimate) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "predicted / measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, key, words in QUANTITIES:
        predicted, measured = getattr(estimate, key), getattr(measurement.measured, key)
        ratio = NONE if not predicted or not measured else _signed(predicted / measured - 1.0)
        table.add_row(name, words(predicted), words(measured), ratio)
    return table


def _signed(share: float) -> str:
    return "0.0%" if abs(share) < EVEN else f"{share:+.1%}"


def _about(measurement: Measurement) -> str:
    """How much of the layout really ran, how noisy it was, under what."""
    numbers = measurement.measured
    words = [f"{numbers.rung}, {numbers.steps or 0} timed steps"]
    if numbers.step_seconds and numbers.step_seconds_sd is not None:
        words.append(f"spread {numbers.step_seconds_sd / numbers.step_seconds:.1%}")
    extra = numbers.model_extra or {}
    if numbers.rung == "emulated" and numbers.step_seconds is not None:
        added = seconds(sum((extra.get("from_model") or {}).values()))
        words.append(f"of which {added} communication and bubble from the cost model")
    if numbers.gpu_seconds:
        words.append(f"{numbers.gpu_seconds:,.0f} GPU-seconds")
    software = ", ".join(f"{name} {version}" for name, version in measurement.software.items())
    return "; ".join([*words, *([software] if software else [])])


def _traceback(record: ProbeRecord) -> str:
    for result in reversed(record.results):
        text = result.get("outcome", {}).get("traceback")
        if text:
            return str(text).rstrip()
    return ""


def _job(job: Job) -> str:
    return f"{job.model.name}, {job.cluster.num_gpus:,} x {job.cluster.gpu.name}"


def _layout(job: Job) -> str:
    return job.layout.short() if job.layout is not None else NONE


# each with what it shows of a measurement and its prediction; ratio: measured over predicted
MEASUREMENT_COLUMNS: Columns[tuple[Measurement, Beside]] = (
    (Column(name="id"), lambda pair: pair[0].id),
    (Column(name="job", wraps=True, below=True), lambda pair: _job(pair[0].job)),
    (Column(name="layout", wraps=True, below=True), lambda pair: _layout(pair[0].job)),
    (Column(name="rung", drop=1), lambda pair: pair[0].measured.rung),
    (Column(name="status", drop=2), lambda pair: pair[0].measured.status),
    (number("step", drop=3), lambda pair: seconds(pair[0].measured.step_seconds)),
    (number("tokens/s/GPU"), lambda pair: rate(pair[1].measured_tokens_per_second_per_gpu)),
    (number("predicted"), lambda pair: rate(pair[1].predicted_tokens_per_second_per_gpu)),
    (number("ratio"), lambda pair: NONE if pair[1].ratio is None else f"{pair[1].ratio:.2f}"),
    (number("reserved", drop=0), lambda pair: size(pair[0].measured.peak_reserved_bytes)),
)


def measurements_table(
    measurements: Sequence[Measurement], beside: Sequence[Beside], width: int
) -> Text:
    """One line a measurement. beside: the prediction of each, in the same order."""
    return listed(MEASUREMENT_COLUMNS, list(zip(measurements, beside, strict=True)), width)
