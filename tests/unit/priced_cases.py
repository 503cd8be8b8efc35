"""What tests of prices and searches begin with: a job's pricer, its space, its layout, batches."""

from typing import Any

from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.price import Pricer
from planner.search.space.enumerate import Space, build_space
from planner.specs.job import Job
from planner.trainers.registry import resolve_layout


def pricer_of(job: Job, calibration: Calibration | None = None) -> Pricer:
    return Pricer.build(job.model, job.cluster, job.training, calibration)


def priced_space(job: Job, **kind: Any) -> tuple[Pricer, Space]:
    """Its pricer, and every legal layout that it asks for."""
    pricer = pricer_of(job)
    return pricer, build_space(pricer.rules_context, job.search, **kind)


def priced_layout(job: Job, calibration: Calibration | None = None) -> tuple[Pricer, LayoutBatch]:
    """Its pricer, and the layout that it names."""
    return pricer_of(job, calibration), LayoutBatch.from_layouts([job.layout])


def step_seconds(job: Job, calibration: Calibration | None = None) -> float:
    pricer, batch = priced_layout(job, calibration)
    return float(pricer.price(batch).step_seconds[0])


def batch_of(*layouts: dict[str, Any], trainer: str = "torchtitan", num_gpus: int = 8) -> Any:
    rows = [resolve_layout(given, trainer=trainer, num_gpus=num_gpus) for given in layouts]
    return LayoutBatch.from_layouts(rows)
