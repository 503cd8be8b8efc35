"""Probes and measurements over HTTP: queued, run by the service's own workers with the stand-in,
found again; scopes, filters, CSV.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from planner.api.http.app import create_app
from planner.probes import guardian
from tests.conftest import EACH_DATABASE, api_keys, needed
from tests.e2e.probe_jobs import until, working
from tests.e2e.test_closed_loop import settings_of
from tests.served import wiring_of
from tests.stand_ins import worker
from tests.stand_ins.runners import JOB

PUBLIC = Path(__file__).parents[2] / "benchmarks" / "measured" / "public.jsonl"
BARE = {key: value for key, value in JOB.items() if key != "notes"}
NO_LAYOUT = {key: value for key, value in BARE.items() if key != "layout"}
Make = Callable[..., TestClient]


@pytest.fixture
def make(sqlite_url: str, surroundings: dict[str, str]) -> Iterator[Make]:
    """Services on one database; with `workers` that run probes."""
    with contextlib.ExitStack() as clients:

        def client(url: str = sqlite_url, workers: int = 1, **settings: Any) -> TestClient:
            chosen = settings_of(url, surroundings, probe_workers=workers, **settings)
            app = TestClient(create_app(chosen), raise_server_exceptions=False)
            return clients.enter_context(app)

        yield client


@pytest.fixture
def idle(make: Make) -> TestClient:
    """A service that runs no probes."""
    return make(workers=0)


def accepted(client: TestClient, body: Any, **headers: str) -> httpx.Response:
    answer = client.post("/probes", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer


def ended(client: TestClient, answer: httpx.Response) -> dict[str, Any]:
    """The probe when it is over."""
    where = answer.headers["location"]
    until(lambda: client.get(where).json()["state"] not in ("queued", "running"))
    body: dict[str, Any] = client.get(where).json()
    return body


def learnt(client: TestClient) -> list[dict[str, Any]]:
    return [item for item in client.get("/calibrations").json()["items"] if item.get("gpu")]


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return body


@EACH_DATABASE
def test_a_probe_is_queued_run_and_found(make: Make, migrated_url: str) -> None:
    needed("torch")
    client = make(migrated_url)
    first, again = (
        accepted(client, {"job": BARE, "steps": 3}, **{"Idempotency-Key": "once"}) for _ in range(2)
    )
    probe_id = first.json()["id"]
    assert first.headers["location"] == f"/probes/{probe_id}"
    assert again.json() == first.json()
    done = ended(client, first)
    assert (done["state"], done["failure"], done["request"]["steps"]) == ("done", None, 3)
    row = client.get(f"/measurements/{done['measurement_id']}").json()
    assert row["measured"]["step_seconds"] == worker.STEP_SECONDS
    assert row["measured"]["rung"] == "probed"
    listed = client.get("/probes", params={"state": "done", "model": "debug-tiny"}).json()
    assert ([item["id"] for item in listed["items"]], listed["next_cursor"]) == ([probe_id], None)
    assert "results" not in listed["items"][0]
    found = client.get("/measurements", params={"model": "debug-tiny", "rung": "probed"}).json()
    assert found["items"] == [row]


@pytest.mark.slow
@pytest.mark.torch
def test_kernels_timed_by_the_real_program_teach_their_gpu(make: Make) -> None:
    needed("torch")
    client = make(probe_program="planner.probes.worker", probe_python=sys.executable)
    kernels = [
        {"kind": "gemm", "dtype": "bf16", "sizes": {"m": 256, "n": 256, "k": 128}},
        {"kind": "memory", "name": "copy", "dtype": "bf16", "sizes": {"bytes": 1 << 20}},
    ]
    done = ended(client, accepted(client, {"job": NO_LAYOUT, "kernels": kernels}))
    assert (done["state"], done["measurement_id"]) == ("done", None), done
    timings = done["results"][0]["outcome"]["timings"]
    assert [(row["kind"], row["status"]) for row in timings] == [("gemm", "ok"), ("memory", "ok")]
    until(lambda: learnt(client))
    (own,) = learnt(client)
    assert (own["gpu"], own["runs"], own["in_use"]) == ("cpu", 0, True)
    assert "torch" in own["software"]


@pytest.mark.slow
def test_a_failure_is_in_the_record(make: Make) -> None:
    needed("torch")
    client = make()
    victims = {"state": "failed", "failure": "crash", "message": "rank 1: KeyError: 'rope'"}
    assert victims.items() <= ended(client, accepted(client, {**JOB, "notes": "victims"})).items()
    no_gpu = {**BARE, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2}}
    failed = ended(client, accepted(client, no_gpu))
    assert (failed["state"], failed["failure"]) == ("failed", "backend")
    assert "--emulate" in failed["message"]


@pytest.mark.slow
def test_the_best_of_a_plan(idle: TestClient) -> None:
    plan = idle.post("/plan", json={**NO_LAYOUT, "search": {"top_k": 3}}).json()["id"]
    how = {"pool": "slurm:gpu", "trainer": "torchtitan"}
    ids = accepted(idle, {"plan": plan, "top_k": 2, **how}).json()["ids"]
    listed = idle.get("/probes", params={"plan": plan}).json()["items"]
    assert sorted(item["id"] for item in listed) == sorted(ids)
    assert [(item["plan_rank"], item["pool"], item["state"]) for item in reversed(listed)] == [
        (1, "slurm:gpu", "queued"),
        (2, "slurm:gpu", "queued"),
    ]
    assert idle.delete(f"/probes/{listed[0]['id']}").json()["state"] == "cancelled"
    problem(idle.post("/probes", json={"plan": "plan-nope"}), 404)
    too_many = idle.post("/probes", json={"plan": plan, "top_k": 9})
    assert problem(too_many, 422)["field"] == "top_k"


def test_how_to_measure_is_said_by_the_job_unless_the_request_says_it(idle: TestClient) -> None:
    how = {"pool": "slurm:gpu", "trainer": "torchtitan", "steps": 4}
    where = accepted(idle, {**BARE, "probe": how}).headers["location"]
    assert how.items() <= idle.get(where).json()["request"].items()


NO_KERNEL = {"kind": "collective", "name": "all-gather", "sizes": {"bytes": 1024}}
WRONG: tuple[tuple[Any, str], ...] = (
    ({"job": NO_LAYOUT, "kernels": [NO_KERNEL]}, "kernels.0"), ([], "body"), ({}, "job"),
    ({"job": {**BARE, "layout": None}}, "layout"),
    ({"job": {**BARE, "layout": {"dp_shard": 3}}}, "layout.dp_shard"),
    ({"job": BARE, "steps": 0}, "steps"), ({"job": BARE, "stepps": 1}, "stepps"),
    ({"job": BARE, "pool": "cloud"}, "pool"), ({"job": BARE, "pool": "replay:/etc/passwd"}, "pool"),
    ({"job": {**BARE, "model": "/etc/passwd"}}, "model"),
)  # fmt: skip


def test_wrong_requests_are_422(idle: TestClient) -> None:
    for body, field in WRONG:
        assert problem(idle.post("/probes", json=body), 422)["field"] == field, body
    assert idle.get("/probes").json()["items"] == []


def test_a_running_probe_is_cancelled(make: Make, tmp_path: Path) -> None:
    needed("torch")
    client = make()
    answer = accepted(client, {**JOB, "notes": "scatter 600"})
    token = working(tmp_path / "probes")
    assert client.delete(answer.headers["location"]).json()["cancel_requested"] is True
    done = ended(client, answer)
    assert (done["state"], done["failure"]) == ("cancelled", "interrupted")
    assert guardian.bearers(token) == set()


@pytest.mark.slow
def test_a_service_that_stops_puts_its_probe_back(make: Make, tmp_path: Path) -> None:
    needed("torch")
    client = make()
    where = accepted(client, {**JOB, "notes": "scatter 600"}).headers["location"]
    token = working(tmp_path / "probes")
    client.__exit__(None, None, None)
    assert guardian.bearers(token) == set()
    left = make(workers=0).get(where).json()
    assert (left["state"], left["attempts"], left["owner"]) == ("queued", 0, None)


def test_who_may(make: Make) -> None:
    keys = {**{name: name for name in ("read", "probe", "plan")}, "both": "plan+probe"}
    client = make(workers=0, task_workers=0, api_keys=api_keys(keys))
    bodies = {"/plan": {**NO_LAYOUT, "probe": {"max_probes": 1}}}

    def statuses(method: str, path: str, *keys: str | None) -> list[int]:
        body = {"json": bodies.get(path, {"job": BARE})} if method == "POST" else {}
        headers = [{"authorization": f"Bearer {key}"} if key else {} for key in keys]
        return [client.request(method, path, headers=one, **body).status_code for one in headers]

    assert statuses("POST", "/probes", None, "read", "plan", "probe") == [401, 403, 403, 202]
    assert statuses("POST", "/plan", None, "probe", "plan", "both") == [401, 403, 403, 202]
    assert len(wiring_of(client).tasks.list().items) == 1
    assert statuses("GET", "/probes", None, "probe", "read") == [401, 403, 200]
    assert statuses("POST", "/measurements", None, "read", "probe") == [401, 403, 422]
    assert statuses("GET", "/measurements", None, "read") == [401, 200]


class TestMeasurements:
    def rows(self, number: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in PUBLIC.read_text().splitlines()[:number]]

    def test_rows_go_in_once_and_come_out_alike(self, idle: TestClient) -> None:
        rows = self.rows(5)
        ids = [row["id"] for row in rows]
        first = idle.post("/measurements", json=rows)
        assert first.status_code == 201
        assert first.json() == {"new": ids, "known": [], "refused": {}}
        again = idle.post("/measurements", json=rows[0]).json()
        assert again == {"new": [], "known": ids[:1], "refused": {}}
        changed = {**rows[0], "measured": {**rows[0]["measured"], "step_seconds": 9.0}}
        problem(idle.post("/measurements", json=changed), 409)
        back = idle.get(f"/measurements/{ids[0]}").json()
        assert rows[0]["measured"].items() <= back["measured"].items()
        for key in ("model", "cluster", "training", "layout", "source"):
            assert back[key] == rows[0][key]
        problem(idle.get("/measurements/nope"), 404)

    def test_what_is_new_teaches_and_what_ships_does_not(self, idle: TestClient) -> None:
        (row,) = self.rows(1)
        idle.post("/measurements", json=row)
        assert learnt(idle) == []
        numbers = dict(row["measured"], step_seconds=1.2 * row["measured"]["step_seconds"])
        numbers.pop("tokens_per_second_per_gpu", None)
        idle.post("/measurements", json={**row, "id": "mine", "measured": numbers})
        found = [(item["gpu"], item["in_use"]) for item in learnt(idle)]
        assert found == [(row["cluster"]["gpu"], True)]

    def test_csv_both_ways_page_by_page(self, idle: TestClient, make: Make, tmp_path: Path) -> None:
        idle.post("/measurements", json=self.rows(7))
        first = idle.get("/measurements", params={"format": "csv", "limit": 4})
        assert first.headers["content-type"].startswith("text/csv")
        rest = {"limit": 4, "cursor": first.headers["x-next-cursor"]}
        second = idle.get("/measurements", params=rest, headers={"accept": "text/csv"})
        assert "x-next-cursor" not in second.headers
        other = make(f"sqlite:///{tmp_path / 'other.db'}", workers=0)
        as_csv = {"content-type": "text/csv"}
        for page in (first, second):
            stored = other.post("/measurements", content=page.text, headers=as_csv)
            assert stored.status_code == 201, stored.text
        ours, theirs = (one.get("/measurements").json()["items"] for one in (idle, other))
        assert theirs == ours

    def test_filters(self, idle: TestClient) -> None:
        def found(**params: str) -> Any:
            return idle.get("/measurements", params=params)

        rows = self.rows(3)
        idle.post("/measurements", json=[rows[0], {**rows[1], "measured": {"status": "oom"}}])
        assert [item["id"] for item in found(status="oom").json()["items"]] == [rows[1]["id"]]
        assert found(gpu="l4").json()["items"] == []
        problem(found(status="fine"), 422)
        problem(found(cursor="nonsense"), 422)

    @pytest.mark.parametrize(("change", "field"), [
        ({"layout": None}, "layout"), ({"measured": None}, "measured"),
        ({"measured": {"step_seconds": -1}}, "measured.step_seconds"),
        ({"measured": {"step_seconds": 1, "created_at": "today"}}, "measured.created_at"),
        ({"measured": {"step_seconds": 1, "software": "torch"}}, "measured.software"),
        ({"model": "/etc/passwd"}, "model"),
    ])  # fmt: skip
    def test_one_wrong_row_stores_none_and_is_named(
        self, idle: TestClient, change: dict[str, Any], field: str
    ) -> None:
        good, wrong = self.rows(2)
        body = problem(idle.post("/measurements", json=[good, {**wrong, **change}]), 422)
        assert body["field"] == f"row 2 {field}"
        assert idle.get("/measurements").json()["items"] == []

    @pytest.mark.parametrize(("content", "kind", "status"), [
        (b"x", "text/plain", 415), (b"a,b\n1\n", "text/csv", 422), (b"\xff", "text/csv", 422),
        (b"[]", "application/json", 422)])  # fmt: skip
    def test_other_bodies_are_refused(
        self, idle: TestClient, content: bytes, kind: str, status: int
    ) -> None:
        answer = idle.post("/measurements", content=content, headers={"content-type": kind})
        problem(answer, status)
