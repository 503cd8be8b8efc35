"""The real app over migrated databases, SQLite and PostgreSQL; and the real server in a process of
its own.
"""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from planner.api.storage.migrate import HEAD, upgrade
from tests.conftest import EACH_DATABASE, LAYOUT, api_keys, engine_of, job_values, side_by_side
from tests.served import Served, in_process, served

PROBLEM = "application/problem+json"
KEYS = api_keys({"reader": "read", "planner": "plan+read", "boss": "admin"})


def is_problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM), answer.text
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    parts = {"type", "title", "detail", "instance", "field", "value", "message", "remedy"}
    assert parts <= set(body)
    assert "Traceback" not in answer.text
    return body


@EACH_DATABASE
def test_a_plan_is_made_kept_and_listed(app: TestClient, job: dict[str, Any]) -> None:
    answer = app.post("/plan", json={**job, "id": "ünï", "search": {"top_k": 2}})
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert answer.headers["location"] == f"/plans/{plan['id']}"
    assert app.get(answer.headers["location"]).json() == plan
    listed = app.get("/plans").json()
    assert ([item["id"] for item in listed["items"]], listed["next_cursor"]) == ([plan["id"]], None)
    told = {"seq_len": 8192, "global_batch_size": 64, "trainer": "torchtitan"}
    assert told.items() <= listed["items"][0].items()


