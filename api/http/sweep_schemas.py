"""Bodies of HTTP about sweeps: their runs, reports and drift."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from planner.api.http.schemas import Pair
from planner.api.jobs.failures import BadHostLine
from planner.api.jobs.standing import Standing
from planner.api.storage.job_records import JobState
from planner.api.storage.records import SweepState

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class SweepLayout(BaseModel):
    """One layout of a sweep's run.

    why: "anchor", "rank N", or "least sure" with its uncertainty.
    change: of its step since the run before, 0.02 is 2% slower; changed: whether that counts.
    versions_changed: of software since then, (before, now) by name.
    attempts: probes of it in this run. hosts: that the one that counts ran on.
    """

    layout: str
    why: str
    predicted_step_seconds: float | None
    status: Literal["ok", "oom", "failed", "skipped"]
    step_seconds: float | None
    change: float | None
    changed: bool = False
    message: str | None
    failure: str | None = None
    measurement_id: str | None = None
    software: dict[str, str] = {}
    versions_changed: dict[str, Pair] = {}
    attempts: int = 0
    hosts: list[str] = []


class SweepJob(BaseModel):
    """One job of a sweep's run. failure, error: why it has no layouts."""

    model: str
    gpu: str
    num_gpus: int
    layouts: list[SweepLayout]
    winner: str | None
    winner_before: str | None = None
    new_winner: bool
    failure: str | None = None
    error: str | None = None


class DriftChange(BaseModel):
    """A change of step times between nights that is no noise.

    change: 0.02 is 2% slower; low, high: its 90% interval.
    since, run: its first run of the sweep. last_before: the run before that.
    found: the run that found it; new: this one.
    versions: of software that changed with it, (before, after) by name; empty where none did.
    hosts: all that the layouts ran on since.
    """

    layouts: list[str]
    change: float
    low: float
    high: float
    since: str
    run: str
    last_before: str
    found: str
    new: bool
    versions: dict[str, Pair]
    hosts: list[str]
    statement: str


class DriftHost(BaseModel):
    """A host on which layouts took longer than on others. until: null while it is slow."""

    host: str
    since: str
    until: str | None
    change: float
    low: float
    high: float
    layouts: list[str]
    statement: str


class DriftOutlier(BaseModel):
    """A step of this run far from those before: no drift unless it stays."""

    layout: str
    change: float


class DriftCreep(BaseModel):
    """A layout whose newest runs are all slower than its earlier level.

    change: 0.02 is 2% slower. first, last: when that level was; best: it is the best so far, else
        that of its first runs.
    """

    layout: str
    change: float
    first: str
    last: str
    best: bool
    statement: str


class TooFewNights(BaseModel):
    """Layouts that were run too seldom to tell.

    most: runs of the one that was run most. needed: so many.
    """

    layouts: int
    most: int
    needed: int


class SweepDrift(BaseModel):
    """Which layouts of a sweep became slower or faster over its runs.

    runs_per_false_alarm: as the sweep asks for. nights: runs that were looked at.
    layouts: that were run often enough. series: those, groups of them, and hosts.
    threshold: standard deviations that make a change. night_sd: of a log step time from run to run.
        Both are null while there are too few runs.
    """

    runs_per_false_alarm: float
    nights: int
    layouts: int
    series: int
    threshold: float | None
    night_sd: float | None
    changes: list[DriftChange]
    hosts: list[DriftHost]
    outliers: list[DriftOutlier]
    creeps: list[DriftCreep] = []
    too_few_nights: TooFewNights | None = None


class SweepReport(BaseModel):
    """The measurements of one run of a sweep.

    retried: probes that ran again after a failure that may pass.
    most_at_once: probes that ran side by side.
    failures: layouts and jobs by the class of what went wrong.
    quarantined: hosts that are kept out since.
    drift: null where nothing was measured.
    """

    headline: str
    probes: int
    gpu_seconds: float
    retried: int = 0
    most_at_once: int = 0
    failures: dict[str, int] = {}
    quarantined: list[BadHostLine] = []
    drift: SweepDrift | None = None
    jobs: list[SweepJob]


class SweepRunState(BaseModel):
    """One run of a sweep. standing: null until it begins. report: null until it ends."""

    id: str
    due_at: Moment | None
    state: JobState
    progress: str | None
    message: str | None
    standing: Standing | None = None
    report: SweepReport | None


class SweepDetail(BaseModel):
    """A sweep with its newest runs. spec: as it was written."""

    id: str
    name: str
    created_at: Moment
    state: SweepState
    spec: dict[str, Any]
    next_due_at: Moment | None
    runs: list[SweepRunState]


class QuarantineLine(BaseModel):
    """A host that no run of this pool uses until then, unless it is let in before.

    found_by: the run of a sweep that found it bad.
    """

    pool: str
    host: str
    since: Moment
    until: Moment
    found_by: str
    evidence: list[str]


class HostReleased(BaseModel):
    """A host that is let in again. pools: in how many."""

    host: str
    pools: int


class SweepRunAccepted(BaseModel):
    """A run is queued for the next free worker."""

    id: str
    sweep: str
    state: str
