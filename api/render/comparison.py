"""Measurements beside the planner's predictions of the same jobs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from planner.errors import PlannerError
from planner.estimates import estimate_job
from planner.specs.measurement import Measurement


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
