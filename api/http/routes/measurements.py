"""Measurements: GET and POST of rows in JSON or CSV, DELETE of one, sharing one."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask

from planner.api.calibration.listing import OwnAccuracy, own_accuracy
from planner.api.calibration.update import update_about, update_from_measurements
from planner.api.http.bodies import JSON, CheckedByPlanner, StrictRequest
from planner.api.http.requests import answer_once, wiring_of
from planner.api.http.routes.parameters import Cursor, PageSize, Text, answers, with_etag
from planner.api.http.routing import Wired, strict_route
from planner.api.http.schemas import MeasurementList, MeasurementsStored, RowBody
from planner.api.http.security import Admin, Prober, Reader, require_scope
from planner.api.input.belief import believe
from planner.api.input.measurement_rows import shown_row, to_csv
from planner.api.input.measurements import filter_of, of_rows, read_measurements, store_new
from planner.api.storage.common import MAX_PAGE
from planner.api.wiring import Wiring
from planner.errors import fault
from planner.specs.measurement import Measurement

CSV = "text/csv"
router = APIRouter(tags=["measurements"], route_class=strict_route(also=(CSV,)))
CURSOR = "x-next-cursor"
TEXT = {"type": "string"}
RowsJson = Annotated[Any, CheckedByPlanner(RowBody | list[RowBody]), Body()]


@router.get(
    "/measurements", responses={200: {"model": MeasurementList, "content": {CSV: {"schema": TEXT}}}}
)
def list_measurements(
    request: Request,
    wiring: Wired,
    _: Reader,
    model: Text = None,
    gpu: Text = None,
    status: Annotated[Literal["ok", "oom", "failed"] | None, Query()] = None,
    rung: Annotated[Literal["emulated", "imitated", "probed", "published"] | None, Query()] = None,
    job_hash: Text = None,
    asked_by: Text = None,
    format: Annotated[Literal["json", "csv"] | None, Query()] = None,
    cursor: Cursor = None,
    limit: PageSize = 50,
) -> Response:
    """Measurements, newest first, as JSON, or as CSV by `format=csv` or `Accept: text/csv`.

    In CSV the cursor is a header.
    """
    wanted = filter_of(
        model=model, gpu=gpu, status=status, rung=rung, job_hash=job_hash, asked_by=asked_by
    )
    page = wiring.measurements.list(cursor, limit, **wanted)
    if format == "csv" or (format is None and CSV in request.headers.get("accept", "")):
        headers = {CURSOR: page.next_cursor} if page.next_cursor is not None else {}
        return Response(to_csv(page.items), media_type=CSV, headers=headers)
    body = {"items": [shown_row(one) for one in page.items], "next_cursor": page.next_cursor}
    return Response(json.dumps(body, default=str), media_type=JSON)


@router.get("/accuracy")
def accuracy_here(wiring: Wired, _: Reader, limit: PageSize = MAX_PAGE) -> OwnAccuracy:
    """The newest measured runs beside what the calibration that ships predicts of them."""
    return own_accuracy(wiring, limit)


@router.get("/measurements/{measurement_id}", responses=answers(dict[str, Any], etag=True))
def get_measurement(request: Request, wiring: Wired, measurement_id: str, _: Reader) -> Response:
    """One measurement as a row."""
    found = wiring.measurements.get(measurement_id)
    return with_etag(request, json.dumps(shown_row(found), default=str))


@router.post(
    "/measurements",
    status_code=201,
    responses=answers(MeasurementsStored, code=201),
    openapi_extra={"requestBody": {"content": {CSV: {"schema": TEXT}}}},
)
async def post_measurements(request: Request, key: Prober, rows: RowsJson = None) -> Response:
    """A row, a list of rows, or CSV, stored all or none; the calibration is updated after it.

    Rows that are there already change nothing. Rows that cannot be true are stored as `refused`.
    Rows of a key without the scope `admin` count for that key's plans alone until they are shared.
    """
    assert isinstance(request, StrictRequest), "the routes here read strict bodies"
    wiring, csv = wiring_of(request), request.media_type == CSV
    text = _text(await request.body()) if csv else ""

    def work() -> Response:
        if csv:
            measurements = read_measurements(wiring, text, "csv")
        else:
            listed = rows if isinstance(rows, list) else [rows]
            named = ((f"row {number}", row) for number, row in enumerate(listed, start=1))
            measurements = of_rows(wiring, named, allow_files=False)
        shared = key.may("admin")
        stored = store_new(wiring, measurements, asked_by=key.name, shared=shared)
        body = MeasurementsStored(
            new=[one.id for one in stored.new], known=list(stored.known), refused=stored.refused
        )
        return Response(
            body.model_dump_json(),
            201,
            media_type=JSON,
            background=BackgroundTask(update_from_measurements, wiring, stored.new),
        )

    return await answer_once(request, key, work)


@router.delete("/measurements/{measurement_id}", status_code=204, response_class=Response)
def delete_measurement(wiring: Wired, measurement_id: str, key: Prober) -> Response:
    """Deletes one, and learns again without it. A key deletes its own, an admin's any."""
    if wiring.measurements.asked_by(measurement_id) != key.name:
        require_scope(key, "admin")
    update_about(wiring, [wiring.measurements.delete(measurement_id)])
    return Response(status_code=204)


@router.post("/measurements/{measurement_id}/believe", responses=answers(dict[str, Any]))
def believe_measurement(wiring: Wired, measurement_id: str, key: Prober) -> Response:
    """Counts one that is far from its prediction; 409 where it cannot be true.

    A key believes its own, an admin's any; shared ones need an admin.
    """
    found = wiring.measurements.get(measurement_id)
    if found.shared or found.asked_by != key.name:
        require_scope(key, "admin")
    return _counted(wiring, believe(wiring, measurement_id, key.name))


@router.post("/measurements/{measurement_id}/share", responses=answers(dict[str, Any]))
def share_measurement(wiring: Wired, measurement_id: str, key: Admin) -> Response:
    """Lets one count for everyone's plans, not its owner's alone."""
    wiring.measurements.share(measurement_id=measurement_id)
    return _counted(wiring, wiring.measurements.get(measurement_id))


def _counted(wiring: Wiring, found: Measurement) -> Response:
    """Returns a measurement that counts now; calibrations are updated after the response."""
    learn = BackgroundTask(update_from_measurements, wiring, [found])
    text = json.dumps(shown_row(found), default=str)
    return Response(text, media_type=JSON, background=learn)


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise fault("body", None, "is not UTF-8 text", "send it as UTF-8") from None
