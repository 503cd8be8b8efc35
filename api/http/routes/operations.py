"""GET /metrics for Prometheus, GET /calibrations for what the numbers rest on."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from planner.api.calibration.listing import calibration_page
from planner.api.http.metrics import MEDIA_TYPE, Metrics
from planner.api.http.requests import Threads, in_thread
from planner.api.http.routes.parameters import Cursor, PageSize, problems
from planner.api.http.routing import ThreadRoute, Wired
from planner.api.http.schemas import CalibrationLine
from planner.api.http.security import Reader
from planner.api.storage.records import Page

router = APIRouter(tags=["operations"], route_class=ThreadRoute)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problems(401, 403)},
)
async def metrics(request: Request, _: Reader) -> Response:
    """Requests, work in processes, what is stored and queued, GPU-seconds, how far predictions of
    the newest measured runs are off, and the process, in Prometheus' format. With keys: scope
    `read`, as a bearer token.
    """
    numbers: Metrics = request.app.state.metrics
    text = await in_thread(request, numbers.text, Threads.HEALTH)
    return Response(text, media_type=MEDIA_TYPE)


@router.get("/calibrations", responses=problems(401, 403, 422, 503))
def calibrations(
    wiring: Wired, _: Reader, cursor: Cursor = None, limit: PageSize = 50
) -> Page[CalibrationLine]:
    """The calibrations that estimates may name, the one in use first.

    Each has its knobs before and after the measured runs.
    """
    return calibration_page(wiring, cursor, limit)
