"""POST /sweeps, GET /sweeps, GET and DELETE /sweeps/{id}, POST /sweeps/{id}/run, pause, resume.

GET /sweeps/{id}/events, GET /quarantine, DELETE /quarantine/{host}.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response, StreamingResponse

from planner.api.asker import asker
from planner.api.http.bodies import JSON, REQUIRED, CheckedByPlanner, strict_route
from planner.api.http.events import MEDIA_TYPE as EVENTS
from planner.api.http.events import follow_run
from planner.api.http.requests import Threads, answer_once, in_thread, wiring_of
from planner.api.http.routes.parameters import Cursor, PageSize, problems
from planner.api.http.security import Prober, Reader
from planner.api.http.sweep_schemas import (
    HostReleased,
    QuarantineLine,
    SweepDetail,
    SweepRunAccepted,
)
from planner.api.input.names import sweep_id_of
from planner.api.jobs.sweeps import (
    add_sweep,
    cancel_sweep,
    pause_sweep,
    resume_sweep,
    run_now,
    sweep_detail,
)
from planner.api.settings import ApiKey
from planner.api.storage.job_records import TaskFilter, TaskRecord
from planner.api.storage.records import Page
from planner.specs.sweep import SweepSpec

router = APIRouter(tags=["sweeps"], route_class=strict_route(within="sweep."))
SweepJson = Annotated[Any, CheckedByPlanner(SweepSpec), Body()]


@router.post(
    "/sweeps",
    response_model=None,
    status_code=201,
    responses={201: {"model": SweepDetail}, **problems(401, 403, 409, 413, 415, 422, 503)},
    openapi_extra=REQUIRED,
)
async def post_sweep(request: Request, key: Prober, spec: SweepJson = None) -> Response:
    """Stores a sweep. With a `schedule` workers run it from then on.

    Without one POST /sweeps/{id}/run does.
    """
    wiring = wiring_of(request)

    def work() -> Response:
        sweep = add_sweep(wiring, spec, allow_files=False)
        body = json.dumps(sweep_detail(wiring, sweep))
        return Response(body, 201, {"location": f"/sweeps/{sweep.id}"}, media_type=JSON)

    return await answer_once(request, key, work)


@router.get(
    "/sweeps",
    response_model=Page[SweepDetail],
    response_model_exclude_unset=True,
    responses=problems(401, 403, 422, 503),
)
async def list_sweeps(
    request: Request, _: Reader, cursor: Cursor = None, limit: PageSize = 50
) -> dict[str, Any]:
    """Stored sweeps, newest first, each with its newest run."""
    wiring = wiring_of(request)

    def work() -> dict[str, Any]:
        page = wiring.sweeps.list(cursor, limit)
        return {
            "items": [sweep_detail(wiring, sweep, runs=1) for sweep in page.items],
            "next_cursor": page.next_cursor,
        }

    return await in_thread(request, work)


@router.get(
    "/sweeps/{sweep_id}",
    response_model=SweepDetail,
    response_model_exclude_unset=True,
    responses=problems(401, 403, 404, 422, 503),
)
async def get_sweep(request: Request, sweep_id: str, _: Reader) -> dict[str, Any]:
    """One sweep with its newest runs and their reports."""
    wiring = wiring_of(request)
    return await in_thread(
        request,
        lambda: sweep_detail(wiring, wiring.sweeps.get(sweep_id_of(wiring, sweep_id, "sweep_id"))),
    )


@router.get(
    "/sweeps/{sweep_id}/events",
    response_model=None,
    responses={
        200: {"description": "Server-sent events", "content": {EVENTS: {}}},
        **problems(401, 403, 404, 503),
    },
)
async def get_sweep_events(request: Request, sweep_id: str, _: Reader) -> Response:
    """Server-sent events of the newest run: `sweep` for every change, and `done` at its end.

    A `sweep` event holds the run's id, state, message and how far it is, as `standing` of
    GET /sweeps/{id}. Whoever comes back is sent how it stands, so nothing has to be remembered.
    """
    wiring = wiring_of(request)
    await in_thread(request, lambda: wiring.sweeps.get(sweep_id))

    async def read() -> TaskRecord | None:
        def newest() -> TaskRecord | None:
            wanted = TaskFilter(kind="sweep", parent_id=sweep_id)
            return next(iter(wiring.tasks.list(wanted, None, 1).items), None)

        return await in_thread(request, newest, Threads.EVENTS)

    stream = follow_run(sweep_id, read, anyio.sleep, request.app.state.stopping.is_set)
    return StreamingResponse(
        stream, media_type=EVENTS, headers={"cache-control": "no-store", "x-accel-buffering": "no"}
    )


@router.get("/quarantine", responses=problems(401, 403, 422, 503))
async def list_quarantine(
    request: Request,
    _: Reader,
    pool: Annotated[str | None, Query(description="Only hosts of this pool.")] = None,
) -> list[QuarantineLine]:
    """Hosts that runs of sweeps found bad and that none uses for a day, each with the evidence."""
    wiring = wiring_of(request)

    def work() -> list[QuarantineLine]:
        return [QuarantineLine(**one.as_dict()) for one in wiring.quarantine.active(pool)]

    return await in_thread(request, work)


@router.delete("/quarantine/{host}", responses=problems(401, 403, 404, 422, 503))
async def release_host(
    request: Request,
    host: str,
    _: Prober,
    pool: Annotated[str | None, Query(description="In this pool alone.")] = None,
) -> HostReleased:
    """Lets a host in again before its day is over."""
    wiring = wiring_of(request)

    def work() -> HostReleased:
        return HostReleased(host=host, pools=wiring.quarantine.release(host, asker().name, pool))

    return await in_thread(request, work)


@router.post(
    "/sweeps/{sweep_id}/run",
    response_model=None,
    status_code=202,
    responses={202: {"model": SweepRunAccepted}, **problems(401, 403, 404, 409, 422, 429, 503)},
)
async def run_sweep_now(request: Request, sweep_id: str, key: Prober) -> Response:
    """Queues a run for the next free worker."""
    wiring = wiring_of(request)

    def work() -> dict[str, Any]:
        task = run_now(wiring, wiring.sweeps.get(sweep_id), ours=False)
        return {"id": task.id, "sweep": sweep_id, "state": task.state}

    answer = await _once(request, key, 202, work)
    request.app.state.task_workers.wake()
    return answer


@router.post(
    "/sweeps/{sweep_id}/pause",
    response_model=None,
    responses={200: {"model": SweepDetail}, **problems(401, 403, 404, 409, 422, 429, 503)},
)
async def pause(request: Request, sweep_id: str, key: Prober) -> Response:
    """No more runs until it is resumed: queued ones are cancelled, a running one goes on."""
    wiring = wiring_of(request)
    return await _once(
        request, key, 200, lambda: sweep_detail(wiring, pause_sweep(wiring, sweep_id))
    )


@router.post(
    "/sweeps/{sweep_id}/resume",
    response_model=None,
    responses={200: {"model": SweepDetail}, **problems(401, 403, 404, 409, 422, 429, 503)},
)
async def resume(request: Request, sweep_id: str, key: Prober) -> Response:
    """Runs again from the next moment of its schedule on."""
    wiring = wiring_of(request)
    return await _once(
        request, key, 200, lambda: sweep_detail(wiring, resume_sweep(wiring, sweep_id))
    )


async def _once(
    request: Request, key: ApiKey, status: int, work: Callable[[], dict[str, Any]]
) -> Response:
    """The answer to a POST without a body; `Idempotency-Key` is honoured."""
    return await answer_once(
        request, key, lambda: Response(json.dumps(work()), status, media_type=JSON)
    )


@router.delete(
    "/sweeps/{sweep_id}",
    response_model=SweepDetail,
    response_model_exclude_unset=True,
    responses=problems(401, 403, 404, 503),
)
async def delete_sweep(request: Request, sweep_id: str, _: Prober) -> dict[str, Any]:
    """Never again; what runs of it is asked to stop. Its reports stay."""
    wiring = wiring_of(request)
    return await in_thread(request, lambda: sweep_detail(wiring, cancel_sweep(wiring, sweep_id)))
