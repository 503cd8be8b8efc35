"""GET /jobs/schema, POST /jobs/read: how a job is written, and what a pasted text means."""

from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import Response

from planner.api.http.bodies import JSON, CheckedByPlanner
from planner.api.http.routes.parameters import answers
from planner.api.http.routing import strict_route
from planner.api.http.schemas import TextBody
from planner.api.http.security import Planner, Reader
from planner.api.input.current import PastedJob, read_pasted
from planner.api.job_schema import job_schema
from planner.errors import fault

router = APIRouter(tags=["jobs"], route_class=strict_route())
TextJson = Annotated[Any, CheckedByPlanner(TextBody), Body()]


@router.get("/jobs/schema")
def get_schema(_: Reader) -> dict[str, Any]:
    """The JSON schema of a job, with a line of help for every field."""
    return job_schema()


@router.post("/jobs/read", responses=answers(PastedJob))
def read_text(key: Planner, body: TextJson = None) -> Response:
    """The job that a text means, and what it still lacks. Nothing is planned or kept.

    The text is a job in YAML or JSON, a config.json, a layout, a TorchTitan TOML, command or log,
    or a Megatron-LM argument script.
    """
    if not isinstance(body, dict) or not isinstance(body.get("text"), str):
        raise fault("text", None, "is required", 'send {"name": "train.toml", "text": "..."}')
    name = body.get("name") or "pasted"
    if not isinstance(name, str) or len(name) > 400:
        raise fault("name", None, "must be a text of at most 400 characters", "shorten it")
    return Response(read_pasted(body["text"], name).model_dump_json(), media_type=JSON)
