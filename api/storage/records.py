"""Answers of the stores that are no row of one table.

Stores raise StoreError when the database cannot answer, NotFoundError for an unknown id and
ConflictError for an id that exists already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from planner.cost.machine.knobs import StaleRuns
from planner.specs.estimate import Estimate

Item = TypeVar("Item")
SweepState = Literal["active", "paused", "cancelled"]


class Page(BaseModel, Generic[Item]):
    """Part of a list. next_cursor: pass it as `cursor` to get the next page; null on the last."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    items: list[Item]
    next_cursor: str | None


# ---- plans and estimates -------------------------------------------------------------------------


class PlanLine(BaseModel):
    """One plan of a list. A field that has the name of a column of `plans` is read from there.

    status: "done"; "cancelled" with the best so far; "queued" or "running" while probes are spent
        on it.
    layout, tokens_per_second_per_gpu, model_version: null until there is a plan.
    tokens_per_second_per_gpu: expected of number 1, measurements counted where probes were spent.
    seq_len, global_batch_size, trainer: of its job; null until there is a plan, and where an
        earlier version kept it.
    """

    model_config = ConfigDict(frozen=True, from_attributes=True)

    id: str
    created_at: datetime
    model: str
    gpu: str
    num_gpus: int
    seq_len: int | None = None
    global_batch_size: int | None = None
    trainer: str | None = None
    layout: str | None = None
    tokens_per_second_per_gpu: float | None = None
    status: str
    model_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEstimate:
    """An estimate with the job that asked for it."""

    id: str
    created_at: datetime
    job: Mapping[str, Any]
    estimate: Estimate


# ---- measurements and calibrations ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of a calibration: a trainer on a GPU, for everyone or for one owner's plans."""

    trainer: str
    gpu: str
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A stored run that a calibration may be made from.

    layout: names its job and layout. priced: what pricing it found; None where nobody has.
    """

    id: str
    created_at: datetime
    layout: str
    step_seconds: float
    priced: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningInputs:
    """Inputs of a calibration, as they stand in the database.

    runs: newest first, of the software of the newest; only shared ones and the owner's.
    software: of these runs. kernel_probes: ids, newest first. digest: of all of it.
    stale: runs under the same software that are left out, because step times have changed since.
    """

    software: Mapping[str, str]
    runs: tuple[RunRow, ...]
    kernel_probes: tuple[str, ...]
    digest: str
    stale: StaleRuns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One measured step of a layout, with what drift is told by.

    run: of the sweep that asked for it; else its own id.
    program: that ran.
    """

    id: str
    created_at: datetime
    job_hash: str
    layout_hash: str
    software_hash: str
    model: str
    trainer: str
    gpu: str
    num_gpus: int
    layout: str
    step_seconds: float
    software: Mapping[str, str]
    hosts: tuple[str, ...]
    run: str
    program: str
    shared: bool


# ---- who did what --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One line of the audit trail.

    asked_by: name of the key, "cli:USER" for the command line; None where nobody is known.
    action: what was done, such as "probe.asked".
    subject: id of what it was done to; of a refusal the request.
    gpu_seconds: what it may use, or has used once it has ended.
    """

    id: int
    at: datetime
    asked_by: str | None
    action: str
    subject: str
    gpu_seconds: float | None
    detail: str | None
