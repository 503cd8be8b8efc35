"""Metrics for Prometheus, and a record of every request: its id, a line in the log, its counts."""

import logging
import re
import statistics
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from http import HTTPStatus

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.api.calibration.listing import own_accuracy
from planner.api.http.lanes import Lane
from planner.api.logs import request_id
from planner.api.storage.numbers import StoredNumbers, stored_numbers
from planner.api.wiring import Wiring
from planner.errors import StoreError

MEDIA_TYPE = CONTENT_TYPE_LATEST
NEWEST_RUNS = 50
SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REQUEST_ID = "x-request-id"
# of another's id only what is safe in a log
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# one label for all paths that are no route, and for all methods that HTTP does not name: a
# scanner must not make a time series each
UNKNOWN = "unknown"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
log = logging.getLogger("planner.requests")


class Metrics:
    """Metrics of one app in a registry of its own, so that one process can hold several apps."""

    def __init__(self, version: str, wiring: Wiring, lanes: Iterable[Lane]) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        labels = ("method", "path", "status")
        self.requests = Counter(
            "planner_http_requests_total", "Requests answered.", labels, registry=self.registry
        )
        times = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self.seconds = times("planner_http_request_seconds", "Time to answer.", ("method", "path"))
        self.open = Gauge(
            "planner_http_requests_open", "Requests being answered.", registry=self.registry
        )
        self.work = times(
            "planner_work_seconds",
            "Time in a lane, with waiting: outcome is answered, busy, failed or gone (the client).",
            ("lane", "outcome"),
        )
        for name, about in (
            ("running", "Requests being worked on."),
            ("waiting", "Requests that wait for a process."),
        ):
            gauge = Gauge(f"planner_lane_{name}", about, ("lane",), registry=self.registry)
            for lane in lanes:
                gauge.labels(lane.name).set_function(partial(getattr, lane, name))
        self.registry.register(DatabaseNumbers(wiring))
        about = "Version of the service; always 1."
        info = Gauge("planner_info", about, ("version",), registry=self.registry)
        info.labels(version).set(1)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class DatabaseNumbers(Collector):
    """Gauges counted in the database; none while it is down."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self._error: tuple[str | None, float | None] = (None, None)

    def collect(self) -> Iterator[Metric]:
        """Collects the current values."""
        found = self._read()
        answers = float(found is not None)
        yield GaugeMetricFamily("planner_database_up", "Whether the database answers.", answers)
        if found is None:
            return
        jobs = GaugeMetricFamily(
            "planner_jobs", "Probes, studies and runs of sweeps.", labels=["kind", "state"]
        )
        for (kind, state), number in found.jobs.items():
            jobs.add_metric([kind, state], number)
        failures = GaugeMetricFamily(
            "planner_probe_failures", "Probes without a result.", labels=["failure"]
        )
        for failure, number in found.failures.items():
            failures.add_metric([failure], number)
        yield from (jobs, failures)
        for name, value in found.totals.items():
            about = "GPU-seconds that probes used." if "seconds" in name else f"Stored {name}."
            yield GaugeMetricFamily(f"planner_{name}", about, value=value)
        if self._error[1] is not None:
            about = f"Of the step time, over the newest {NEWEST_RUNS} measured runs, 0.1 is 10%."
            yield GaugeMetricFamily("planner_prediction_error_median", about, self._error[1])

    def _read(self) -> StoredNumbers | None:
        try:
            found = stored_numbers(self.wiring.store.engine)
            if found.newest_measurement != self._error[0]:  # pricing them costs more than counting
                errors = [abs(run.error) for run in own_accuracy(self.wiring, NEWEST_RUNS).runs]
                median = statistics.median(errors) if errors else None
                self._error = (found.newest_measurement, median)
        except StoreError:
            return None
        return found


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
