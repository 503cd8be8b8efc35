"""POST /plan, GET /plans, GET and DELETE /plans/{id}, GET /plans/{id}/events."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse

from api.events import MEDIA_TYPE as EVENTS
from api.events import OPEN, follow
from api.requests import JSON, answer_once, in_thread, read_body, wiring_of
from api.schemas import JobBody, PlanLine, PlanList, PlanState, Problem
from api.security import needs
from api.service import make_plan
from api.settings import ApiKey
from api.storage.common import MAX_PAGE
from api.storage.store import DONE
from api.wiring import Wiring
from planner.ports import ProbeFilter, ProbeRecord
from planner.specs.plan import Plan

router = APIRouter(tags=["plans"])


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of these errors."""
    return {status: {"model": Problem} for status in statuses}


def body_of(*schemas: Any) -> dict[str, Any]:
    """OpenAPI entry of a JSON body that the route reads itself."""
    return {
        "requestBody": {"required": True, "content": {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": _list(schemas)}}}}
    }


def _list(schemas: Sequence[Any]) -> list[Any]:
    return list(schemas)


JOB_SCHEMA = JobBody.model_json_schema()


@router.post(
    "/plan",
    response_model=None,
    responses={200: {"model": Plan}, **problems(401, 403, 409, 413, 415, 422, 503)},
    openapi_extra=body_of(JOB_SCHEMA),
)
async def post_plan(request: Request, key: Annotated[ApiKey, Depends(needs("plan"))]) -> Response:
    """A job in, a ranked plan out. 409: nothing fits, with the nearest miss. `Idempotency-Key` is honoured."""
    posted = await read_body(request, key)

    def work() -> Response:
        plan = make_plan(posted.wiring, posted.value, allow_files=False)
        return Response(plan.model_dump_json(), media_type=JSON, headers={"location": f"/plans/{plan.id}"})

    return await in_thread(request, lambda: answer_once(posted, work))


@router.get("/plans", responses=problems(401, 403, 422, 503))
async def list_plans(
    request: Request,
    _: Annotated[ApiKey, Depends(needs("read"))],
    cursor: Annotated[str | None, Query(max_length=400)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
) -> PlanList:
    """Stored plans, newest first."""
    page = await in_thread(request, lambda: wiring_of(request).store.list_plans(cursor, limit))
    return PlanList(items=[PlanLine(**asdict(item)) for item in page.items], next_cursor=page.next_cursor)


@router.get("/plans/{plan_id}", response_model=None, responses={200: {"model": Plan}, **problems(401, 403, 404, 503)})
async def get_plan(request: Request, plan_id: str, _: Annotated[ApiKey, Depends(needs("read"))]) -> Response:
    """One stored plan, as it was answered."""
    plan = await in_thread(request, lambda: wiring_of(request).store.get_plan(plan_id))
    return Response(plan.model_dump_json(), media_type=JSON)


@router.get(
    "/plans/{plan_id}/events",
    response_model=None,
    responses={200: {"description": "Server-sent events", "content": {EVENTS: {}}}, **problems(401, 403, 404, 503)},
)
async def get_events(request: Request, plan_id: str, _: Annotated[ApiKey, Depends(needs("read"))]) -> Response:
    """Server-sent events: `probe` for every change of a probe of the plan, `done` at the end."""
    wiring = wiring_of(request)
    await in_thread(request, lambda: wiring.store.get_plan(plan_id))

    async def read() -> list[ProbeRecord]:
        return await in_thread(request, lambda: probes_of(wiring, plan_id))

    stream = follow(plan_id, DONE, read, anyio.sleep)
    return StreamingResponse(stream, media_type=EVENTS, headers={"cache-control": "no-store", "x-accel-buffering": "no"})


@router.delete("/plans/{plan_id}", responses=problems(401, 403, 404, 503))
async def cancel_plan(request: Request, plan_id: str, _: Annotated[ApiKey, Depends(needs("plan"))]) -> PlanState:
    """Cancels what still runs for a plan: its queued and running probes. The plan itself is an answer and stays."""
    wiring = wiring_of(request)

    def work() -> PlanState:
        wiring.store.get_plan(plan_id)
        ended = [wiring.probes.cancel(record.id, wiring.clock.now()) for record in probes_of(wiring, plan_id) if record.state in OPEN]
        return PlanState(id=plan_id, status=DONE, cancelled_probes=[record.id for record in ended])

    return await in_thread(request, work)


def probes_of(wiring: Wiring, plan_id: str) -> list[ProbeRecord]:
    """All probes of a plan, newest first."""
    found: list[ProbeRecord] = []
    cursor = None
    while True:
        page = wiring.probes.list(ProbeFilter(plan_id=plan_id), cursor, MAX_PAGE)
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found
