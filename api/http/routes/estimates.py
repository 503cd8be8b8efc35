"""POST /estimate, GET /estimates/{id}."""

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.http.requests import JSON, Posted, answer_once, in_thread, read_body, wiring_of
from api.http.routes.plans import JOB_SCHEMA, body_of, problems
from api.http.security import needs
from api.service import Refusal, estimate_and_keep, estimate_one
from api.settings import ApiKey
from planner.specs.estimate import Estimate

router = APIRouter(tags=["estimates"])


@router.post(
    "/estimate",
    response_model=None,
    responses={
        200: {"model": Estimate | list[Estimate]},
        **problems(401, 403, 409, 413, 415, 422, 503),
    },
    openapi_extra=body_of(JOB_SCHEMA, {"type": "array", "items": JOB_SCHEMA}),
)
async def post_estimate(
    request: Request, key: Annotated[ApiKey, Depends(needs("plan"))]
) -> Response:
    """A job with a layout, or a list of them, priced. In a list a malformed element is answered by
    its error object.
    """
    posted = await read_body(request, key)
    work = _many if isinstance(posted.value, list) else _one
    return await in_thread(request, lambda: answer_once(posted, lambda: work(posted)))


def _one(posted: Posted) -> Response:
    kept_id, estimate = estimate_one(posted.wiring, posted.value, allow_files=False)
    return Response(
        estimate.model_dump_json(), media_type=JSON, headers={"location": f"/estimates/{kept_id}"}
    )


def _many(posted: Posted) -> Response:
    answers = estimate_and_keep(posted.wiring, posted.value, allow_files=False)
    lines = [
        json.dumps(answer.as_dict(), default=str)
        if isinstance(answer, Refusal)
        else answer.model_dump_json()
        for answer in answers
    ]
    return Response("[" + ",".join(lines) + "]", media_type=JSON)


@router.get(
    "/estimates/{estimate_id}",
    response_model=None,
    responses={200: {"model": Estimate}, **problems(401, 403, 404, 503)},
)
async def get_estimate(
    request: Request, estimate_id: str, _: Annotated[ApiKey, Depends(needs("read"))]
) -> Response:
    """One stored estimate, as it was answered."""
    kept = await in_thread(request, lambda: wiring_of(request).store.get_estimate(estimate_id))
    return Response(kept.estimate.model_dump_json(), media_type=JSON)
