"""Probes and measurements over HTTP: queued, run by the service's own workers with the stand-in,
found again; scopes, filters, CSV.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from planner.api.http.app import create_app
from planner.api.settings import Settings
from planner.probes import guardian
from tests.conftest import EACH_DATABASE, api_keys, needed
from tests.stand_ins import light_python, worker
from tests.stand_ins.runners import JOB

PUBLIC = Path(__file__).parents[2] / "benchmarks" / "measured" / "public.jsonl"
PATIENCE_SECONDS = 300.0
BARE = {key: value for key, value in JOB.items() if key != "notes"}
Make = Callable[..., TestClient]


@pytest.fixture
def make(tmp_path: Path, sqlite_url: str) -> Iterator[Make]:
    """Services on one database; with `workers` that run probes."""
    clients: list[TestClient] = []

    def client(url: str = sqlite_url, workers: int = 1, **settings: Any) -> TestClient:
        folders = {"probe_folder": tmp_path / "probes", "lease_folder": tmp_path / "leases"}
        light = {
            "probe_program": worker.__file__,
            "probe_python": str(light_python.install(tmp_path)),
        }
        chosen = {**light, **folders, **settings}
        app = create_app(Settings(database_url=url, probe_workers=workers, **chosen))
        made = TestClient(app, raise_server_exceptions=False)
        made.__enter__()
        clients.append(made)
        return made

    yield client
    for made in clients:
        made.__exit__(None, None, None)


def ended(client: TestClient, location: str) -> dict[str, Any]:
    """The probe when it is over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        body: dict[str, Any] = client.get(location).json()
        if body["state"] not in ("queued", "running"):
            return body
        time.sleep(0.2)
    raise AssertionError(body)


def learnt_on(client: TestClient, gpu: str) -> list[dict[str, Any]]:
    return [item for item in client.get("/calibrations").json()["items"] if item.get("gpu") == gpu]


