"""The client of the service against a service that fails in every way."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from planner.api.client import Client, ServerEvent, ServiceError, UnreachableError
from planner.api.connection import parse_events, wait_seconds

PROBE = {"ids": ["probe-1"], "id": "probe-1"}
PROBLEM = {
    "type": "invalid_request", "title": "Unprocessable Content", "status": 422,
    "detail": "tp=3: does not divide", "field": "tp", "value": 3,
    "message": "does not divide", "remedy": "choose 2 or 4",
}  # fmt: skip


class Service:
    """Answers a client. asked: what it was sent. waits: seconds between tries."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response], tries: int = 4) -> None:
        self.asked: list[httpx.Request] = []
        self.waits: list[float] = []

        def handle(request: httpx.Request) -> httpx.Response:
            self.asked.append(request)
            return answer(request)

        transport = httpx.MockTransport(handle)
        self.client = Client(
            "http://service", tries=tries, transport=transport, sleep=self.waits.append
        )

    def sent(self, header: str) -> list[str | None]:
        return [request.headers.get(header) for request in self.asked]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_may_pass_is_tried_again_with_the_same_idempotency_key(status: int) -> None:
    answers = [httpx.Response(status)] * 2 + [httpx.Response(202, json=PROBE)] * 2
    service = Service(lambda _: answers.pop(0))
    assert service.client.start_probes({"plan": "plan-1"}).id == "probe-1"
    keys = service.sent("idempotency-key")
    assert (len(keys), len(set(keys)), len(service.waits)) == (3, 1, 2)
    service.client.start_probes({"plan": "plan-1"})
    assert len(set(service.sent("idempotency-key"))) == 2


def test_a_lost_connection_is_tried_again_and_said_when_it_stays_lost() -> None:
    def lost(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    service = Service(lost, tries=3)
    with pytest.raises(UnreachableError, match=r"http://service.*refused"):
        service.client.catalog("gpus")
    assert (len(service.asked), len(service.waits)) == (3, 2)


def test_a_refusal_is_the_service_s_own_error_and_is_not_tried_again() -> None:
    headers = {"content-type": "application/problem+json"}
    service = Service(lambda _: httpx.Response(422, json=PROBLEM, headers=headers))
    with pytest.raises(ServiceError, match="tp=3: does not divide") as error:
        service.client.plan({})
    assert (error.value.status, error.value.kind) == (422, "invalid_request")
    assert (error.value.problem.field, error.value.problem.remedy) == ("tp", "choose 2 or 4")
    assert len(service.asked) == 1


def test_an_error_of_something_in_between_is_told_too() -> None:
    service = Service(lambda _: httpx.Response(403, text="<html>proxy</html>"))
    with pytest.raises(ServiceError, match="403 Forbidden: <html>proxy"):
        service.client.get_sweep("sweep-1")


def test_the_wait_is_what_the_service_asks_for_or_grows() -> None:
    assert (wait_seconds(1, "7"), wait_seconds(1, "100000")) == (7.0, 30.0)
    for tried in range(1, 12):
        assert wait_seconds(tried, "Wed, 21 Oct 2026 07:28:00 GMT") <= 30.0
        assert wait_seconds(tried, None) >= min(0.125 * 2 ** (tried - 1), 15.0)


def test_lists_are_read_page_after_page() -> None:
    def page(request: httpx.Request) -> httpx.Response:
        place = int(request.url.params.get("cursor", 0))
        following = str(place + 1) if place < 2 else None
        return httpx.Response(200, json={"items": [{"id": place}], "next_cursor": following})

    service = Service(page)
    rows = service.client.measurements(model="llama3-8b", gpu=None)
    assert next(rows) == {"id": 0}
    assert len(service.asked) == 1, "no page before it is needed"
    assert [row["id"] for row in rows] == [1, 2]
    assert [request.url.params.get("cursor") for request in service.asked] == [None, "1", "2"]


def test_csv_and_rows_are_sent_as_what_they_are() -> None:
    service = Service(lambda _: httpx.Response(201, json={"new": ["m"], "known": []}))
    service.client.store_measurements("id,model\n1,x\n")
    service.client.store_measurements([{"id": "1"}])
    assert service.sent("content-type") == ["text/csv", "application/json"]
    text, rows = (request.content for request in service.asked)
    assert (text, json.loads(rows)) == (b"id,model\n1,x\n", [{"id": "1"}])


def test_events_of_a_lost_stream_go_on_after_the_last_one() -> None:
    first = 'id: 1\nevent: study\ndata: {"n": 1}\n\n: alive\n\nid: 2\nevent: study\n'
    texts = [first + 'data: {"n": 2}\n\n', "event: done\ndata: {}\n\n"]
    kind = {"content-type": "text/event-stream"}
    service = Service(lambda _: httpx.Response(200, text=texts.pop(0), headers=kind))
    found = [(one.name, one.number) for one in service.client.events("plan-1")]
    assert found == [("study", 1), ("study", 2), ("done", None)]
    assert service.sent("last-event-id") == [None, "2"]


def test_an_event_may_have_several_lines_of_data() -> None:
    lines: list[Any] = ["event: probe", 'data: {"a":', "data: 1}", ""]
    assert list(parse_events(iter(lines))) == [ServerEvent("probe", {"a": 1})]
