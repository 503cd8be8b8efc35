"""What a Prometheus server may scrape: requests by route, their time, requests being answered."""

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

MEDIA_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class Metrics:
    """The numbers of one app, in a registry of its own: several apps can live in one process."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        labels = ("method", "path", "status")
        self.requests = Counter(
            "planner_http_requests_total", "Requests answered.", labels, registry=self.registry
        )
        self.seconds = Histogram(
            "planner_http_request_seconds",
            "Time to answer.",
            ("method", "path"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.open = Gauge(
            "planner_http_requests_open", "Requests being answered.", registry=self.registry
        )
        info = Gauge(
            "planner_info",
            "Version of the service; always 1.",
            ("version",),
            registry=self.registry,
        )
        info.labels(version).set(1)

    def text(self) -> bytes:
        """Prometheus' exposition format."""
        return generate_latest(self.registry)
