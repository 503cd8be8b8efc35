"""Every error of the service as RFC 9457 problem details; none carries a traceback."""

import json
import logging
import math
import time
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from planner.api.errors import ForbiddenError, PassingError, QuotaError, codes_of, lines_of
from planner.api.identity import asker
from planner.api.logs import request_id
from planner.errors import Fault, PlannerError, SpecError

MEDIA_TYPE = "application/problem+json"
CLIENT_GONE = 499  # for the log: nobody reads this answer; nginx's number
EVERY_SECONDS = 60.0  # between two lines of the audit trail about the same refusal
log = logging.getLogger("planner.api")
_REMEDIES = {
    HTTPStatus.NOT_FOUND: "see /docs for the paths that exist",
    HTTPStatus.METHOD_NOT_ALLOWED: "see /docs for the methods of this path",
}


def problem(request: Request, error: PlannerError) -> Response:
    """The answer to a request that this error ends."""
    status = codes_of(error).status
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
    if isinstance(error, PassingError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    members = {**error.as_dict(), "detail": "; ".join(lines_of(error))}
    answer = _response(request, status, members, headers)
    if isinstance(error, ForbiddenError | QuotaError):
        answer.background = BackgroundTask(note_refusal, request, asker().name, error)
    return answer


def note_refusal(request: Request, name: str, error: PlannerError) -> None:
    """Stores who was refused what, unless the same was stored within the last minute."""
    noted: dict[tuple[str, str], float] = request.app.state.refusals
    now, kind = time.monotonic(), (name, error.kind)
    if now - noted.get(kind, -EVERY_SECONDS) < EVERY_SECONDS:
        return
    noted[kind] = now
    subject = f"{request.method} {request.url.path}"
    try:
        request.app.state.wiring.audit.add(name, f"refused.{error.kind}", subject, str(error))
    except PlannerError as failure:
        log.warning("%s of %s is not in the audit trail: %s", subject, name, failure)


def _response(
    request: Request,
    status: HTTPStatus,
    members: Mapping[str, object],
    headers: dict[str, str] | None = None,
) -> Response:
    body = {
        "title": status.phrase,
        "status": int(status),
        "instance": request.url.path,
        "request_id": request_id.get() or None,
        "field": None,
        "value": None,
        **members,
    }
    return Response(json.dumps(body, default=str), status, headers, media_type=MEDIA_TYPE)


def _methods(request: Request) -> set[str]:
    """Methods that the path of the request takes, in all routes that it matches."""
    return {
        method
        for route in request.app.state.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }


def install(app: FastAPI) -> None:
    @app.exception_handler(PlannerError)
    async def planner_error(request: Request, error: PlannerError) -> Response:
        return problem(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, PlannerError):  # FastAPI's, for a body that cannot be read
            return problem(request, error.__cause__)
        status = HTTPStatus(error.status_code)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = ", ".join(sorted(_methods(request)))
        members = {
            "type": status.phrase.lower().replace(" ", "_").replace("-", "_"),
            "message": str(error.detail),
            "remedy": _REMEDIES.get(status),
            "detail": f"{request.method} {request.url.path}: {error.detail}",
        }
        return _response(request, status, members, headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        faults = []
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"][1:]) or "request"
            rule = item["msg"].lower()
            faults.append(Fault(field, item.get("input"), rule, "correct the value"))
        return problem(request, SpecError(faults))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        members = {
            "type": "bug",
            "message": "a bug of ours",
            "remedy": "report it with the id of this request",
            "detail": "the service failed; its log has the details",
        }
        return _response(request, HTTPStatus.INTERNAL_SERVER_ERROR, members)
