"""A sweep: known jobs that are measured again and again.

It makes calibration stay true and shows when a release is slower.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.specs.job import MOST_GPU_SECONDS
from planner.specs.probe_trainers import ProbeTrainerName

MOST_JOBS = 200
Count = Annotated[int, Field(strict=True, ge=0, le=100)]


class Measure(BaseModel):
    """What to measure of each job.

    top_k: the best layouts of the plan.
    anchors: fixed layouts, as a baseline.
    informative: how many others to add, the most uncertain first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    top_k: Count = 1
    anchors: list[dict[str, Any]] = Field(default_factory=list, max_length=50)
    informative: Count = 0


class SweepBudget(BaseModel):
    """What one run of the sweep may spend, over all its jobs.

    max_probes: runs of layouts.
    max_gpu_seconds: everything that is spent, failures too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_probes: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 20
    max_gpu_seconds: Annotated[float, Field(gt=0, le=MOST_GPU_SECONDS)] = 3600.0


class SweepSpec(BaseModel):
    """A sweep as a person writes it.

    name: how lists and reports call it.
    jobs: written out; or models x clusters x trainings, crossed.
    models, clusters, trainings: values of a job's `model`, `cluster` and `training`.
    measure: which layouts of each job.
    budget: of one run of the sweep.
    schedule: five cron fields, UTC; None: only on request.
    missed: what happens to scheduled times that passed while no worker ran: `skip` waits for the
        next, `catch-up` makes them up once.
    pool: where probes run, as in a job's `probe`.
    trainer: the program that runs, as in a job's `probe`.
    steps: timed steps of a probe.
    retries: how often a failure that may pass is tried again.
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
    trainer: ProbeTrainerName = "reference"
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    retries: Annotated[int, Field(strict=True, ge=0, le=5)] = 1
