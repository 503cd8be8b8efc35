"""Shapes of HTTP bodies that are not the planner's own: for the OpenAPI page and for lists."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


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
    model: str | dict[str, Any] = Field(description="Catalogue name, Hugging Face id, or the keys of a config.json.")
    cluster: str | dict[str, Any] = Field(description="Catalogue name, or gpu, num_gpus, fabric, ...")
    training: dict[str, Any] = Field(description="seq_len, global_batch_size, trainer, ...")
    layout: dict[str, Any] | None = Field(None, description="Estimate: the layout to price. Plan: what runs today.")
    search: dict[str, Any] | None = Field(None, description="Plan only: top_k, fix, allow, objective, sampler, seed.")
    probe: dict[str, Any] | None = Field(None, description="Plan only; not in this build.")


class Problem(BaseModel):
    """RFC 9457 problem details, with the planner's error object: field, value, message, remedy."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    field: str | None = None
    value: Any = None
    message: str | None = None
    remedy: str | None = None


class PlanLine(BaseModel):
    """One plan of a list."""

    id: str
    created_at: datetime
    model: str
    gpu: str
    num_gpus: int
    layout: str
    tokens_per_second_per_gpu: float | None
    status: str
    model_version: str


class PlanList(BaseModel):
    """A page of plans, newest first. next_cursor: pass it as `cursor` to get the next page; null on the last."""

    items: list[PlanLine]
    next_cursor: str | None


class CatalogList(BaseModel):
    """One part of the catalogue."""

    kind: str
    items: list[dict[str, Any]]


class Health(BaseModel):
    """The process is up."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """The database can be reached and is at the revision that this version needs."""

    status: Literal["ready"] = "ready"
    database_revision: str
