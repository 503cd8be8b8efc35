"""POST /sweeps, GET /sweeps, GET and DELETE /sweeps/{id}, POST /sweeps/{id}/run, pause, resume.

GET /sweeps/{id}/events, GET /quarantine, DELETE /quarantine/{host}.
"""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask

from planner.api.http.bodies import JSON, CheckedByPlanner
from planner.api.http.events import ANSWER, Snapshot, of_sweep, stream
from planner.api.http.routes.parameters import Cursor, PageSize, answers
from planner.api.http.routing import Wired, strict_route
from planner.api.http.security import Prober, Reader
from planner.api.http.sweep_schemas import (
    HostReleased,
    QuarantineLine,
    SweepDetail,
    SweepRunAccepted,
)
from planner.api.identity import asker
from planner.api.input.names import sweep_id_of
from planner.api.jobs.sweeps import add_sweep, change_sweep, run_now, sweep_detail
from planner.api.storage.common import told
from planner.api.storage.records import Page, SweepState
from planner.api.wiring import Wiring
from planner.specs.sweep import SweepSpec

router = APIRouter(tags=["sweeps"], route_class=strict_route(within="sweep."))
SweepJson = Annotated[Any, CheckedByPlanner(SweepSpec), Body()]


@router.post("/sweeps", status_code=201, responses=answers(SweepDetail, code=201))
def post_sweep(wiring: Wired, key: Prober, spec: SweepJson = None) -> Response:
    """Stores a sweep. With a `schedule` workers run it from then on.

    Without one POST /sweeps/{id}/run does.
    """
    sweep = add_sweep(wiring, spec, allow_files=False)
    headers = {"location": f"/sweeps/{sweep.id}"}
    return Response(json.dumps(sweep_detail(wiring, sweep)), 201, headers, media_type=JSON)


@router.get("/sweeps", responses=answers(Page[SweepDetail]))
def list_sweeps(wiring: Wired, _: Reader, cursor: Cursor = None, limit: PageSize = 50) -> Response:
    """Stored sweeps, newest first, each with its newest run."""
    page = wiring.sweeps.list(cursor, limit)
    items = [sweep_detail(wiring, sweep, runs=1) for sweep in page.items]
    return _shown({"items": items, "next_cursor": page.next_cursor})


@router.get("/sweeps/{sweep_id}", responses=answers(SweepDetail))
def get_sweep(wiring: Wired, sweep_id: str, _: Reader) -> Response:
    """One sweep with its newest runs and their reports."""
    sweep = wiring.sweeps.get(sweep_id_of(wiring, sweep_id, "sweep_id"))
    return _shown(sweep_detail(wiring, sweep))


@router.get("/sweeps/{sweep_id}/events", responses=ANSWER)
def get_sweep_events(request: Request, wiring: Wired, sweep_id: str, _: Reader) -> Response:
    """Server-sent events of the newest run: `sweep` for every change, and `done` at its end.

    A `sweep` event holds the run's id, state, message and how far it is, as `standing` of
    GET /sweeps/{id}. Whoever comes back is sent how it stands, so nothing has to be remembered.
    """
    wiring.sweeps.get(sweep_id)

    def read() -> Snapshot:
        newest = wiring.tasks.list(limit=1, kind="sweep", parent_id=sweep_id).items
        return of_sweep(sweep_id, newest[0] if newest else None)

    return stream(request, read)


@router.get("/quarantine")
def list_quarantine(
    wiring: Wired,
    _: Reader,
    pool: Annotated[str | None, Query(description="Only hosts of this pool.")] = None,
) -> list[QuarantineLine]:
    """Hosts that runs of sweeps found bad and that none uses for a day, each with the evidence."""
    return [QuarantineLine(**told(one)) for one in wiring.quarantine.active(pool)]


@router.delete("/quarantine/{host}")
def release_host(
    wiring: Wired,
    host: str,
    _: Prober,
    pool: Annotated[str | None, Query(description="In this pool alone.")] = None,
) -> HostReleased:
    """Lets a host in again before its day is over."""
    return HostReleased(host=host, pools=wiring.quarantine.release(host, asker().name, pool))


@router.post(
    "/sweeps/{sweep_id}/run", status_code=202, responses=answers(SweepRunAccepted, code=202)
)
def run_sweep_now(request: Request, wiring: Wired, sweep_id: str, key: Prober) -> Response:
    """Queues a run for the next free worker."""
    task = run_now(wiring, wiring.sweeps.get(sweep_id), ours=False)
    body = {"id": task.id, "sweep": sweep_id, "state": task.state}
    wake = BackgroundTask(request.app.state.task_workers.wake)
    return Response(json.dumps(body), 202, media_type=JSON, background=wake)


@router.post("/sweeps/{sweep_id}/pause", responses=answers(SweepDetail))
def pause(wiring: Wired, sweep_id: str, key: Prober) -> Response:
    """No more runs until it is resumed: queued ones are cancelled, a running one goes on."""
    return _changed(wiring, sweep_id, "paused")


@router.post("/sweeps/{sweep_id}/resume", responses=answers(SweepDetail))
def resume(wiring: Wired, sweep_id: str, key: Prober) -> Response:
    """Runs again from the next moment of its schedule on."""
    return _changed(wiring, sweep_id, "active")


@router.delete("/sweeps/{sweep_id}", responses=answers(SweepDetail))
def delete_sweep(wiring: Wired, sweep_id: str, _: Prober) -> Response:
    """Never again; what runs of it is asked to stop. Its reports stay."""
    return _changed(wiring, sweep_id, "cancelled")


def _changed(wiring: Wiring, sweep_id: str, state: SweepState) -> Response:
    return _shown(sweep_detail(wiring, change_sweep(wiring, sweep_id, state)))


def _shown(body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), media_type=JSON)
