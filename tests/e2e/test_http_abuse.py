"""What a service meets: slow and vanished clients, pages of other sites, its own end."""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.conftest import api_keys, needed
from tests.e2e.probe_jobs import until
from tests.e2e.test_abuse import abused
from tests.served import LONG_JOB, Served, in_process, served

KEYS = api_keys({"reader": "read", "boss": "admin"})
CHOSEN = {"request_seconds": 1, "log_format": "json", "planning_processes": 1}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real service, which outlives all that clients do to it."""
    folder = tmp_path_factory.mktemp("service")
    url = f"sqlite:///{folder / 'x.db'}"
    with served(url, folder, **CHOSEN, proxies="10.9.9.0/24,127.0.0.1") as running:
        yield running


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that asks for keys."""
    folder = tmp_path_factory.mktemp("keyed")
    with served(f"sqlite:///{folder / 'x.db'}", folder, **CHOSEN, api_keys=KEYS) as running:
        yield running


def closed(connection: socket.socket) -> bool:
    """Whether the other side ends it, whatever it says before."""
    connection.settimeout(60)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_half_a_request_is_not_waited_for(service: Served) -> None:
    silent, half, second = (service.connect() for _ in range(3))
    half.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
    # a whole request first: the connection stays open for the next one, which never comes whole
    second.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in second.recv(65536)
    second.sendall(b"GET /healthz HT")
    assert all(map(closed, (silent, half, second)))
    assert httpx.get(f"{service.url}/healthz").status_code == 200


def test_dribbling_does_not_buy_time(service: Served) -> None:
    connection, stop = service.connect(), threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for letter in b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 10_000:
                connection.send(bytes([letter]))
                if stop.wait(0.05):
                    return

    thread = threading.Thread(target=dribble)
    thread.start()
    assert closed(connection)
    stop.set()
    thread.join()


def test_a_body_that_never_comes_is_408(service: Served) -> None:
    connection = service.connect()
    connection.sendall(head("Content-Type: application/json", "Content-Length: 100") + b"{")
    answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert b"application/problem+json" in answer


def test_a_sender_that_leaves_early_is_no_bug(service: Served) -> None:
    with service.connect() as connection:
        connection.sendall(head("Content-Type: application/json", "Content-Length: 100") + b"{")
    until(lambda: " POST /plan 422 " in service.log)
    assert "Traceback" not in service.log


def head(*headers: str) -> bytes:
    """Of a request for a plan, whose body follows."""
    lines = ("POST /plan HTTP/1.1", "Host: localhost", *headers)
    return "\r\n".join((*lines, "", "")).encode()


@pytest.mark.parametrize(("secret", "kind", "status"), [
    ("wrong", "application/json", 401), ("boss", "application/json", 408),
    ("boss", "text/plain", 415)])  # fmt: skip
def test_a_body_that_drips_on_after_its_answer_holds_no_connection(
    keyed: Served, secret: str, kind: str, status: int
) -> None:
    connection = keyed.connect()
    headers = (f"Authorization: Bearer {secret}", f"Content-Type: {kind}")
    connection.sendall(head(*headers, "Content-Length: 100000") + b"{")
    answer = connection.recv(65536)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in answer
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        until(lambda: connection.sendall(b" "), "it took a byte more for minutes")


def test_a_large_body_with_a_wrong_key_is_answered(keyed: Served) -> None:
    headers = {"authorization": "Bearer wrong", "content-type": "application/json"}
    answer = httpx.post(f"{keyed.url}/plan", content=b" " * 1_900_000, headers=headers)
    assert answer.status_code == 401


def test_who_is_no_configured_proxy_speaks_for_itself_alone(keyed: Served) -> None:
    """Each wrong key counts for the address that sent it, whatever address it names."""
    for number in range(25):
        headers = {"authorization": "Bearer guess", "x-forwarded-for": f"10.0.0.{number}"}
        status = httpx.get(f"{keyed.url}/plans", headers=headers).status_code
    assert status == 429
    assert "10.0.0." not in keyed.log


def test_who_is_a_configured_proxy_speaks_for_its_clients(service: Served) -> None:
    for chain in ("10.0.0.8", "10.0.0.9, 10.9.9.7"):  # the second comes through two proxies
        httpx.get(f"{service.url}/healthz", headers={"x-forwarded-for": chain})
    for client in ("10.0.0.8", "10.0.0.9"):
        until(lambda client=client: f'"client": "{client}"' in service.log)


def test_work_ends_with_its_client(service: Served) -> None:
    before = service.planning()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(httpx.post, f"{service.url}/plan", json=LONG_JOB, timeout=10)
        working = until(lambda: service.planning() - before)
        with pytest.raises(httpx.ReadTimeout):
            asked.result()
    until(lambda: not working & service.planning())
    # a client that goes is no failure of the service
    until(lambda: " POST /plan 499 " in service.log)
    assert "Traceback" not in service.log


