"""Reading bodies with a limit, running slow work in threads, and doing a repeated POST once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from api.errors import BodyTooLargeError, MediaTypeError, fault
from api.http.problems import problem
from api.identity import hash_of
from api.input.text import read_json
from api.settings import ApiKey
from api.storage.idempotency import KeptAnswer
from api.wiring import Wiring
from planner.errors import Fault, PlannerError
from planner.units import MEGA

JSON = "application/json"
MAX_KEY_LENGTH = 255
DRAINED_BYTES = int(32 * MEGA)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Posted:
    """A POST whose body was read: who sent it, the raw body, and its JSON value (or its text, where
    a route takes text).
    """

    request: Request
    key: ApiKey
    raw: bytes
    value: Any

    @property
    def wiring(self) -> Wiring:
        """The outside world of this app."""
        return wiring_of(self.request)


def wiring_of(request: Request) -> Wiring:
    """The outside world of this app."""
    wiring: Wiring = request.app.state.wiring
    return wiring


async def read_body(
    request: Request, key: ApiKey, *, also: tuple[str, ...] = (), within: str = ""
) -> Posted:
    """The JSON body, or text of one of the other media types that the route takes. within: see
    `check_plain`.

    Raises MediaTypeError, BodyTooLargeError, or SpecError for what is no JSON or no text.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in (JSON, *also):
        taken = " or ".join((JSON, *also))
        raise MediaTypeError(
            Fault(
                "content-type",
                media_type or None,
                f"is not {taken}",
                f"send it with content type {taken}",
            )
        )
    limit = wiring_of(request).settings.max_body_bytes
    chunks, total = [], 0
    try:
        async for chunk in request.stream():
            total += len(chunk)
            if total <= limit:
                chunks.append(chunk)
            elif total > DRAINED_BYTES:
                # what is over the limit is read and dropped, so that the sender gets the answer;
                # but not for ever
                break
    except ClientDisconnect:
        raise fault("body", None, "ended before all of it had come", "send it again") from None
    if total > limit:
        raise BodyTooLargeError(
            Fault("body", None, f"is larger than {limit:,} bytes", "send fewer jobs at once")
        )
    raw = b"".join(chunks)
    return Posted(
        request, key, raw, read_json(raw, "body", within) if media_type == JSON else _text(raw)
    )


def posted_bare(request: Request, key: ApiKey) -> Posted:
    """A POST that says all in its path; a body is not read."""
    return Posted(request, key, b"", None)


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise fault("body", None, "is not UTF-8 text", "send it as UTF-8") from None


async def in_thread(request: Request, work: Callable[[], Result]) -> Result:
    """Runs CPU-bound or blocking work beside the event loop, at most `planning_threads` at once."""
    return await anyio.to_thread.run_sync(work, limiter=request.app.state.limiter)


def answer_once(posted: Posted, work: Callable[[], Response]) -> Response:
    """The answer of `work`; with an Idempotency-Key the kept answer if this request was answered
    before.

    Same key and same body: the same answer, work is not done again. Same key and another body, or
        while the first is
    still being answered: 409. An answer of 5xx is not kept. Keys are remembered for a day, per API
        key and path.
    """
    name = posted.request.headers.get("idempotency-key")
    if name is None:
        return work()
    if not 0 < len(name) <= MAX_KEY_LENGTH:
        raise fault(
            "idempotency-key",
            name,
            f"must have 1 to {MAX_KEY_LENGTH} characters",
            "use for example a UUID",
        )
    store = posted.wiring.idempotency
    path = posted.request.url.path
    key_hash = hash_of(posted.key.name.encode(), path.encode(), name.encode())
    kept = store.claim(key_hash, hash_of(posted.raw))
    if kept is not None:
        return Response(
            kept.body,
            kept.status,
            {**kept.headers, "idempotent-replayed": "true"},
            media_type=kept.content_type,
        )
    done = False
    try:
        answer = _answered(posted, work)
        if answer.status_code < 500:
            headers = {
                name: value for name, value in answer.headers.items() if name in ("location",)
            }
            store.keep(
                key_hash,
                KeptAnswer(
                    answer.status_code,
                    headers,
                    answer.headers["content-type"],
                    bytes(answer.body).decode(),
                ),
            )
            done = True
        return answer
    finally:
        if not done:
            store.release(key_hash)


def _answered(posted: Posted, work: Callable[[], Response]) -> Response:
    try:
        return work()
    except PlannerError as error:
        return problem(posted.request, error)