def running(client: TestClient, location: str, tmp_path: Path) -> str:
    """Waits until the ranks of a probe are at work; its token."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for log in (tmp_path / "probes").glob("*/output.log"):
            if (
                log.read_text(errors="replace").count("step 1 of 9") == 2
                and not (log.parent / "end.json").exists()
            ):
                return str(json.loads((log.parent / "begin.json").read_text())["token"])
        time.sleep(0.1)
    raise AssertionError(client.get(location).json())


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return body


@EACH_DATABASE
def test_a_probe_is_queued_run_and_found(make: Make, migrated_url: str) -> None:
    needed("torch")
    client = make(migrated_url)
    answer = client.post(
        "/probes", json={"job": BARE, "steps": 3}, headers={"Idempotency-Key": "once"}
    )
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/probes/{answer.json()['id']}"
    assert (
        client.post(
            "/probes", json={"job": BARE, "steps": 3}, headers={"Idempotency-Key": "once"}
        ).json()
        == answer.json()
    )
    done = ended(client, answer.headers["location"])
    assert (done["state"], done["failure"], done["request"]["steps"]) == ("done", None, 3)
    row = client.get(f"/measurements/{done['measurement_id']}").json()
    assert (row["measured"]["step_seconds"], row["measured"]["rung"]) == (
        worker.STEP_SECONDS,
        "probed",
    )
    listed = client.get("/probes", params={"state": "done", "model": "debug-tiny"}).json()
    assert ([item["id"] for item in listed["items"]], listed["next_cursor"]) == (
        [answer.json()["id"]],
        None,
    )
    assert "results" not in listed["items"][0]
    assert client.get("/measurements", params={"model": "debug-tiny", "rung": "probed"}).json()[
        "items"
    ] == [row]


def test_what_is_no_kernel_is_refused_at_once(make: Make) -> None:
    bare = {key: value for key, value in BARE.items() if key != "layout"}
    kernel = {"kind": "collective", "name": "all-gather", "sizes": {"bytes": 1024}}
    fault = problem(make(workers=0).post("/probes", json={"job": bare, "kernels": [kernel]}), 422)
    assert fault["field"] == "kernels.0"
    assert "bytes, ranks, stride" in fault["message"]


@pytest.mark.slow
@pytest.mark.torch
def test_kernels_timed_by_the_real_program_teach_their_gpu(make: Make) -> None:
    needed("torch")
    client = make(probe_program="planner.probes.worker", probe_python=sys.executable)
    kernels = [
        {"kind": "gemm", "dtype": "bf16", "sizes": {"m": 256, "n": 256, "k": 128}},
        {"kind": "memory", "name": "copy", "dtype": "bf16", "sizes": {"bytes": 1 << 20}},
    ]
    bare = {key: value for key, value in BARE.items() if key != "layout"}
    answer = client.post("/probes", json={"job": bare, "kernels": kernels})
    assert answer.status_code == 202, answer.text
    done = ended(client, answer.headers["location"])
    assert (done["state"], done["measurement_id"]) == ("done", None), done
    timings = done["results"][0]["outcome"]["timings"]
    assert [(row["kind"], row["status"]) for row in timings] == [("gemm", "ok"), ("memory", "ok")]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not learnt_on(client, "cpu") and time.monotonic() < deadline:
        time.sleep(0.1)
    (learnt,) = learnt_on(client, "cpu")
    assert (learnt["runs"], learnt["in_use"], "torch" in learnt["software"]) == (0, True, True)


@pytest.mark.slow
def test_a_failure_is_in_the_record(make: Make) -> None:
    needed("torch")
    client = make()
    failed = ended(
        client, client.post("/probes", json={**JOB, "notes": "victims"}).headers["location"]
    )
    assert (failed["state"], failed["failure"], failed["message"]) == (
        "failed",
        "crash",
        "rank 1: KeyError: 'rope'",
    )
    no_gpu = {**BARE, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2}}
    failed = ended(client, client.post("/probes", json=no_gpu).headers["location"])
    assert (failed["state"], failed["failure"], "--emulate" in failed["message"]) == (
        "failed",
        "backend",
        True,
    )


@pytest.mark.slow
def test_the_best_of_a_plan(make: Make) -> None:
    client = make(workers=0)
    plan = client.post(
        "/plan",
        json={
            **{key: BARE[key] for key in ("model", "cluster", "training")},
            "search": {"top_k": 3},
        },
    ).json()
    answer = client.post(
        "/probes",
        json={"plan": plan["id"], "top_k": 2, "pool": "slurm:gpu", "trainer": "torchtitan"},
    )
    assert answer.status_code == 202, answer.text
    listed = client.get("/probes", params={"plan": plan["id"]}).json()["items"]
    assert sorted(item["id"] for item in listed) == sorted(answer.json()["ids"])
    assert [(item["plan_rank"], item["pool"], item["state"]) for item in reversed(listed)] == [
        (1, "slurm:gpu", "queued"),
        (2, "slurm:gpu", "queued"),
    ]
    assert client.delete(f"/probes/{listed[0]['id']}").json()["state"] == "cancelled"
    problem(client.post("/probes", json={"plan": "plan-nope"}), 404)
    assert (
        problem(client.post("/probes", json={"plan": plan["id"], "top_k": 9}), 422)["field"]
        == "top_k"
    )


def test_how_to_measure_is_said_by_the_job_unless_the_request_says_it(make: Make) -> None:
    client = make(workers=0)
    bare = client.post(
        "/probes",
        json={**BARE, "probe": {"pool": "slurm:gpu", "trainer": "torchtitan", "steps": 4}},
    )
    assert bare.status_code == 202, bare.text
    asked = client.get(bare.headers["location"]).json()["request"]
    assert (asked["pool"], asked["trainer"], asked["steps"]) == ("slurm:gpu", "torchtitan", 4)


WRONG: tuple[tuple[Any, str], ...] = (
    ([], "body"),
    ({}, "job"),
    ({"job": {**BARE, "layout": None}}, "layout"),
    ({"job": {**BARE, "layout": {"dp_shard": 3}}}, "layout.dp_shard"),
    ({"job": BARE, "steps": 0}, "steps"),
    ({"job": BARE, "stepps": 1}, "stepps"),
    ({"job": BARE, "pool": "cloud"}, "pool"),
    ({"job": BARE, "pool": "replay:/etc/passwd"}, "pool"),
    ({"job": {**BARE, "model": "/etc/passwd"}}, "model"),
)


def test_wrong_requests_are_422(make: Make) -> None:
    client = make(workers=0)
    for body, field in WRONG:
        assert problem(client.post("/probes", json=body), 422)["field"] == field, body
    assert client.get("/probes").json()["items"] == []


def test_a_running_probe_is_cancelled(make: Make, tmp_path: Path) -> None:
    needed("torch")
    client = make()
    location = client.post("/probes", json={**JOB, "notes": "scatter 600"}).headers["location"]
    token = running(client, location, tmp_path)
    assert client.delete(location).json()["cancel_requested"] is True
    done = ended(client, location)
    assert (done["state"], done["failure"]) == ("cancelled", "interrupted")
    assert guardian.bearers(token) == set()


@pytest.mark.slow
def test_a_service_that_stops_puts_its_probe_back(make: Make, tmp_path: Path) -> None:
    needed("torch")
    client = make()
    location = client.post("/probes", json={**JOB, "notes": "scatter 600"}).headers["location"]
    token = running(client, location, tmp_path)
    client.__exit__(None, None, None)
    assert guardian.bearers(token) == set()
    left = make(workers=0).get(location).json()
    assert (left["state"], left["attempts"], left["owner"]) == ("queued", 0, None)


def test_who_may(make: Make) -> None:
    keys = api_keys({name: name for name in ("read", "probe", "plan")})
    client = make(workers=0, api_keys=keys)

    def status(method: str, path: str, key: str | None) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return client.request(
            method, path, headers=headers, **({"json": {"job": BARE}} if method == "POST" else {})
        ).status_code

    assert [status("POST", "/probes", key) for key in (None, "read", "plan", "probe")] == [
        401,
        403,
        403,
        202,
    ]
    assert [status("GET", "/probes", key) for key in (None, "probe", "read")] == [401, 403, 200]
    assert [status("POST", "/measurements", key) for key in (None, "read", "probe")] == [
        401,
        403,
        422,
    ]
    assert [status("GET", "/measurements", key) for key in (None, "read")] == [401, 200]


class TestMeasurements:
    def rows(self, number: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in PUBLIC.read_text().splitlines()[:number]]

    def test_rows_go_in_once_and_come_out_alike(self, make: Make) -> None:
        client = make(workers=0)
        rows = self.rows(5)
        first = client.post("/measurements", json=rows)
        assert (first.status_code, first.json()) == (
            201,
            {"new": [row["id"] for row in rows], "known": [], "refused": {}},
        )
        assert client.post("/measurements", json=rows[0]).json() == {
            "new": [],
            "known": [rows[0]["id"]],
            "refused": {},
        }
        changed = {**rows[0], "measured": {**rows[0]["measured"], "step_seconds": 9.0}}
        problem(client.post("/measurements", json=changed), 409)
        back = client.get(f"/measurements/{rows[0]['id']}").json()
        assert {key: back["measured"][key] for key in rows[0]["measured"]} == rows[0]["measured"]
        assert {key: back[key] for key in ("model", "cluster", "training", "layout", "source")} == {
            key: rows[0][key] for key in ("model", "cluster", "training", "layout", "source")
        }
        problem(client.get("/measurements/nope"), 404)

    def test_what_is_new_teaches_and_what_ships_does_not(self, make: Make) -> None:
        client = make(workers=0)
        (row,) = self.rows(1)
        client.post("/measurements", json=row)
        assert [
            item["id"] for item in client.get("/calibrations").json()["items"] if item.get("gpu")
        ] == []
        numbers = dict(row["measured"], step_seconds=1.2 * row["measured"]["step_seconds"])
        numbers.pop("tokens_per_second_per_gpu", None)
        slower = {**row, "id": "mine", "measured": numbers}
        client.post("/measurements", json=slower)
        learnt = [item for item in client.get("/calibrations").json()["items"] if item.get("gpu")]
        assert [(item["gpu"], item["in_use"]) for item in learnt] == [(row["cluster"]["gpu"], True)]

    def test_csv_both_ways_page_by_page(self, make: Make, tmp_path: Path) -> None:
        client = make(workers=0)
        client.post("/measurements", json=self.rows(7))
        first = client.get("/measurements", params={"format": "csv", "limit": 4})
        assert first.headers["content-type"].startswith("text/csv")
        cursor = first.headers["x-next-cursor"]
        second = client.get(
            "/measurements", params={"limit": 4, "cursor": cursor}, headers={"accept": "text/csv"}
        )
        assert "x-next-cursor" not in second.headers
        other = make(f"sqlite:///{tmp_path / 'other.db'}", workers=0)
        for page in (first, second):
            stored = other.post(
                "/measurements", content=page.text, headers={"content-type": "text/csv"}
            )
            assert stored.status_code == 201, stored.text
        assert (
            other.get("/measurements").json()["items"]
            == client.get("/measurements").json()["items"]
        )

    def test_filters(self, make: Make) -> None:
        client = make(workers=0)
        rows = self.rows(3)
        client.post("/measurements", json=[rows[0], {**rows[1], "measured": {"status": "oom"}}])
        assert [
            item["id"]
            for item in client.get("/measurements", params={"status": "oom"}).json()["items"]
        ] == [rows[1]["id"]]
        assert client.get("/measurements", params={"gpu": "l4"}).json()["items"] == []
        problem(client.get("/measurements", params={"status": "fine"}), 422)
        problem(client.get("/measurements", params={"cursor": "nonsense"}), 422)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"layout": None}, "row 2 layout"),
            ({"measured": None}, "row 2 measured"),
            ({"measured": {"step_seconds": -1}}, "row 2 measured.step_seconds"),
            (
                {"measured": {"step_seconds": 1, "created_at": "yesterday"}},
                "row 2 measured.created_at",
            ),
            ({"measured": {"step_seconds": 1, "software": "torch"}}, "row 2 measured.software"),
            ({"model": "/etc/passwd"}, "row 2 model"),
        ],
    )
    def test_one_wrong_row_stores_none_and_is_named(
        self, make: Make, change: dict[str, Any], field: str
    ) -> None:
        client = make(workers=0)
        rows = self.rows(2)
        body = problem(client.post("/measurements", json=[rows[0], {**rows[1], **change}]), 422)
        assert body["field"] == field
        assert client.get("/measurements").json()["items"] == []

    def test_other_bodies_are_refused(self, make: Make) -> None:
        client = make(workers=0)
        problem(
            client.post("/measurements", content="x", headers={"content-type": "text/plain"}), 415
        )
        problem(
            client.post("/measurements", content=b"a,b\n1\n", headers={"content-type": "text/csv"}),
            422,
        )
        problem(
            client.post("/measurements", content=b"\xff", headers={"content-type": "text/csv"}), 422
        )
        problem(client.post("/measurements", json=[]), 422)