@pytest.mark.parametrize(
    ("number", "codes"), [(signal.SIGTERM, {0, -signal.SIGTERM}), (signal.SIGINT, {130})]
)
def test_it_ends_soon_whatever_is_open(
    sqlite_url: str, tmp_path: Path, number: int, codes: set[int]
) -> None:
    with served(sqlite_url, tmp_path, **CHOSEN) as service, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(httpx.post, f"{service.url}/plan", json=LONG_JOB, timeout=120)
        service.connect().sendall(b"GET / HT")
        until(service.planning)
        time.sleep(0.5)  # the plan is being made, whatever is measured after it
        started = time.monotonic()
        service.process.send_signal(number)
        assert service.process.wait(timeout=300) in codes
        assert time.monotonic() - started < 120, "10 s of its own, on however busy a machine"
        answer = asked.result()
    assert (answer.status_code, answer.json()["type"]) == (503, "planning_failed")
    until(lambda: not service.planning())
    assert "Traceback" not in service.log


@pytest.mark.parametrize("host", [
    "127.0.0.1:8000", "localhost", "[::1]:80", "login1", "planner.localhost", "10.0.0.7",
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example",
])  # fmt: skip
def test_it_is_asked_by_its_own_name(shared: TestClient, host: str) -> None:
    answer = shared.get("/plans", headers={"host": host})
    assert answer.status_code == (403 if "evil" in host else 200)


def test_names_can_be_given(sqlite_url: str) -> None:
    with in_process(sqlite_url, allowed_hosts="plan.example, 127.0.0.1") as client:
        for host, status in (("Plan.Example:443", 200), ("127.0.0.1", 200), ("localhost", 403)):
            assert client.get("/plans", headers={"host": host}).status_code == status
        behind = {"host": "127.0.0.1", "origin": "https://plan.example"}
        assert client.post("/sweeps/sweep-none/run", headers=behind).status_code == 404


def test_with_keys_any_name_does_and_no_key_is_guessed(sqlite_url: str) -> None:
    with in_process(sqlite_url, api_keys=KEYS) as client:
        assert client.get("/healthz", headers={"host": "plan.example"}).status_code == 200
        guesses = [ask(client, f"guess-{number}").status_code for number in range(22)]
        assert guesses == [401] * 20 + [429] * 2
        assert ask(client, "boss").status_code == 200, "a known key is not refused for it"


def ask(client: TestClient, secret: str) -> httpx.Response:
    return client.get("/plans", headers={"authorization": f"Bearer {secret}"})


@pytest.mark.parametrize(("headers", "status"), [
    ({"origin": "https://evil.example"}, 403), ({"origin": "null"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403), ({"sec-fetch-site": "same-site"}, 403),
    ({"origin": "http://testserver"}, 404), ({"sec-fetch-site": "same-origin"}, 404),
    ({"sec-fetch-site": "none"}, 404),
    ({"sec-fetch-site": "same-origin", "origin": "https://behind-a.proxy"}, 404), ({}, 404),
])  # fmt: skip
def test_a_page_elsewhere_changes_nothing_and_its_own_may(
    shared: TestClient, headers: dict[str, str], status: int
) -> None:
    assert shared.post("/sweeps/sweep-none/run", headers=headers).status_code == status
    assert shared.get("/plans", headers=headers).status_code == 200


def test_requests_have_names(shared: TestClient) -> None:
    given = shared.get("/plans/none", headers={"x-request-id": "job-17.a"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "job-17.a"
    made = shared.get("/plans", headers={"x-request-id": 'a"}\x1b[2J'}).headers["x-request-id"]
    assert len(made) == 32, "what could forge a line of the log is replaced"


def test_the_log_is_a_line_a_request(service: Served) -> None:
    path = "/plans/%0aforged%1b[2J"
    httpx.get(f"{service.url}{path}", headers={"x-request-id": "one"})

    def lines() -> list[dict[str, Any]]:
        found = (json.loads(line) for line in service.log.splitlines() if line[:1] == "{")
        return [line for line in found if line.get("request_id") == "one"]

    about = {"method": "GET", "status": 404, "key": "anyone", "path": "/plans/\nforged\x1b[2J"}
    assert until(lines)[0].items() >= about.items()


def test_readiness_shows_no_secret() -> None:
    url = "postgresql://me:one@127.0.0.1:1/planner?password=two&sslpassword=three"
    with in_process(url, probe_workers=0, task_workers=0) as client:
        ready, plans = client.get("/readyz"), client.get("/plans")
    assert (ready.status_code, plans.status_code) == (503, 503)
    assert "database: cannot be reached" in ready.json()["detail"]
    said = ready.text.replace("not_ready", "")
    assert [secret for secret in ("one", "two", "three", "127.0.0.1") if secret in said] == []
    assert [secret for secret in (":one", "two", "three") if secret in plans.text] == []


def test_a_key_may_ask_so_often(sqlite_url: str) -> None:
    with in_process(sqlite_url, api_keys=KEYS, requests_per_second=1) as client:
        answers = [ask(client, "reader") for _ in range(12)]
        assert [one.status_code for one in answers] == [200] * 10 + [429] * 2
        refused = answers[-1]
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert refused.json()["type"] == "too_many_requests"
        assert ask(client, "boss").status_code == 200, "each key has its own"


@pytest.mark.slow
def test_the_service_answers_as_its_document_says() -> None:
    assert "Stateful" in abused("schema", "--examples", "8")


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_kills_lose_nothing_and_do_nothing_twice(database: str) -> None:
    if database == "postgres":
        needed("psycopg")
    found = json.loads(abused("kills", "--kills", "6", "--json", "--database", database))
    assert found["kills of a worker"] + found["kills of a service"] == 6
    assert found["outages of the database"] == 1
    assert min(found["plans answered"], found["probes accepted"]) > 0
