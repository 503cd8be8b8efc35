"""ETags of what does not change, so that nobody fetches it twice."""

import hashlib
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from planner.api.http.bodies import JSON

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Not modified: your ETag is current."}
}


def answer(request: Request, body: str, media_type: str = JSON) -> Response:
    """The body with its ETag; 304 without it where `If-None-Match` names it.

    Source: RFC 9110, sections 8.8.3 and 13.1.2 (weak comparison; `*` is any).
    """
    tag = f'"{hashlib.sha256(body.encode()).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    asked = request.headers.get("if-none-match", "")
    held = {one.strip().removeprefix("W/") for one in asked.split(",")}
    if tag in held or "*" in held:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
