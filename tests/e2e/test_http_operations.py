"""What runs beside the answers: metrics, calibrations, events of a plan, and its cancellation, on
the real app.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner.api.http.events import KEEP_ALIVE_POLLS, Snapshot, follow, of_plan
from planner.api.jobs.leases import new_lease
from planner.api.storage.job_records import OPEN, ProbeRecord
from tests.served import events_of, in_process, wiring_of
from tests.stand_ins.records import probe_record


@pytest.fixture
def plan(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    return client.post("/plan", json={**job, "search": {"top_k": 1}}).json()


def test_metrics_count_requests_by_route_not_path(client: TestClient, plan: dict[str, Any]) -> None:
    for path in (f"/plans/{plan['id']}", "/plans/no-such-plan", "/wp-admin.php"):
        client.get(path)
    client.request("METHOD1", "/wp-admin.php")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    for labels in (
        'method="POST",path="/plan",status="200"',
        'method="GET",path="/plans/{plan_id}",status="200"',
        'method="GET",path="/plans/{plan_id}",status="404"',
        'method="GET",path="unknown",status="404"',
        'method="unknown",path="unknown",status="404"',
    ):
        assert f"planner_http_requests_total{{{labels}}} 1.0" in lines
    assert plan["id"] not in answer.text
    assert any(line.startswith("planner_http_request_seconds_count") for line in lines)
    assert "planner_http_requests_open 1.0" in lines


def numbers(client: TestClient) -> dict[str, float]:
    lines = (line for line in client.get("/metrics").text.splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_say_what_is_stored_and_worked_on(client: TestClient, job: dict[str, Any]) -> None:
    empty = {"planner_database_up": 1, "planner_plans": 0}
    assert numbers(client).items() >= {**empty, 'planner_lane_running{lane="planning"}': 0}.items()
    client.post("/plan", json={**job, "search": {"top_k": 1}})
    probes = wiring_of(client).probes
    probes.add([probe_record(number) for number in range(3)])
    probes.cancel("probe-001")
    row = {**job, "layout": {"dp_shard": 8}, "measured": {"status": "ok", "step_seconds": 4.0}}
    assert client.post("/measurements", json=[row]).status_code == 201
    (run,) = client.get("/accuracy").json()["runs"]
    after = {
        "planner_plans": 1,
        "planner_measurements": 1,
        'planner_jobs{kind="probe",state="queued"}': 2,
        'planner_jobs{kind="probe",state="cancelled"}': 1,
        "planner_probe_gpu_seconds": 0,
        'planner_work_seconds_count{lane="planning",outcome="answered"}': 1,
        "planner_prediction_error_median": pytest.approx(abs(run["error"])),
    }
    found = numbers(client)
    assert {name: found[name] for name in after} == after


def test_metrics_outlive_the_database(postgres_url: str) -> None:
    with in_process(postgres_url, probe_workers=0, task_workers=0) as client:
        found = numbers(client)  # it was never migrated
    assert found["planner_database_up"] == 0
    assert "planner_plans" not in found


def test_calibrations_name_what_a_plan_rests_on(client: TestClient, plan: dict[str, Any]) -> None:
    items = client.get("/calibrations").json()["items"]
    assert [item["id"] for item in items if item["in_use"]] == [plan["calibration_id"]]
    used, prior = items
    assert used["runs"] > 0
    assert (prior["id"], prior["runs"]) == ("prior", 0)
    assert all(knob["value"] == pytest.approx(knob["prior"]) for knob in prior["knobs"])
    titan, shared = (
        {knob["name"]: knob for knob in used["knobs"] if knob["of"] == whose}
        for whose in ("torchtitan", None)
    )
    assert titan["compute"]["value"] != titan["compute"]["prior"]
    assert 0 < titan["compute"]["shift_sd"] < shared["compute"]["shift_sd"]


def test_a_plan_without_probes_is_done_at_once(client: TestClient, plan: dict[str, Any]) -> None:
    name = plan["id"]
    answer = client.get(f"/plans/{name}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events_of(answer.text) == [("done", {"id": name, "status": "done", "probes": 0})]
    message = "nothing was running for it: nothing was cancelled, and what is stored stays"
    done = {"id": name, "status": "done", "cancelled_probes": [], "message": message}
    assert client.delete(f"/plans/{name}").json() == done
    assert client.get(f"/plans/{name}").status_code == 200
    assert client.get("/plans/no-such/events").status_code == 404
    assert client.delete("/plans/no-such").status_code == 404


def test_cancelling_a_plan_ends_its_probes(client: TestClient, plan: dict[str, Any]) -> None:
    store = wiring_of(client).probes
    of = {"probe-1": plan["id"], "probe-2": plan["id"], "probe-3": "plan-other"}
    store.add([probe_record(id=name, plan_id=plan_id) for name, plan_id in of.items()])
    store.claim(new_lease(), job_id="probe-2")
    ended = client.delete(f"/plans/{plan['id']}").json()
    assert sorted(ended["cancelled_probes"]) == ["probe-1", "probe-2"]
    assert [store.get(name).state for name in of] == ["cancelled", "running", "queued"]
    assert store.get("probe-2").cancel_requested


def test_events_tell_every_change_once_and_then_the_end() -> None:
    running = {"state": "running", "progress": "step 1"}
    steps = [
        ({}, {}),
        (running, {}),
        (running, {}),
        ({"state": "done"}, {"state": "failed", "failure": "oom"}),
    ]
    parts, waits = followed(
        lambda waits: [probe_record(n, **fields) for n, fields in enumerate(steps[waits], start=1)]
    )
    told = events_of("".join(parts))
    assert [(name, data.get("id"), data.get("state")) for name, data in told] == [
        ("probe", "probe-001", "queued"),
        ("probe", "probe-002", "queued"),
        ("probe", "probe-001", "running"),
        ("probe", "probe-001", "done"),
        ("probe", "probe-002", "failed"),
        ("done", "p", None),
    ]
    assert waits == 3


def followed(read: Callable[[int], list[ProbeRecord]]) -> tuple[list[str], int]:
    """(What is sent, number of waits). read: the probes after so many of them."""
    waited: list[float] = []

    async def snapshot() -> Snapshot:
        probes = read(len(waited))
        return of_plan("p", probes, None if any(one.state in OPEN for one in probes) else "done")

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    async def all_of() -> list[str]:
        return [part async for part in follow(snapshot, wait)]

    return asyncio.run(all_of()), len(waited)


def test_a_silent_stream_is_kept_alive() -> None:
    parts, _ = followed(
        lambda waits: [probe_record(state="running" if waits <= KEEP_ALIVE_POLLS else "done")]
    )
    assert ": still here\n\n" in parts
