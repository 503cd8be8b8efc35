"""POST /collective, POST /simulate: what a cluster and a pipeline do in time. Nothing is kept."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.collectives import CollectiveRequest, ask_collective
from api.http.requests import JSON, answer_once, in_thread, read_body
from api.http.routes.plans import JOB_SCHEMA, body_of, problems
from api.http.security import needs
from api.input.jobs import check_one_size, parse_job
from api.settings import ApiKey
from planner.plan.timeline import timeline
from planner.specs.collective import CollectiveAnswer

router = APIRouter(tags=["simulations"])
Planner = Annotated[ApiKey, Depends(needs("plan"))]
ERRORS = problems(401, 403, 409, 413, 415, 422, 503)
TRACE_SCHEMA = {
    "type": "object",
    "properties": {"traceEvents": {"type": "array"}, "displayTimeUnit": {"type": "string"}},
}


@router.post(
    "/collective",
    response_model=None,
    responses={200: {"model": CollectiveAnswer}, **ERRORS},
    openapi_extra=body_of(CollectiveRequest.model_json_schema()),
)
async def post_collective(request: Request, key: Planner) -> Response:
    """Seconds, steps and bytes of one operation, the algorithm and why."""
    posted = await read_body(request, key)

    def work() -> Response:
        return Response(
            ask_collective(posted.value, allow_files=False).model_dump_json(), media_type=JSON
        )

    return await in_thread(request, lambda: answer_once(posted, work))


@router.post(
    "/simulate",
    response_model=None,
    responses={
        200: {
            "description": "Chrome trace; Perfetto opens it",
            "content": {JSON: {"schema": TRACE_SCHEMA}},
        },
        **ERRORS,
    },
    openapi_extra=body_of(JOB_SCHEMA),
)
async def post_simulate(request: Request, key: Planner) -> Response:
    """One step of a job's pipeline played out, as a Chrome trace. The job's layout has pp of 2 or
    more.
    """
    posted = await read_body(request, key)

    def work() -> Response:
        job = parse_job(posted.value, allow_files=False)
        check_one_size(job)
        trace: dict[str, Any] = timeline(job).trace
        return Response(json.dumps(trace), media_type=JSON)

    return await in_thread(request, lambda: answer_once(posted, work))
