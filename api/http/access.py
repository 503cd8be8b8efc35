"""Records of every request: its id, a line in the log, counts and times for Prometheus."""

import logging
import re
import time
import uuid
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.api.http.metrics import Metrics
from planner.api.logs import request_id

REQUEST_ID = "x-request-id"
# of another's id only what is safe in a log
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# one label for all paths that are no route, and for all methods that HTTP does not name: a
# scanner must not make a time series each
UNKNOWN = "unknown"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
log = logging.getLogger("planner.requests")


class Noted:
    """ASGI middleware: names, logs, counts and times every request under its route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value
        started = time.perf_counter()
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        name = sent if SAFE_ID.fullmatch(sent) else uuid.uuid4().hex
        token = request_id.set(name)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        self.metrics.open.inc()
        try:
            await self.app(scope, receive, watched)
        finally:
            self.metrics.open.dec()
            seconds = time.perf_counter() - started
            path = getattr(scope.get("route"), "path", UNKNOWN)
            method = scope["method"] if scope["method"] in METHODS else UNKNOWN
            self.metrics.requests.labels(method, path, str(status)).inc()
            self.metrics.seconds.labels(method, path).observe(seconds)
            about = {
                "method": method,
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                "key": scope.get("state", {}).get("key", "-"),
                "client": (scope.get("client") or ("-",))[0],
            }
            log.info("%(client)s %(key)s %(method)s %(path)s %(status)s %(seconds)s s", about,
                     extra=about)  # fmt: skip
            request_id.reset(token)
