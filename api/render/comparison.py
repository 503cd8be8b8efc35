"""Measurements beside the planner's predictions of the same jobs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from planner.errors import PlannerError
from planner.estimates import estimate_job
from planner.specs.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Tokens a second a GPU of one measurement, measured and predicted by the shipped calibration.

    That calibration has learned nothing from it here. None: not measured (out of memory, say), or
    the planner refuses the layout.
    """

    id: str
    measured_tokens_per_second_per_gpu: float | None
    predicted_tokens_per_second_per_gpu: float | None
    predicted_step_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: below 1 the run is slower than was predicted."""
        measured, predicted = (
            self.measured_tokens_per_second_per_gpu,
            self.predicted_tokens_per_second_per_gpu,
        )
        return measured / predicted if measured and predicted else None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}

    def sentence(self) -> str:
        """Such as "Measured 5,762 tokens/s/GPU, predicted 5,870: ratio 0.98", or nothing."""
        if self.ratio is None:
            return ""
        measured, predicted = (
            self.measured_tokens_per_second_per_gpu,
            self.predicted_tokens_per_second_per_gpu,
        )
        return (
            f"measured {measured:,.0f} tokens/s/GPU, predicted {predicted:,.0f}: ratio "
            f"{self.ratio:.2f}"
        )


def beside(measurements: Sequence[Measurement]) -> list[Beside]:
    return [_beside(one) for one in measurements]


def _beside(measurement: Measurement) -> Beside:
    job, numbers = measurement.job, measurement.measured
    measured = numbers.tokens_per_second_per_gpu
    if measured is None and numbers.step_seconds:
        tokens = job.training.global_batch_size * job.training.seq_len
        measured = tokens / numbers.step_seconds / job.cluster.num_gpus
    try:
        estimate = estimate_job(job)
    except PlannerError:  # no layout was stored, or nothing is known of the GPU any more
        estimate = None
    return Beside(
        id=measurement.id,
        measured_tokens_per_second_per_gpu=measured,
        predicted_tokens_per_second_per_gpu=None
        if estimate is None
        else estimate.tokens_per_second_per_gpu,
        predicted_step_seconds=None if estimate is None else estimate.step_seconds,
    )
