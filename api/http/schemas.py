"""Bodies of HTTP that are not the planner's own types."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Pair = Annotated[list[Any], Field(min_length=2, max_length=2)]


class JobBody(BaseModel):
    """A job; `planner.api.job_schema` has its fields. The planner checks it, all faults at once."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "llama3-8b",
                "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
                "training": {"seq_len": 8192, "global_batch_size": 64},
            }
        }
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

    model_config = ConfigDict(from_attributes=True)

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
    """Id and state of a queued plan that spends probes."""

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
    """Summary of a calibration.

    runs: number of measured runs it was fitted to.
    run_sd, stack_sd, unit_sd: spreads of log(measured / predicted step time): of single runs, of
        the error common to a trainer on a GPU, and of the further error common to one number
        format of dense models or of models with experts there.
    own_run_sd: spread of your own runs about the error of their trainer on that GPU.
    memory_sd, memory_sd_bytes: spread of log(measured / predicted bytes), and bytes beside it.
    own_runs: number of your own runs that correct each unit ("torchtitan on h100-sxm-80gb, bf16,
        dense").
    trainer, gpu, software: subject of a calibration learned here; null for the shipped one.
    owner: key to whose plans it is limited; null for everyone's.
    stale_runs: older runs left out, because a sweep found that step times have changed;
        stale_since: when; stale_because: the change.
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
    """Liveness: the process is up."""

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
