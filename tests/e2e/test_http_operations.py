"""What runs beside the answers: metrics, calibrations, events of a plan, and its cancellation, on
the real app.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner.api.http.app import create_app
from planner.api.http.events import KEEP_ALIVE_POLLS, follow
from planner.api.settings import Settings
from planner.api.storage.job_records import Lease, ProbeRecord
from tests.served import wiring_of


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    with TestClient(
        create_app(Settings(database_url=sqlite_url, probe_workers=0)),
        raise_server_exceptions=False,
    ) as client:
        yield client


def probe_of(plan_id: str, number: int, **changes: Any) -> ProbeRecord:
    values: dict[str, Any] = {
        "id": f"probe-{number}",
        "created_at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        "request": {},
        "job_hash": "0" * 64,
        "model": "m",
        "gpu": "g",
        "num_gpus": 8,
        "layout": "l",
        "pool": "local",
        "plan_id": plan_id,
        "plan_rank": number,
        **changes,
    }
    return ProbeRecord(**values)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = (line for line in block.split("\n") if not line.startswith("id: "))
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


# ---- metrics -------------------------------------------------------------------------------------


def test_metrics_count_requests_by_route_and_never_by_path(
    client: TestClient, job: dict[str, Any]
) -> None:
    plan = client.post("/plan", json={**job, "search": {"top_k": 1}}).json()
    client.get(f"/plans/{plan['id']}")
    client.get("/plans/no-such-plan")
    client.get("/wp-admin.php")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    assert 'planner_http_requests_total{method="POST",path="/plan",status="200"} 1.0' in lines
    assert (
        'planner_http_requests_total{method="GET",path="/plans/{plan_id}",status="200"} 1.0'
        in lines
    )
    assert (
        'planner_http_requests_total{method="GET",path="/plans/{plan_id}",status="404"} 1.0'
        in lines
    )
    assert 'planner_http_requests_total{method="GET",path="unknown",status="404"} 1.0' in lines
    assert plan["id"] not in answer.text
    assert any(line.startswith("planner_http_request_seconds_count") for line in lines)
    assert "planner_http_requests_open 1.0" in lines


def numbers(client: TestClient) -> dict[str, float]:
    lines = (line for line in client.get("/metrics").text.splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_say_what_is_stored_and_worked_on(
    client: TestClient, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.api.http.metrics.FRESH_SECONDS", -1.0)
    before = numbers(client)
    assert (before["planner_database_up"], before["planner_plans"]) == (1, 0)
    assert before['planner_lane_running{lane="planning"}'] == 0
    plan = client.post("/plan", json={**job, "search": {"top_k": 1}}).json()
    wiring = wiring_of(client)
    wiring.probes.add([probe_of(plan["id"], number) for number in range(3)])
    wiring.probes.cancel("probe-1")
    row = {**job, "layout": {"dp_shard": 8}, "measured": {"status": "ok", "step_seconds": 4.0}}
    assert client.post("/measurements", json=[row]).status_code == 201
    after = numbers(client)
    assert after["planner_plans"] == after["planner_measurements"] == 1
    assert after['planner_jobs{kind="probe",state="queued"}'] == 2
    assert after['planner_jobs{kind="probe",state="cancelled"}'] == 1
    assert after["planner_probe_gpu_seconds"] == 0
    assert after['planner_work_seconds_count{lane="planning",outcome="answered"}'] == 1
    (run,) = client.get("/accuracy").json()["runs"]
    assert after["planner_prediction_error_median"] == pytest.approx(abs(run["error"]))


def test_metrics_outlive_the_database(postgres_url: str) -> None:
    settings = Settings(database_url=postgres_url, probe_workers=0, task_workers=0)
    with TestClient(create_app(settings)) as client:  # it was never migrated
        found = numbers(client)
    assert found["planner_database_up"] == 0
    assert "planner_plans" not in found


def test_metrics_and_calibrations_need_a_key_where_there_are_keys(sqlite_url: str) -> None:
    keys = f"reader:read:{hashlib.sha256(b'secret').hexdigest()}"
    with TestClient(
        create_app(Settings(database_url=sqlite_url, api_keys=keys, probe_workers=0))
    ) as client:
        for path in ("/metrics", "/calibrations"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200


# ---- calibrations --------------------------------------------------------------------------------


def test_calibrations_name_what_a_plan_rests_on(client: TestClient, job: dict[str, Any]) -> None:
    plan = client.post("/plan", json={**job, "search": {"top_k": 1}}).json()
    items = client.get("/calibrations").json()["items"]
    assert [item["id"] for item in items if item["in_use"]] == [plan["calibration_id"]]
    used, prior = items
    assert used["runs"] > 0
    assert (prior["id"], prior["runs"]) == ("prior", 0)
    assert all(knob["value"] == pytest.approx(knob["prior"]) for knob in prior["knobs"])
    titan = {knob["name"]: knob for knob in used["knobs"] if knob["of"] == "torchtitan"}
    assert titan["compute"]["value"] != titan["compute"]["prior"]
    shared = {knob["name"]: knob for knob in used["knobs"] if knob["of"] is None}
    assert 0 < titan["compute"]["shift_sd"] < shared["compute"]["shift_sd"]


# ---- a plan's events and its end -----------------------------------------------------------------


def test_a_plan_without_probes_is_done_at_once(client: TestClient, job: dict[str, Any]) -> None:
    plan = client.post("/plan", json={**job, "search": {"top_k": 1}}).json()
    answer = client.get(f"/plans/{plan['id']}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events(answer.text) == [("done", {"id": plan["id"], "status": "done", "probes": 0})]
    assert client.delete(f"/plans/{plan['id']}").json() == {
        "id": plan["id"],
        "status": "done",
        "cancelled_probes": [],
        "message": "nothing was running for it: nothing was cancelled, and what is stored stays",
    }
    assert client.get(f"/plans/{plan['id']}").status_code == 200
    assert (
        client.get("/plans/no-such/events").status_code
        == client.delete("/plans/no-such").status_code
        == 404
    )


def test_cancelling_a_plan_ends_its_probes(client: TestClient, job: dict[str, Any]) -> None:
    plan = client.post("/plan", json={**job, "search": {"top_k": 1}}).json()
    store = wiring_of(client).probes
    store.add([probe_of(plan["id"], 1), probe_of(plan["id"], 2), probe_of("plan-other", 3)])
    store.claim(Lease(owner="us", seconds=600.0), job_id="probe-2")
    ended = client.delete(f"/plans/{plan['id']}").json()
    assert sorted(ended["cancelled_probes"]) == ["probe-1", "probe-2"]
    assert (
        store.get("probe-1").state,
        store.get("probe-2").cancel_requested,
        store.get("probe-3").state,
    ) == ("cancelled", True, "queued")


def test_events_tell_every_change_once_and_then_the_end() -> None:
    steps = [
        [probe_of("p", 1), probe_of("p", 2)],
        [probe_of("p", 1, state="running", progress="step 1"), probe_of("p", 2)],
        [probe_of("p", 1, state="running", progress="step 1"), probe_of("p", 2)],
        [probe_of("p", 1, state="done"), probe_of("p", 2, state="failed", failure="oom")],
    ]
    waited: list[float] = []

    async def read() -> list[ProbeRecord]:
        return steps[len(waited)]

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    async def all_of() -> str:
        return "".join([part async for part in follow("p", "done", read, wait)])

    told = events(asyncio.run(all_of()))
    assert [(name, data.get("id"), data.get("state")) for name, data in told] == [
        ("probe", "probe-1", "queued"),
        ("probe", "probe-2", "queued"),
        ("probe", "probe-1", "running"),
        ("probe", "probe-1", "done"),
        ("probe", "probe-2", "failed"),
        ("done", "p", None),
    ]
    assert len(waited) == 3


def test_a_silent_stream_is_kept_alive() -> None:
    rounds = 0

    async def read() -> list[ProbeRecord]:
        return [probe_of("p", 1, state="running" if rounds <= KEEP_ALIVE_POLLS else "done")]

    async def wait(seconds: float) -> None:
        nonlocal rounds
        rounds += 1

    async def all_of() -> list[str]:
        return [part async for part in follow("p", "done", read, wait)]

    assert ": still here\n\n" in asyncio.run(all_of())
