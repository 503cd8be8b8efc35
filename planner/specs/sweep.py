"""A sweep: known jobs that are measured again and again, so that calibration stays true and a
slower release is noticed.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import Fault, SpecError
from planner.specs.job import Job
from planner.specs.validation import build
from planner.trainers.registry import resolve_layout
from planner.units import counted

MOST_JOBS = 200
Count = Annotated[int, Field(strict=True, ge=0, le=100)]


class Measure(BaseModel):
    """What to measure of each job: the plan's top_k, fixed anchors (layouts), and the `informative`
    others that are least sure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    top_k: Count = 1
    anchors: list[dict[str, Any]] = Field(default_factory=list, max_length=50)
    informative: Count = 0


class SweepBudget(BaseModel):
    """What one run may spend, over all its jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_probes: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 20
    max_gpu_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0


class SweepSpec(BaseModel):
    """jobs: written out; or models x clusters x trainings, crossed.  schedule: five cron fields,
    UTC; None: only when asked.

    missed: what becomes of moments that passed while no worker ran: `skip` waits for the next,
        `catch-up` makes them up once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=100)]
    jobs: list[dict[str, Any]] = Field(default_factory=list)
    models: list[Any] = Field(default_factory=list)
    clusters: list[Any] = Field(default_factory=list)
    trainings: list[dict[str, Any]] = Field(default_factory=list)
    measure: Measure = Measure()
    budget: SweepBudget = SweepBudget()
    schedule: str | None = None
    missed: Literal["skip", "catch-up"] = "skip"
    pool: str = "local"
    trainer: Literal["reference", "torchtitan"] = "reference"
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    retries: Annotated[int, Field(strict=True, ge=0, le=5)] = 1

    @classmethod
    def from_user(cls, values: object, *, allow_files: bool = True) -> "SweepSpec":
        """Parsed and checked, every job of it too, files read into it. Raises SpecError."""
        spec = build(cls, values, "sweep")
        written = list(spec._written())
        if not 1 <= len(written) <= MOST_JOBS:
            remedy = "list jobs, or models, clusters and trainings to be crossed"
            raise SpecError(
                Fault("sweep.jobs", len(written), f"a sweep has 1 to {MOST_JOBS} jobs", remedy)
            )
        if not (spec.measure.top_k or spec.measure.anchors or spec.measure.informative):
            raise SpecError(
                Fault(
                    "sweep.measure", None, "measures nothing", "set top_k, anchors or informative"
                )
            )
        parsed = [_parsed(job, places, allow_files=allow_files) for job, places in written]
        for number, anchor in enumerate(spec.measure.anchors):
            _check_anchor(anchor, f"sweep.measure.anchors.{number}", parsed)
        jobs = [dict(job.request) for job in parsed]
        return spec.model_copy(update={"jobs": jobs, "models": [], "clusters": [], "trainings": []})

    def _written(self) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """(a job, by its keys where each was written)."""
        for number, job in enumerate(self.jobs):
            yield job, {"": f"sweep.jobs.{number}."}
        for (i, model), (j, cluster), (k, training) in product(
            *map(enumerate, (self.models, self.clusters, self.trainings))
        ):
            places = {
                "model": f"sweep.models.{i}",
                "cluster": f"sweep.clusters.{j}",
                "training": f"sweep.trainings.{k}",
            }
            yield {"model": model, "cluster": cluster, "training": training}, places


def _parsed(values: Mapping[str, Any], places: Mapping[str, str], *, allow_files: bool) -> Job:
    """The job; its faults are named by where it was written. places: of its keys; "" begins the
    names of all others.
    """

    def place(field: str) -> str:
        key, dot, rest = field.partition(".")
        return f"{places[key]}{dot}{rest}" if key in places else places.get("", "") + field

    try:
        return Job.from_user(values, allow_files=allow_files)
    except SpecError as error:
        raise error.renamed(place) from None


def _check_anchor(anchor: object, field: str, jobs: Sequence[Job]) -> None:
    """Raises SpecError for what is no layout, and for a layout of a size that no job has."""
    sizes = sorted({size for job in jobs for size in job.cluster.num_gpus_choices})
    held = [
        resolve_layout(
            anchor, trainer=job.training.trainer, num_gpus=job.cluster.num_gpus, field=field
        ).num_gpus
        for job in jobs
    ]
    if not set(held) & set(sizes):
        shown = ", ".join(map(str, sizes))
        remedy = "correct its degrees: dp_replicate x dp_shard x cp x tp x pp is the number of GPUs"
        raise SpecError(
            Fault(
                field,
                anchor,
                f"takes {counted(held[0], 'GPU')}; the sweep's jobs have {shown}",
                remedy,
            )
        )
