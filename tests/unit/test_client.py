"""The client of the service against a service that fails in every way."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from planner.api.client import Client, ServerEvent, ServiceError, UnreachableError
from planner.api.connection import parse_events, wait_seconds

Handler = Callable[[httpx.Request], httpx.Response]
PROBE = {"ids": ["probe-1"], "id": "probe-1"}
PROBLEM = {
    "type": "invalid_request", "title": "Unprocessable Content", "status": 422,
    "detail": "tp=3: does not divide", "field": "tp", "value": 3,
    "message": "does not divide", "remedy": "choose 2 or 4",
}  # fmt: skip


def asked(handler: Handler, tries: int = 4) -> tuple[Client, list[float]]:
    """(a client of this handler, the seconds that it waited between tries)."""
    waits: list[float] = []
    transport = httpx.MockTransport(handler)
    client = Client("http://service", tries=tries, transport=transport, sleep=waits.append)
    return client, waits


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_may_pass_is_tried_again_with_the_same_idempotency_key(status: int) -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        return httpx.Response(status) if len(keys) < 3 else httpx.Response(202, json=PROBE)

    client, waits = asked(handler)
    assert client.start_probes({"plan": "plan-1"}).id == "probe-1"
    assert (len(keys), len(set(keys))) == (3, 1)
    assert len(waits) == 2
    client.start_probes({"plan": "plan-1"})
    assert len(set(keys)) == 2


def test_a_lost_connection_is_tried_again_and_said_when_it_stays_lost() -> None:
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        raise httpx.ConnectError("refused")

    client, waits = asked(handler, tries=3)
    with pytest.raises(UnreachableError, match=r"http://service.*refused"):
        client.catalog("gpus")
    assert (len(calls), len(waits)) == (3, 2)


def test_a_refusal_is_the_service_s_own_error_and_is_not_tried_again() -> None:
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        headers = {"content-type": "application/problem+json"}
        return httpx.Response(422, json=PROBLEM, headers=headers)

    client, _ = asked(handler)
    with pytest.raises(ServiceError, match="tp=3: does not divide") as error:
        client.plan({})
    assert (error.value.status, error.value.kind, len(calls)) == (422, "invalid_request", 1)
    assert (error.value.problem.field, error.value.problem.remedy) == ("tp", "choose 2 or 4")


def test_an_error_of_something_in_between_is_told_too() -> None:
    client, _ = asked(lambda _: httpx.Response(403, text="<html>proxy</html>"))
    with pytest.raises(ServiceError, match="403 Forbidden: <html>proxy"):
        client.get_sweep("sweep-1")


def test_the_wait_is_what_the_service_asks_for_or_grows() -> None:
    assert wait_seconds(1, "7") == 7.0
    assert wait_seconds(1, "100000") == 30.0
    for tried in range(1, 12):
        assert wait_seconds(tried, "Wed, 21 Oct 2026 07:28:00 GMT") <= 30.0
        assert (
            0.125 * 2 ** (tried - 1) <= wait_seconds(tried, None)
            or wait_seconds(tried, None) >= 15.0
        )


def test_lists_are_read_page_after_page() -> None:
    seen: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        cursor = request.url.params.get("cursor")
        seen.append(cursor)
        place = int(cursor or 0)
        following = str(place + 1) if place < 2 else None
        return httpx.Response(200, json={"items": [{"id": place}], "next_cursor": following})

    client, _ = asked(handler)
    rows = client.measurements(model="llama3-8b", gpu=None)
    assert next(rows) == {"id": 0}
    assert seen == [None]  # no page before it is needed
    assert [row["id"] for row in rows] == [1, 2]
    assert seen == [None, "1", "2"]


def test_what_has_an_etag_is_fetched_once() -> None:
    sent: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("if-none-match"))
        if sent[-1] == '"a"':
            return httpx.Response(304, headers={"etag": '"a"'})
        return httpx.Response(200, json={"name": "l4"}, headers={"etag": '"a"'})

    client, _ = asked(handler)
    found = [client.catalog_entry("gpus", "l4") for _ in range(2)]
    assert found == [{"name": "l4"}] * 2
    assert sent == [None, '"a"']


def test_csv_and_rows_are_sent_as_what_they_are() -> None:
    types: list[tuple[str, bytes]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        types.append((request.headers["content-type"], request.content))
        return httpx.Response(201, json={"new": ["m"], "known": []})

    client, _ = asked(handler)
    client.store_measurements("id,model\n1,x\n")
    client.store_measurements([{"id": "1"}])
    assert types[0] == ("text/csv", b"id,model\n1,x\n")
    assert (types[1][0], json.loads(types[1][1])) == ("application/json", [{"id": "1"}])


def test_events_of_a_lost_stream_go_on_after_the_last_one() -> None:
    after: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        after.append(request.headers.get("last-event-id"))
        first = 'id: 1\nevent: study\ndata: {"n": 1}\n\n: alive\n\nid: 2\nevent: study\n'
        text = first + 'data: {"n": 2}\n\n' if len(after) == 1 else "event: done\ndata: {}\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    client, _ = asked(handler)
    found = list(client.events("plan-1"))
    assert [(one.name, one.number) for one in found] == [
        ("study", 1), ("study", 2), ("done", None),
    ]  # fmt: skip
    assert after == [None, "2"]


def test_an_event_may_have_several_lines_of_data() -> None:
    lines: list[Any] = ["event: probe", 'data: {"a":', "data: 1}", ""]
    assert list(parse_events(iter(lines))) == [ServerEvent("probe", {"a": 1})]
