"""A sweep: known jobs that are measured again and again.

It makes calibration stay true and shows when a release is slower.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.job import MOST_GPU_SECONDS, Priority, ProbeTrainerName
from planner.specs.validation import Name, Value
from planner.units import DAY

MOST_JOBS = 200
Overlap = Literal["skip", "queue", "replace"]
Count = Annotated[int, Field(strict=True, ge=0, le=100)]


class Measure(Value, extra="forbid"):
    """Measurements to make of each job.

    top_k: the best layouts of the plan.
    anchors: fixed layouts, as a baseline.
    informative: how many others to add, the most uncertain first.
    """

    top_k: Count = 1
    anchors: list[dict[str, Any]] = Field(default_factory=list, max_length=50)
    informative: Count = 0


class SweepBudget(Value, extra="forbid"):
    """Budget of one run of the sweep, over all its jobs.

    max_probes: runs of layouts, those tried again too.
    max_gpu_seconds: everything that is spent, failures too. A further probe starts while what is
        left covers its whole time limit.
    hours: of the day, in the sweep's time zone, in which probes may start, as "22:00-06:00".
    """

    max_probes: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 20
    max_gpu_seconds: Annotated[float, Field(gt=0, le=MOST_GPU_SECONDS)] = 3600.0
    hours: str | None = None


class DriftWatch(Value, extra="forbid"):
    """How sure a change of step times must be.

    runs_per_false_alarm: runs of the sweep, in the mean, until one is reported though there is
        none, over all its layouts; 365 is once in a year of nights.
    """

    runs_per_false_alarm: Annotated[float, Field(ge=10, le=1e6, allow_inf_nan=False)] = 365.0


class SweepSpec(Value, extra="forbid"):
    """A sweep as a person writes it.

    name: how lists and reports call it.
    jobs: written out; or models x clusters x trainings, crossed.
    models, clusters, trainings: values of a job's `model`, `cluster` and `training`.
    measure: which layouts of each job.
    budget: of one run of the sweep.
    drift: when a layout counts as slower or faster than on the nights before.
    schedule: five cron fields; None: only on request.
    time_zone: of the schedule and of the budget's hours, a name of the IANA database. A time that
        summer time leaves out comes at the next instant that exists, one that comes twice is taken
        once.
    missed: what happens to scheduled times that passed while no worker ran: `skip` waits for the
        next, `catch-up` makes them up once.
    overlap: what happens to a scheduled time that comes while a run of this sweep waits or runs:
        `skip` leaves it out, `queue` runs it afterwards, `replace` ends the other one first.
    priority: of several sweeps and studies that wait for a worker or for room in a pool, the
        highest goes first.
    pool: where probes run, as in a job's `probe`.
    trainer: the program that runs, as in a job's `probe`.
    steps: timed steps of a probe.
    time_limit_seconds: of one probe, its start included.
    retries: how often a failure that may pass is tried again. A probe that the pool took away or
        whose host was lost runs again without counting as one.
    webhook: URL to which the report of every run is posted; its host must be one of the operator's
        PLANNER_WEBHOOK_HOSTS.
    """

    name: Annotated[Name, Field(min_length=1, max_length=100)]
    jobs: list[dict[str, Any]] = Field(default_factory=list)
    models: list[Any] = Field(default_factory=list)
    clusters: list[Any] = Field(default_factory=list)
    trainings: list[dict[str, Any]] = Field(default_factory=list)
    measure: Measure = Measure()
    budget: SweepBudget = SweepBudget()
    drift: DriftWatch = DriftWatch()
    schedule: str | None = None
    time_zone: Annotated[str, Field(min_length=1, max_length=64)] = "UTC"
    missed: Literal["skip", "catch-up"] = "skip"
    overlap: Overlap = "skip"
    priority: Priority = 0
    pool: str = "local"
    trainer: ProbeTrainerName = "reference"
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    time_limit_seconds: Annotated[float, Field(gt=0, le=DAY, allow_inf_nan=False)] = 600.0
    retries: Annotated[int, Field(strict=True, ge=0, le=5)] = 1
    webhook: Annotated[str, Field(max_length=2000)] | None = None
