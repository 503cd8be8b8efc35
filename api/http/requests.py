"""Where the work of a request is done, and doing a repeated POST once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import TypeVar

import anyio
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from planner.api.errors import PlanningError, TooManyRequestsError
from planner.api.http.bodies import JSON, StrictRequest
from planner.api.http.lanes import PRICING, Lane
from planner.api.http.problems import problem
from planner.api.identity import hash_of
from planner.api.settings import ApiKey
from planner.api.storage.idempotency import AnsweredMeanwhile, IdempotencyStore
from planner.api.storage.tables import KeptAnswer
from planner.api.storage.transactions import one_transaction
from planner.api.wiring import Wiring
from planner.errors import PlannerError, fault

MAX_KEY_LENGTH = 255
KEPT_HEADERS = ("location", "content-type")
PASSING = (408, 429)  # answers that the same request need not get again
STOP_POLL_SECONDS, STOP_GRACE_SECONDS = 0.2, 2.0  # what is nearly done may end
Result = TypeVar("Result")


class Threads(Enum):
    """Threads beside the event loop, by what they do, so that none waits for another kind.

    The value is how many. READS wait for the database, WRITES do too and read a request.
    """

    HEALTH = 2
    EVENTS = 4
    READS = 16
    WRITES = 8


def limiters() -> dict[Threads, anyio.CapacityLimiter]:
    """One of each kind, for one app."""
    return {kind: anyio.CapacityLimiter(kind.value) for kind in Threads}


def wiring_of(request: Request) -> Wiring:
    wiring: Wiring = request.app.state.wiring
    return wiring


async def in_thread(
    request: Request, work: Callable[[], Result], threads: Threads = Threads.READS
) -> Result:
    """Runs blocking work beside the event loop."""
    return await anyio.to_thread.run_sync(work, limiter=request.app.state.limiters[threads])


async def in_turn(
    request: Request,
    key: ApiKey,
    work: Callable[..., Result],
    *args: object,
    lane: str = PRICING,
    admitted: bool = False,
) -> Result:
    """The result of `work`, in a process when it is the key's turn (`Lane`).

    lane: PRICING for what takes milliseconds, PLANNING for seconds.
    admitted: it waits for its turn, however many others do.
    The process is ended when the client goes or the service stops. Raises TooManyRequestsError,
    PlanningError, ClientDisconnect, and the errors of `work`.
    """
    chosen: Lane = request.app.state.lanes[lane]
    run = chosen.run(key.name, _or_refusal, work, args, admitted=admitted)
    working = asyncio.create_task(run)
    gone, stopped = asyncio.create_task(_gone(request)), asyncio.create_task(_stopped(request))
    started, outcome = time.perf_counter(), "failed"
    try:
        await asyncio.wait((working, gone, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and stopped.done():
            raise PlanningError("the service stops; ask again in a moment")
        if not working.done():
            outcome = "gone"
            raise ClientDisconnect
        found: Result | PlannerError = working.result()
        outcome = "answered"
    except TooManyRequestsError:
        outcome = "busy"
        raise
    finally:
        for task in (working, gone, stopped):
            task.cancel()
        await asyncio.gather(working, gone, stopped, return_exceptions=True)
        work_seconds = request.app.state.metrics.work.labels(lane, outcome)
        work_seconds.observe(time.perf_counter() - started)
    if isinstance(found, PlannerError):
        raise found
    return found


async def _stopped(request: Request) -> None:
    """Returns when the service stops, after the time that work nearly done may take."""
    while not request.app.state.stopping.is_set():
        await asyncio.sleep(STOP_POLL_SECONDS)
    await asyncio.sleep(STOP_GRACE_SECONDS)


def _or_refusal(work: Callable[..., Result], args: tuple[object, ...]) -> Result | PlannerError:
    """A refusal is an answer: the process that gave it is sound."""
    try:
        return work(*args)
    except PlannerError as error:
        return error


async def _gone(request: Request) -> None:
    """Returns when the client has gone. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer_after(
    request: Request,
    key: ApiKey,
    ask: Callable[[], Awaitable[Result]],
    work: Callable[[Result], Response],
) -> Response:
    """The answer of `work` to the findings of `ask`, given once as by `answer_once`.

    A refusal of `ask` is an answer too. Nothing is asked where the answer was kept.
    """
    hashes, store = await _hashes(request, key), wiring_of(request).idempotency
    kept = None if hashes is None else await in_thread(request, lambda: store.kept(*hashes))
    if kept is not None:
        return _again(kept)
    try:
        found = await ask()
    except PlannerError as error:
        return await answer_once(request, key, partial(_refuse, error))
    return await answer_once(request, key, lambda: work(found))


def _refuse(error: PlannerError) -> Response:
    raise error


async def answer_once(request: Request, key: ApiKey, work: Callable[[], Response]) -> Response:
    """The answer of `work`, in a thread; the kept answer where the Idempotency-Key was used before.

    Same key and same body: the same answer, the work is not done again. Same key and another body:
    409. An answer of 5xx, 408 or 429 is not kept. Keys are remembered for a day, per API key and
    path. What the work stores and its answer are one transaction.
    """
    hashes = await _hashes(request, key)
    once = work if hashes is None else partial(_answer_once, request, hashes, work)
    return await in_thread(request, once, Threads.WRITES)


def idempotency_key(request: Request) -> str | None:
    """The request's `Idempotency-Key`; None without one. Raises SpecError for one of no length."""
    name = request.headers.get("idempotency-key")
    if name is not None and not 0 < len(name) <= MAX_KEY_LENGTH:
        rule = f"must have 1 to {MAX_KEY_LENGTH} characters"
        raise fault("idempotency-key", name, rule, "use for example a UUID")
    return name


async def _hashes(request: Request, key: ApiKey) -> tuple[str, str] | None:
    """(hash of the Idempotency-Key, of the body); None for a request without a key."""
    name = idempotency_key(request)
    if name is None:
        return None
    raw = await request.body() if isinstance(request, StrictRequest) else b""
    asked = hash_of(key.name.encode(), request.url.path.encode(), name.encode())
    return asked, hash_of(raw)


def _again(kept: KeptAnswer) -> Response:
    assert kept.status is not None, "what was never answered is not kept"
    headers = {"content-type": JSON, **(kept.headers or {}), "idempotent-replayed": "true"}
    return Response(kept.body, kept.status, headers)


def _answer_once(
    request: Request, hashes: tuple[str, str], work: Callable[[], Response]
) -> Response:
    store = wiring_of(request).idempotency
    kept = store.kept(*hashes)
    if kept is not None:
        return _again(kept)
    try:
        try:
            with one_transaction(store.engine):
                answer = work()
                _keep(store, hashes, answer)
        except PlannerError as error:  # what it wrote is undone
            answer = problem(request, error)
            _keep(store, hashes, answer)
    except AnsweredMeanwhile as other:
        return _again(other.answer)
    return answer


def _keep(store: IdempotencyStore, hashes: tuple[str, str], answer: Response) -> None:
    """Keeps an answer that the same request would get again."""
    if answer.status_code < 500 and answer.status_code not in PASSING:
        found, body = answer.headers, bytes(answer.body).decode()
        headers = {name: found[name] for name in KEPT_HEADERS if name in found}
        store.keep(*hashes, answer.status_code, headers, body)
