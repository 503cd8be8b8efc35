"""POST /estimate, GET /estimates/{id}."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from api.http import etags
from api.http.bodies import JSON, REQUIRED, CheckedByPlanner, strict_route
from api.http.etags import NOT_MODIFIED
from api.http.requests import answer_once, in_thread, wiring_of
from api.http.routes.parameters import problems
from api.http.schemas import JobBody
from api.http.security import Planner, Reader
from api.service import Refusal, estimate_and_keep, estimate_one
from api.wiring import Wiring
from planner.specs.estimate import Estimate

router = APIRouter(tags=["estimates"], route_class=strict_route())
JobsJson = Annotated[Any, CheckedByPlanner(JobBody | list[JobBody]), Body()]


@router.post(
    "/estimate",
    response_model=None,
    responses={
        200: {"model": Estimate | list[Estimate]},
        **problems(401, 403, 409, 413, 415, 422, 503),
    },
    openapi_extra=REQUIRED,
)
async def post_estimate(request: Request, key: Planner, jobs: JobsJson = None) -> Response:
    """A job with a layout, or a list of them, priced.

    In a list a malformed element is answered by its error object.
    """
    wiring = wiring_of(request)
    work = _many if isinstance(jobs, list) else _one
    return await answer_once(request, key, lambda: work(wiring, jobs, key.name))


def _one(wiring: Wiring, job: Any, owner: str) -> Response:
    kept_id, estimate = estimate_one(wiring, job, allow_files=False, owner=owner)
    headers = {"location": f"/estimates/{kept_id}"}
    return Response(estimate.model_dump_json(), headers=headers, media_type=JSON)


def _many(wiring: Wiring, jobs: Any, owner: str) -> Response:
    lines = [
        json.dumps(answer.as_dict(), default=str)
        if isinstance(answer, Refusal)
        else answer.model_dump_json()
        for answer in estimate_and_keep(wiring, jobs, allow_files=False, owner=owner)
    ]
    return Response("[" + ",".join(lines) + "]", media_type=JSON)


@router.get(
    "/estimates/{estimate_id}",
    response_model=None,
    responses={200: {"model": Estimate}, **NOT_MODIFIED, **problems(401, 403, 404, 503)},
)
async def get_estimate(request: Request, estimate_id: str, _: Reader) -> Response:
    """One stored estimate, as it was answered."""
    kept = await in_thread(request, lambda: wiring_of(request).store.get_estimate(estimate_id))
    return etags.answer(request, kept.estimate.model_dump_json())
