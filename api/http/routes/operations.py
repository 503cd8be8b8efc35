"""GET /metrics, GET /calibrations, GET /queue, POST /queue/{id}/retry, GET /audit."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import TypeAdapter
from starlette.background import BackgroundTasks

from planner.api.calibration.listing import calibration_page
from planner.api.http.bodies import JSON
from planner.api.http.metrics import MEDIA_TYPE, Metrics
from planner.api.http.requests import Threads, in_thread
from planner.api.http.routes.parameters import Cursor, PageSize, Text, answers
from planner.api.http.routing import ThreadRoute, Wired
from planner.api.http.schemas import CalibrationLine
from planner.api.http.security import Admin, Prober, Reader
from planner.api.jobs.queues import jobs_in, retry
from planner.api.storage.job_records import QueuedJob
from planner.api.storage.records import AuditEvent, Page

router = APIRouter(tags=["operations"], route_class=ThreadRoute)
JOB = TypeAdapter(QueuedJob)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request, _: Reader) -> Response:
    """Requests, work in processes, what is stored and queued, GPU-seconds, how far predictions of
    the newest measured runs are off, and the process, in Prometheus' format. With keys: scope
    `read`, as a bearer token.
    """
    numbers: Metrics = request.app.state.metrics
    text = await in_thread(request, numbers.text, Threads.HEALTH)
    return Response(text, media_type=MEDIA_TYPE)


@router.get("/calibrations")
def calibrations(
    wiring: Wired, _: Reader, cursor: Cursor = None, limit: PageSize = 50
) -> Page[CalibrationLine]:
    """The calibrations that estimates may name, the one in use first.

    Each has its knobs before and after the measured runs.
    """
    return calibration_page(wiring, cursor, limit)


@router.get("/queue")
def list_queue(
    wiring: Wired,
    _: Reader,
    failed: Annotated[bool, Query(description="What was given up, not what is open.")] = False,
    limit: PageSize = 50,
) -> list[QueuedJob]:
    """Probes, studies and runs of sweeps that wait or run, newest first, and what they wait for."""
    return jobs_in(wiring, failed=failed)[:limit]


@router.post("/queue/{job_id}/retry", responses=answers(QueuedJob))
def retry_job(request: Request, wiring: Wired, job_id: str, key: Prober) -> Response:
    """Gives a failed job new attempts. `Idempotency-Key` is honoured."""
    wake = BackgroundTasks()
    for workers in request.app.state.workers:
        wake.add_task(workers.wake)
    return Response(JOB.dump_json(retry(wiring, job_id)), media_type=JSON, background=wake)


@router.get("/audit")
def audit(
    wiring: Wired,
    _: Admin,
    asked_by: Text = None,
    action: Text = None,
    subject: Text = None,
    cursor: Cursor = None,
    limit: PageSize = 50,
) -> Page[AuditEvent]:
    """Lists requests, runs, cancellations and imports: by whom, when, for how many GPU-seconds.

    Newest first. It needs the scope `admin`.
    """
    return wiring.audit.list(cursor, limit, asked_by=asked_by, action=action, subject=subject)
