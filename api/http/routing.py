"""Routes whose plain functions run in threads, each POST once."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from planner.api.http.bodies import JSON, StrictRequest
from planner.api.http.requests import answer_once, in_thread, wiring_of
from planner.api.http.security import require_key
from planner.api.wiring import Wiring


async def _wiring(request: Request) -> Wiring:
    return wiring_of(request)


Wired = Annotated[Wiring, Depends(_wiring)]


class ThreadRoute(APIRoute):
    """A route whose plain function runs beside the event loop.

    A POST is answered once per Idempotency-Key and API key (`answer_once`).
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not inspect.iscoroutinefunction(endpoint):
            endpoint = _in_thread(endpoint, once="POST" in (options.get("methods") or ()))
        super().__init__(path, endpoint, **options)


def _in_thread(work: Callable[..., Any], *, once: bool) -> Callable[..., Any]:
    signature = inspect.signature(work)
    parameters = dict(signature.parameters)

    async def run(request: Request, **values: Any) -> Any:
        if "request" in signature.parameters:
            values["request"] = request
        if once:
            return await answer_once(request, values["key"], lambda: work(**values))
        return await in_thread(request, lambda: work(**values))

    functools.update_wrapper(run, work)
    del run.__wrapped__  # type: ignore[attr-defined]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters.setdefault("request", inspect.Parameter("request", kind, annotation=Request))
    asked = list(parameters.values())
    run.__signature__ = signature.replace(parameters=asked)  # type: ignore[attr-defined]
    return run


def strict_route(*, also: tuple[str, ...] = (), within: str = "") -> type[ThreadRoute]:
    """The class of routes that read strict JSON. also: other media types that they take.

    within: prefix of the names of a body's keys in an error.
    """

    class StrictRoute(ThreadRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:  # a POST that says all in its path: a body is not read
                return handle

            async def strict(request: Request) -> Response:
                await require_key(request)
                asked = StrictRequest(request.scope, request.receive)
                asked.media_types, asked.within = (JSON, *also), within
                return await handle(asked)

            return strict

    return StrictRoute
