"""POST /collective, POST /simulate: what a cluster and a pipeline do in time. Nothing is kept."""

import json
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from planner.api.collectives import CollectiveRequest, ask_collective
from planner.api.http.bodies import JSON, CheckedByPlanner, JobJson
from planner.api.http.requests import answer_after, in_thread, in_turn, wiring_of
from planner.api.http.routing import Wired, strict_route
from planner.api.http.security import Planner
from planner.api.input.jobs import check_one_size, parse_job
from planner.api.own_entries import with_own
from planner.plan.timeline import timeline
from planner.specs.collective import CollectiveAnswer

router = APIRouter(tags=["simulations"], route_class=strict_route())
CollectiveJson = Annotated[Any, CheckedByPlanner(CollectiveRequest), Body()]
TRACE_SCHEMA = {
    "type": "object",
    "properties": {"traceEvents": {"type": "array"}, "displayTimeUnit": {"type": "string"}},
}


@router.post("/collective", responses={200: {"model": CollectiveAnswer}})
def post_collective(wiring: Wired, key: Planner, question: CollectiveJson = None) -> Response:
    """Seconds, steps and bytes of one operation, the algorithm and why."""
    answer = ask_collective(with_own(wiring, question), allow_files=False)
    return Response(answer.model_dump_json(), media_type=JSON)


@router.post(
    "/simulate",
    responses={
        200: {
            "description": "Chrome trace; Perfetto opens it",
            "content": {JSON: {"schema": TRACE_SCHEMA}},
        }
    },
)
async def post_simulate(request: Request, key: Planner, job: JobJson = None) -> Response:
    """One step of a job's pipeline simulated, as a Chrome trace.

    The job's layout has pp of 2 or more.
    """

    async def trace() -> str:
        asked = await in_thread(request, lambda: with_own(wiring_of(request), job))
        return await in_turn(request, key, _trace, asked)

    return await answer_after(request, key, trace, partial(Response, media_type=JSON))


def _trace(job: Any) -> str:
    """Runs in the other process."""
    parsed = parse_job(job, allow_files=False)
    check_one_size(parsed)
    return json.dumps(timeline(parsed).trace)
