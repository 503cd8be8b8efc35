"""Shapes of HTTP bodies that are not the planner's own: for the OpenAPI page and for lists."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.standing import Standing
from api.storage.records import JobState, SweepState

Pair = Annotated[list[Any], Field(min_length=2, max_length=2)]
Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class JobBody(BaseModel):
    """A job: the contract's section 1. Values are checked by the planner, all faults at once."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "llama3-8b",
                "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
                "training": {"seq_len": 8192, "global_batch_size": 64},
            }
        }
    )

    id: str | int | None = Field(None, description="Echoed back.")
    model: str | dict[str, Any] = Field(
        description="Catalogue name, Hugging Face id, or the keys of a config.json."
    )
    cluster: str | dict[str, Any] = Field(
        description="Catalogue name, or gpu, num_gpus, fabric, ..."
    )
    training: dict[str, Any] = Field(description="seq_len, global_batch_size, trainer, ...")
    layout: dict[str, Any] | None = Field(
        None, description="Estimate: the layout to price. Plan: what runs today."
    )
    current: dict[str, Any] | None = Field(
        None,
        description="What runs today, as text: {name, text, files}; a TorchTitan TOML or "
        "command, or a "
        "Megatron script.",
    )
    search: dict[str, Any] | None = Field(
        None, description="Plan only: top_k, fix, allow, objective, sampler, seed, prefer."
    )
    probe: dict[str, Any] | None = Field(
        None, description="Plan only: max_probes, max_gpu_seconds, pool, trainer, steps."
    )


class TextBody(BaseModel):
    """A text to read as a job. name: of the file it comes from, which tells TOML from YAML."""

    text: str
    name: str | None = None


class Explained(BaseModel):
    """Why a layout of a plan, or how it differs from another of the plan.

    changed: fields with their values in `versus` and in `rank`, where two are compared.
    """

    id: str
    rank: int
    versus: int | None
    lines: list[str]
    changed: dict[str, Pair]


class Problem(BaseModel):
    """RFC 9457 problem details, with the planner's error object: field, value, message, remedy."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    request_id: str | None = None
    field: str | None = None
    value: Any = None
    message: str | None = None
    remedy: str | None = None


class RefusedJob(BaseModel):
    """The answer to a malformed element of a list. error: type, field, value, message, remedy."""

    model_config = ConfigDict(extra="forbid")

    id: str | int | None
    error: dict[str, Any]


class PlanProbes(BaseModel):
    """The best layouts of a plan to measure. Fields of a ProbeRequest say how."""

    model_config = ConfigDict(extra="allow")

    plan: str = Field(description="Id of a stored plan.")
    top_k: int = Field(1, description="How many of its layouts.")


class ProbesAccepted(BaseModel):
    """Queued. id: the first of `ids`, one a layout."""

    id: str
    ids: list[str]


class ProbeLine(BaseModel):
    """One probe of a list.

    failure: "oom", "backend" or a class of failure, with its root cause in `message`.
    """

    id: str
    created_at: datetime
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    model: str
    gpu: str
    num_gpus: int
    layout: str
    pool: str
    plan_id: str | None
    plan_rank: int | None
    attempts: int
    cancel_requested: bool
    owner: str | None
    heartbeat_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    progress: str | None
    measurement_id: str | None
    failure: str | None
    message: str | None


class ProbeDetail(ProbeLine):
    """One probe with what was asked and the result of every run."""

    request: dict[str, Any]
    results: list[dict[str, Any]]


class MeasurementList(BaseModel):
    """A page of measured rows, newest first. next_cursor: as in every list; null on the last."""

    items: list[dict[str, Any]]
    next_cursor: str | None


class RowBody(BaseModel):
    """One measurement: a job with its layout, and what was measured."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    model: str | dict[str, Any]
    cluster: str | dict[str, Any]
    training: dict[str, Any]
    layout: dict[str, Any]
    measured: dict[str, Any]
    source: str | None = None


class MeasurementsStored(BaseModel):
    """Ids that are new, and ids that were there already with the same content.

    refused: why new ones are not believed, by id: they are kept, and count for nothing.
    """

    new: list[str]
    known: list[str]
    refused: dict[str, str] = {}


class PlanAccepted(BaseModel):
    """A plan that spends probes is queued: its id, and how it stands."""

    id: str
    status: str


class PlanState(BaseModel):
    """A plan after DELETE.

    status: "done" stays.
    cancelled_probes: probes of the plan that were queued or running and are asked to end.
    message: what was cancelled, or that nothing was.
    """

    id: str
    status: str
    cancelled_probes: list[str]
    message: str


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


class BadHostLine(BaseModel):
    """A host that a run found bad, with the numbers."""

    host: str
    evidence: list[str]


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
    """A layout whose newest runs are all slower than a level that it had.

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
    """What the history of a sweep's layouts says.

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
    """What a run of a sweep measured.

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


class KnobValue(BaseModel):
    """One number of the cost model.

    of: the trainer or GPU family it holds for; null for all that no run has touched.
    prior, value: before and after the measured runs.
    shift_sd: standard deviation of log value (of its odds for shares).
    """

    name: str
    scope: Literal["trainer", "family"]
    of: str | None
    prior: float
    value: float
    shift_sd: float


class CalibrationLine(BaseModel):
    """One calibration.

    runs: measured runs it rests on.
    run_sd, stack_sd, unit_sd: scales of log measured over predicted step time, of a run, of what
        all runs of a stack share, and of what those of one of its units share besides.
    own_run_sd: scale of a run of one's own about its stack's offset.
    memory_sd, memory_sd_bytes: deviation of log measured over predicted bytes.
    own_runs: runs of one's own that set an offset, by unit ("torchtitan on h100-sxm-80gb, bf16,
        dense").
    trainer, gpu, software: what it was learned for here; null for what ships.
    owner: the key whose plans alone it counts for; null for everyone's.
    stale_runs: older runs that it leaves out, because a sweep found that step times have changed;
        stale_since: when; stale_because: what changed.
    """

    id: str
    in_use: bool
    runs: int
    run_sd: float
    stack_sd: float
    unit_sd: float
    own_run_sd: float
    memory_sd: float
    memory_sd_bytes: float
    own_runs: dict[str, int]
    knobs: list[KnobValue]
    trainer: str | None = None
    gpu: str | None = None
    software: dict[str, str] | None = None
    owner: str | None = None
    stale_runs: int = 0
    stale_since: str | None = None
    stale_because: str | None = None


class EntryBody(BaseModel):
    """An entry of one's own. spec: as a job writes a model, a GPU or a cluster."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "name": "our-h100",
                "spec": {"base": "h100-sxm-80gb", "power_limit": "500 W"},
            }
        },
    )

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$")
    spec: dict[str, Any]


class CatalogList(BaseModel):
    """A page of one part of the catalogue. next_cursor: as in every list; null on the last."""

    kind: str
    items: list[dict[str, Any]]
    next_cursor: str | None


class Health(BaseModel):
    """The process is up."""

    status: Literal["ok"] = "ok"


class ReadinessPart(BaseModel):
    """One thing that the service needs. message: what is wrong, and what to do about it."""

    name: Literal["database", "disk", "planning", "workers"]
    ready: bool
    message: str | None = None


class Readiness(BaseModel):
    """Every part is ready: requests can be answered."""

    status: Literal["ready"] = "ready"
    database_revision: str
    parts: list[ReadinessPart]
