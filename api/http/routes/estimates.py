"""POST /estimate, GET /estimates/{id}."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response, StreamingResponse

from planner.api.calibration.read import Learned, among, learned_by_gpu
from planner.api.http.bodies import JSON, CheckedByPlanner, StrictRequest
from planner.api.http.requests import answer_after, idempotency_key, in_thread, in_turn, wiring_of
from planner.api.http.routes.parameters import answers, with_etag
from planner.api.http.routing import Wired, strict_route
from planner.api.http.schemas import JobBody, RefusedJob
from planner.api.http.security import Planner, Reader
from planner.api.service import (
    Answer,
    Estimates,
    Refusal,
    growing,
    job_lines,
    keep_estimates,
    line_of,
    meant,
)
from planner.api.settings import ApiKey
from planner.api.storage.records import StoredEstimate
from planner.specs.estimate import Estimate

JSON_LINES = "application/jsonl"
MOST_CHUNK = 1024  # jobs priced before the next lines are sent
LINES: dict[str, Any] = {"schema": {"description": "One JSON object a line"}}
router = APIRouter(tags=["estimates"], route_class=strict_route(also=(JSON_LINES,)))
JobsJson = Annotated[Any, CheckedByPlanner(JobBody | list[JobBody]), Body()]


@router.post(
    "/estimate",
    responses={
        200: {"model": Estimate | list[Estimate | RefusedJob], "content": {JSON_LINES: LINES}}
    },
    openapi_extra={"requestBody": {"content": {JSON_LINES: LINES}}},
)
async def post_estimate(request: Request, key: Planner, jobs: JobsJson = None) -> Response:
    """A job with a layout, or a list of them, priced.

    In a list a malformed element is answered by its error object. Lists may also be JSON lines:
    sent as such (`Content-Type: application/jsonl`) or asked for (`Accept`), they are answered line
    by line as they are priced, and not kept: sending one again asks the same question.
    """
    assert isinstance(request, StrictRequest), "the routes here read strict bodies"
    wiring = wiring_of(request)
    given: Sequence[object] = jobs if isinstance(jobs, list) else [jobs]
    if request.media_type == JSON_LINES:
        given = list(job_lines((await request.body()).splitlines()))
    if request.media_type == JSON_LINES or JSON_LINES in request.headers.get("accept", ""):
        return await _streamed(request, key, given)

    def keep(answers: Sequence[Answer]) -> Response:
        if not isinstance(jobs, list) and isinstance(answers[0], Refusal):
            raise answers[0].error
        kept = keep_estimates(wiring, given, answers)
        lines = [line_of(one if isinstance(one, Refusal) else one.estimate) for one in kept]
        if isinstance(jobs, list):
            return Response(f"[{','.join(lines)}]", media_type=JSON)
        assert isinstance(kept[0], StoredEstimate), "its refusal was raised"
        headers = {"location": f"/estimates/{kept[0].id}"}
        return Response(lines[0], headers=headers, media_type=JSON)

    return await answer_after(request, key, partial(_priced, request, key, given), keep)


async def _streamed(request: Request, key: ApiKey, jobs: Sequence[object]) -> Response:
    """Lines as they are priced. Where there is no room for the first ones, none are sent."""
    idempotency_key(request)  # a wrong one is wrong here too
    chunks = growing(jobs, MOST_CHUNK)
    first = await _priced(request, key, next(chunks, ()))

    async def lines() -> AsyncIterator[str]:
        yield "".join(f"{line_of(answer)}\n" for answer in first)
        for chunk in chunks:
            answers = await _priced(request, key, chunk, admitted=True)
            yield "".join(f"{line_of(answer)}\n" for answer in answers)

    return StreamingResponse(lines(), media_type=JSON_LINES)


async def _priced(
    request: Request, key: ApiKey, jobs: Sequence[object], *, admitted: bool = False
) -> Sequence[Answer]:
    """One answer an element. admitted: it may wait, however many others do."""
    wiring = wiring_of(request)
    learnt = await in_thread(request, lambda: learned_by_gpu(wiring, key.name))
    asked = await in_thread(request, lambda: [meant(wiring, job) for job in jobs])
    return await in_turn(request, key, _prices, asked, learnt, admitted=admitted)


def _prices(jobs: Sequence[object], learnt: Learned) -> list[Answer]:
    """Runs in the other process."""
    return Estimates(allow_files=False, calibration_of=among(learnt)).of(jobs)


@router.get("/estimates/{estimate_id}", responses=answers(Estimate, etag=True))
def get_estimate(request: Request, wiring: Wired, estimate_id: str, _: Reader) -> Response:
    """One stored estimate, as it was answered."""
    return with_etag(request, wiring.store.get_estimate(estimate_id).estimate.model_dump_json())
