"""Parameters and answers that several routes share: short texts, pages, errors, ETags."""

import hashlib
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response

from planner.api.http.bodies import JSON
from planner.api.http.schemas import Problem
from planner.api.storage.common import MAX_PAGE

Text = Annotated[str | None, Query(max_length=200)]
Cursor = Annotated[str | None, Query(max_length=400)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of these errors. What is not found (404) may be there unreadable (410)."""
    also = (410,) if 404 in statuses else ()
    return {status: {"model": Problem} for status in sorted({*statuses, *also})}


def answers(
    model: Any, *statuses: int, code: int = 200, etag: bool = False
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of an answer and of these errors.

    code: of the answer. etag: whether it has one (`with_etag`).
    """
    found: dict[int | str, dict[str, Any]] = {code: {"model": model}, **problems(*statuses)}
    unchanged = {"description": "Not modified: your ETag is current."}
    return {**found, 304: unchanged} if etag else found


def with_etag(request: Request, body: str, media_type: str = JSON) -> Response:
    """The body with its ETag; 304 without it where `If-None-Match` names it.

    Source: RFC 9110, sections 8.8.3 and 13.1.2 (weak comparison; `*` is any).
    """
    tag = f'"{hashlib.sha256(body.encode()).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    asked = request.headers.get("if-none-match", "")
    cached = {one.strip().removeprefix("W/") for one in asked.split(",")}
    if tag in cached or "*" in cached:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