@EACH_DATABASE
def test_an_estimate_is_made_and_kept(app: TestClient, job: dict[str, Any]) -> None:
    answer = app.post("/estimate", json={**job, "layout": LAYOUT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == answer.headers["location"].rpartition("/")[2]
    assert app.get(answer.headers["location"]).json() == answer.json()
    impossible = app.post("/estimate", json={**job, "id": 5, "layout": {"tp": 3}})
    assert impossible.status_code == 200
    assert impossible.json().items() >= {"valid": False, "id": 5}.items()


def test_a_list_of_estimates_answers_every_element(shared: TestClient, job: dict[str, Any]) -> None:
    good = {**job, "layout": LAYOUT}
    asked = [{**good, "id": "a"}, 7, {"id": "b"}, {**job, "id": "c"}, {**good, "id": "d"}]
    answer = shared.post("/estimate", json=asked)
    assert answer.status_code == 200, answer.text
    found = [(element["id"], "error" in element) for element in answer.json()]
    assert found == [("a", False), (None, True), ("b", True), ("c", True), ("d", False)]
    assert shared.post("/estimate", json=[]).json() == []


def test_what_fits_nowhere_and_what_cannot_be_probed_comes_with_a_way_out(
    shared: TestClient, job: dict[str, Any]
) -> None:
    large = job_values("llama3-8b", "l4", 8, 524288, 8)
    body = is_problem(shared.post("/plan", json=large), 409)
    assert body["type"] == "nothing_fits"
    assert body["nearest_miss"]["missing_bytes"] > 0
    body = is_problem(shared.post("/plan", json={**job, "probe": {"max_probes": 1}}), 422)
    assert (body["field"], "has no h100" in body["message"]) == ("probe.pool", True)


@pytest.mark.parametrize(("body", "field"), [
    (b"", "body"), (b"\xff\xfe", "body"), (b'{"model": NaN}', "body"),
    (b'{"a": 1, "a": 2}', "body"), (b"[" * 100_000, "body"), (b'{"id": "\\ud800"}', "id"),
    (b"null", "job"), (b"[]", "job"), (b'{"modell": "x"}', "modell"),
])  # fmt: skip
def test_broken_bodies_are_422(shared: TestClient, body: bytes, field: str) -> None:
    answer = shared.post("/plan", content=body, headers={"content-type": "application/json"})
    assert is_problem(answer, 422)["field"] == field


def test_files_of_the_server_are_not_read(shared: TestClient, job: dict[str, Any]) -> None:
    for part in (
        {"model": "/etc/passwd"},
        {"model": "config.json"},
        {"cluster": "/etc/x.yaml"},
        {"cluster": "x.yaml"},
        {"cluster": {"gpu": "/x.yaml", "num_gpus": 8}},
    ):
        body = is_problem(shared.post("/plan", json={**job, **part}), 422)
        assert "no such file" not in json.dumps(body).lower()


def test_every_other_error_is_a_problem_too(shared: TestClient) -> None:
    for path in ("/nowhere", "/plans/nope", "/plans/%00", "/estimates/nope", "/catalog/nope"):
        is_problem(shared.get(path), 404)
    for query in ("cursor=nonsense", "limit=0", "limit=x"):
        is_problem(shared.get(f"/plans?{query}"), 422)
    assert "did you mean" in is_problem(shared.get("/catalog/gpus/h1000"), 404)["remedy"]
    answer = shared.delete("/plan")
    is_problem(answer, 405)
    assert answer.headers["allow"] == "POST"
    form = {"content-type": "application/x-www-form-urlencoded"}
    is_problem(shared.post("/plan", content="model=x", headers=form), 415)


def test_a_bug_shows_no_traceback_and_does_not_burn_the_key(
    shared: TestClient, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    headers = {"idempotency-key": "k"}
    with monkeypatch.context() as patch:
        patch.setattr("planner.api.http.routes.plans.ask_on_paper", broken)
        failed = is_problem(shared.post("/plan", json=job, headers=headers), 500)
    assert "secret" not in json.dumps(failed)
    assert shared.post("/plan", json=job, headers=headers).status_code == 200


@EACH_DATABASE
def test_idempotency(app: TestClient, job: dict[str, Any]) -> None:
    job |= {"search": {"top_k": 1}}

    def post(key: str, path: str = "/plan", **more: Any) -> httpx.Response:
        return app.post(path, json={**job, **more}, headers={"idempotency-key": key})

    first, again = post("k1"), post("k1")
    assert (again.status_code, again.json()) == (200, first.json())
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotent-replayed"] == "true"
    assert post("k2").json()["id"] != first.json()["id"]
    assert len(app.get("/plans").json()["items"]) == 2
    assert "another request" in is_problem(post("k1", id=1), 409)["message"]
    # no layout: 422, kept as well
    wrong = [post("k1", "/estimate") for _ in range(2)]
    assert is_problem(wrong[0], 422) == is_problem(wrong[1], 422)
    is_problem(post("x" * 300), 422)


@EACH_DATABASE
def test_a_crash_before_the_answer_was_kept_leaves_nothing_and_the_retry_does_it_once(
    app: TestClient, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, asked = {"idempotency-key": "crash"}, {**job, "search": {"top_k": 1}}

    def crash(*_: object) -> None:
        raise RuntimeError("the process ends here")

    with monkeypatch.context() as patch:
        patch.setattr("planner.api.storage.idempotency.IdempotencyStore.keep", crash)
        is_problem(app.post("/plan", json=asked, headers=headers), 500)
    assert app.get("/plans").json()["items"] == []
    first = app.post("/plan", json=asked, headers=headers)
    assert first.status_code == 200
    assert app.post("/plan", json=asked, headers=headers).json() == first.json()
    assert len(app.get("/plans").json()["items"]) == 1


@EACH_DATABASE
def test_idempotency_of_requests_at_the_same_time(app: TestClient, job: dict[str, Any]) -> None:
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(app.post("/plan", json=job, headers={"idempotency-key": "race"}))

    side_by_side(post, *[()] * 4)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(app.get("/plans").json()["items"]) == 1


def test_keys_and_scopes(sqlite_url: str, job: dict[str, Any]) -> None:
    with in_process(sqlite_url, api_keys=KEYS) as app:

        def ask(method: str, path: str, secret: str | None, **more: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            return app.request(method, path, headers=headers, **more)

        for secret in (None, "wrong"):
            for path in ("/plans", "/metrics", "/calibrations"):
                answer = ask("GET", path, secret)
                is_problem(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
        for header in (b"Basic reader", b"Bearer", b"Bearer  ", b"Bearer \xfc\xff", b"reader"):
            is_problem(app.get("/plans", headers={"authorization": header}), 401)
        for body in ({"content": b"{"}, {"content": b"x" * 10_000_000}, {"json": []}):
            is_problem(ask("POST", "/plan", None, **body), 401)  # before its body is read
        for path, secret in (("/plan", "reader"), ("/probes", "planner"), ("/probes", "reader")):
            is_problem(ask("POST", path, secret, json=job), 403)
        for secret in ("planner", "boss"):
            assert ask("POST", "/plan", secret, json=job).status_code == 200
            assert ask("GET", "/plans", secret).status_code == 200
        for path in ("/catalog/gpus", "/metrics", "/calibrations"):
            assert ask("GET", path, "reader").status_code == 200
        for path in ("/healthz", "/readyz"):
            assert app.get(path).status_code == 200


def test_readiness_follows_the_database(postgres_url: str, job: dict[str, Any]) -> None:
    with in_process(postgres_url) as app:
        assert app.get("/healthz").status_code == 200
        assert "db upgrade" in is_problem(app.get("/readyz"), 503)["detail"]
        assert is_problem(app.post("/plan", json=job), 503)["type"] == "not_ready"
        upgrade(engine_of(postgres_url))
        ready = app.get("/readyz").json()
        assert (ready["status"], ready["database_revision"]) == ("ready", HEAD)
        parts = dict.fromkeys(("database", "disk", "planning", "workers"), True)
        assert {part["name"]: part["ready"] for part in ready["parts"]} == parts
        assert app.post("/plan", json=job).status_code == 200


def test_the_real_server(sqlite_url: str, tmp_path: Path, job: dict[str, Any]) -> None:
    with served(sqlite_url, tmp_path, task_workers=0, probe_workers=0) as service:
        _takes_what_fits(service.url, job)
        _ends_with_an_open_event_stream(service)


def _takes_what_fits(server: str, job: dict[str, Any]) -> None:
    def post(path: str, content: Any) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return httpx.post(f"{server}{path}", content=content, headers=headers, timeout=300)

    big = b'{"notes": "' + b"x" * 10_000_000 + b'"}'
    assert is_problem(post("/plan", big), 413)["type"] == "body_too_large"
    # no content-length
    pieces = (big[start : start + 100_000] for start in range(0, len(big), 100_000))
    is_problem(post("/estimate", pieces), 413)
    assert post("/plan", json.dumps(job)).status_code == 200


def _ends_with_an_open_event_stream(service: Served) -> None:
    probe = {"max_probes": 1, "max_gpu_seconds": 60}
    study = {**job_values("llama3.2-1b", "cpu", 1, 32, 1), "probe": probe}
    asked = httpx.post(f"{service.url}/plan", json=study, timeout=120)
    assert asked.status_code == 202, asked.text
    url = f"{service.url}{asked.headers['location']}/events"
    with httpx.stream("GET", url, timeout=120) as stream:
        assert stream.status_code == 200
        started = time.monotonic()
        service.process.terminate()
        assert stream.read() == b"", "it ends, and the client comes back later"
        service.process.wait(timeout=300)
    assert time.monotonic() - started < 120, "10 s of its own, on however busy a machine"
