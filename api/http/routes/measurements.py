"""GET and POST /measurements, GET /measurements/{id}: rows as `planner-cli measurements` reads and
writes them, JSON or CSV.
"""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask

from api.calibration.update import update_from_measurements
from api.http.requests import JSON, Posted, answer_once, in_thread, read_body, wiring_of
from api.http.routes.parameters import Cursor, PageSize, Reader, Text
from api.http.routes.plans import problems
from api.http.schemas import MeasurementList, MeasurementsStored
from api.http.security import needs
from api.input.measurements import filter_of, of_rows, read_measurements, row_of, store_new, to_csv
from api.settings import ApiKey

router = APIRouter(tags=["measurements"])
CSV = "text/csv"
CURSOR = "x-next-cursor"
ROW_SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["model", "cluster", "training", "layout", "measured"],
    "properties": {name: {} for name in ("id", "model", "cluster", "training", "layout", "measured",
            "source")},
}  # fmt: skip


@router.get(
    "/measurements",
    response_model=None,
    responses={
        200: {"model": MeasurementList, "content": {CSV: {"schema": {"type": "string"}}}},
        **problems(401, 403, 422, 503),
    },
)
async def list_measurements(
    request: Request,
    _: Reader,
    model: Text = None,
    gpu: Text = None,
    status: Annotated[Literal["ok", "oom", "failed"] | None, Query()] = None,
    rung: Annotated[Literal["emulated", "imitated", "probed", "published"] | None, Query()] = None,
    job_hash: Text = None,
    format: Annotated[Literal["json", "csv"] | None, Query()] = None,
    cursor: Cursor = None,
    limit: PageSize = 50,
) -> Response:
    """Measurements, newest first, as JSON, or as CSV by `format=csv` or `Accept: text/csv` (the
    cursor is then a header).
    """
    wanted = filter_of(model=model, gpu=gpu, status=status, rung=rung, job_hash=job_hash)
    page = await in_thread(
        request, lambda: wiring_of(request).measurements.list(wanted, cursor, limit)
    )
    if format == "csv" or (format is None and CSV in request.headers.get("accept", "")):
        headers = {CURSOR: page.next_cursor} if page.next_cursor is not None else {}
        return Response(to_csv(page.items), media_type=CSV, headers=headers)
    body = {"items": [row_of(one) for one in page.items], "next_cursor": page.next_cursor}
    return Response(json.dumps(body, default=str), media_type=JSON)


@router.get(
    "/measurements/{measurement_id}",
    response_model=None,
    responses={200: {"model": dict[str, Any]}, **problems(401, 403, 404, 503)},
)
async def get_measurement(request: Request, measurement_id: str, _: Reader) -> Response:
    """One measurement as a row."""
    found = await in_thread(request, lambda: wiring_of(request).measurements.get(measurement_id))
    return Response(json.dumps(row_of(found), default=str), media_type=JSON)


@router.post(
    "/measurements",
    response_model=None,
    status_code=201,
    responses={201: {"model": MeasurementsStored}, **problems(401, 403, 409, 413, 415, 422, 503)},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": {"oneOf": [ROW_SCHEMA, {"type": "array", "items": ROW_SCHEMA}]}},
                CSV: {"schema": {"type": "string"}},
            },
        }
    },
)
async def post_measurements(
    request: Request, key: Annotated[ApiKey, Depends(needs("probe"))]
) -> Response:
    """A row, a list of rows, or CSV, stored all or none; what is new is learnt from. Rows that are
    there already change nothing.
    """
    posted = await read_body(request, key, also=(CSV,))
    return await in_thread(request, lambda: answer_once(posted, lambda: _stored(posted)))


def _stored(posted: Posted) -> Response:
    wiring, value = posted.wiring, posted.value
    if isinstance(value, str):
        measurements = read_measurements(wiring, value, "csv")
    else:
        rows = value if isinstance(value, list) else [value]
        measurements = of_rows(
            wiring,
            ((f"row {number}", row) for number, row in enumerate(rows, start=1)),
            allow_files=False,
        )
    stored = store_new(wiring, measurements)
    learning = BackgroundTask(update_from_measurements, wiring, stored.new)
    return Response(
        json.dumps({"new": stored.new, "known": stored.known}),
        201,
        media_type=JSON,
        background=learning,
    )
