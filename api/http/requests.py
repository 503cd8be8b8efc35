"""Running slow work in threads, and doing a repeated POST once."""

from collections.abc import Callable
from typing import TypeVar

import anyio
from fastapi import Request
from fastapi.responses import Response

from api.errors import fault
from api.http.bodies import StrictRequest
from api.http.problems import problem
from api.identity import hash_of
from api.settings import ApiKey
from api.storage.idempotency import AnsweredMeanwhile, IdempotencyStore, KeptAnswer
from api.storage.transactions import one_transaction
from api.wiring import Wiring
from planner.errors import PlannerError

MAX_KEY_LENGTH = 255
KEPT_HEADERS = ("location",)
PASSING = (408, 429)  # answers that the same request need not get again
Result = TypeVar("Result")


def wiring_of(request: Request) -> Wiring:
    """The outside world of this app."""
    wiring: Wiring = request.app.state.wiring
    return wiring


async def in_thread(request: Request, work: Callable[[], Result]) -> Result:
    """Runs CPU-bound or blocking work beside the event loop, at most `planning_threads` at once."""
    return await anyio.to_thread.run_sync(work, limiter=request.app.state.limiter)


async def answer_once(request: Request, key: ApiKey, work: Callable[[], Response]) -> Response:
    """The answer of `work`, in a thread; the kept answer where the Idempotency-Key was used before.

    Same key and same body: the same answer, the work is not done again. Same key and another body:
    409. An answer of 5xx, 408 or 429 is not kept. Keys are remembered for a day, per API key and
    path. What the work stores and its answer are one transaction.
    """
    raw = await request.body() if isinstance(request, StrictRequest) else b""
    return await in_thread(request, lambda: _answer_once(request, key, raw, work))


def _answer_once(
    request: Request, key: ApiKey, raw: bytes, work: Callable[[], Response]
) -> Response:
    name = request.headers.get("idempotency-key")
    if name is None:
        return work()
    if not 0 < len(name) <= MAX_KEY_LENGTH:
        rule = f"must have 1 to {MAX_KEY_LENGTH} characters"
        raise fault("idempotency-key", name, rule, "use for example a UUID")
    store = wiring_of(request).idempotency
    key_hash = hash_of(key.name.encode(), request.url.path.encode(), name.encode())
    request_hash = hash_of(raw)
    kept = store.kept(key_hash, request_hash)
    if kept is not None:
        return _again(kept)
    try:
        try:
            with one_transaction(store.engine):
                answer = work()
                _keep(store, key_hash, request_hash, answer)
        except PlannerError as error:  # what it wrote is undone
            answer = problem(request, error)
            _keep(store, key_hash, request_hash, answer)
    except AnsweredMeanwhile as other:
        return _again(other.answer)
    return answer


def _again(kept: KeptAnswer) -> Response:
    headers = {**kept.headers, "idempotent-replayed": "true"}
    return Response(kept.body, kept.status, headers, media_type=kept.content_type)


def _keep(store: IdempotencyStore, key_hash: str, request_hash: str, answer: Response) -> None:
    """Keeps an answer that the same request would get again."""
    if answer.status_code < 500 and answer.status_code not in PASSING:
        kept = KeptAnswer(
            status=answer.status_code,
            headers={name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers},
            content_type=answer.headers["content-type"],
            body=bytes(answer.body).decode(),
        )
        store.keep(key_hash, request_hash, kept)
