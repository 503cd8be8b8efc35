"""Sweeps asked for twice, lists read page by page, and pools that would read files of the server,
on the real app.
"""

import re
from datetime import UTC, datetime, timedelta
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner.api.jobs.leases import new_lease
from planner.api.storage.common import encoded
from planner.api.storage.job_records import JobEnd
from planner.api.storage.tables import CalibrationRecord
from planner.cost.machine.shipped import shipped_calibration, to_document
from tests.conftest import ROOT, api_keys, job_values
from tests.served import events_of, in_process, wiring_of
from tests.stand_ins.records import task_record

JOB = job_values("debug-tiny", "cpu", 2, 64, 8)
SWEEP: dict[str, Any] = {"name": "nightly", "schedule": "0 2 * * *", "jobs": [JOB]}
NO_NUMBER = {**JOB["training"], "seq_len": "x"}
FOR_CPUS = {"trainer": "fsdp", "gpu": "cpu"}
CROSSED = {"clusters": [JOB["cluster"]], "trainings": [JOB["training"]]}


def pages(client: TestClient, path: str, limit: int) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    page: dict[str, Any] = {"next_cursor": ""}
    while page["next_cursor"] is not None:
        cursor = {"cursor": page["next_cursor"]} if found else {}
        page = client.get(path, params={"limit": limit, **cursor}).json()
        found.append(page["items"])
    return found


@pytest.fixture
def where(client: TestClient) -> str:
    """The path of a stored sweep."""
    return client.post("/sweeps", json=SWEEP).headers["location"]


def test_a_run_asked_for_twice_with_one_key_runs_once(client: TestClient, where: str) -> None:
    first, again = (client.post(f"{where}/run", headers={"idempotency-key": "k"}) for _ in range(2))
    assert (first.status_code, again.status_code, again.json()) == (202, 202, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert len(client.get(where).json()["runs"]) == 1


def test_a_repeated_pause_does_not_undo_what_came_after_it(client: TestClient, where: str) -> None:
    for command, key, state in (("pause", "p", "paused"), ("resume", "r", "active")):
        told = client.post(f"{where}/{command}", headers={"idempotency-key": key})
        assert told.json()["state"] == state
    client.post(f"{where}/pause", headers={"idempotency-key": "p"})
    assert client.get(where).json()["state"] == "active"


def test_the_newest_run_is_followed_to_its_end(client: TestClient, where: str) -> None:
    sweep, tasks = where.split("/")[-1], wiring_of(client).tasks
    quiet = client.get(f"{where}/events").text
    assert events_of(quiet) == [("done", {"id": sweep, "status": None})]
    run = client.post(f"{where}/run").json()["id"]
    held = tasks.claim(new_lease())
    standing = {
        "layouts": 1, "num_layouts": 3, "jobs": 1, "num_jobs": 1, "running": 2, "failures": 0,
        "probes": 3, "max_probes": 20, "gpu_seconds": 60.0, "max_gpu_seconds": 3600.0,
        "quarantined": ["node07"],
    }  # fmt: skip
    tasks.heartbeat(held, new_lease(), standing=standing)
    assert client.get(where).json()["runs"][0]["standing"] == standing
    tasks.finish(held, JobEnd(state="done", message="1 of 3 layouts measured"))
    (kind, change), done = events_of(client.get(f"{where}/events").text)
    assert kind == "sweep"
    assert change.items() >= {"run": run, "state": "done", "standing": standing}.items()
    assert done == ("done", {"id": sweep, "status": "done"})
    assert client.get("/sweeps/sweep-nope/events").status_code == 404


def test_a_host_that_is_kept_out_is_listed_and_let_in(client: TestClient) -> None:
    evidence = ["3 of 3 probes failed on it, 0 of 70 elsewhere"]
    hosts = (("slurm", "n1", 60.0), ("slurm:b", "n1", 60.0), ("slurm", "n2", 60.0))
    for pool, host, seconds in (*hosts, ("slurm", "n3", -1.0)):
        said = {"found_by": "sweep-run-1", "evidence": evidence}
        wiring_of(client).quarantine.add(pool, host, seconds=seconds, **said)
    listed = client.get("/quarantine", params={"pool": "slurm"}).json()
    assert {one["host"]: one["evidence"] for one in listed} == {"n1": evidence, "n2": evidence}
    assert client.delete("/quarantine/n1").json() == {"host": "n1", "pools": 2}
    assert [one["host"] for one in client.get("/quarantine").json()] == ["n2"]
    assert client.delete("/quarantine/n1").status_code == 404


@pytest.mark.parametrize(("model", "cluster", "shown"), [
    ("gone", {"gpu": "h100-sxm-80gb", "num_gpus": [8, 16]}, ["gone", "h100-sxm-80gb", 16]),
    ({"name": "mine", "layers": 0}, {"gpu": {"name": "us"}, "num_gpus": 4}, ["mine", "us", 4]),
    (["gone"], "a-preset", ["unknown", "a-preset", 0]),
    (None, {"num_gpus": "8"}, ["unknown", "unknown", 0]),
])  # fmt: skip
def test_an_open_study_whose_job_no_longer_parses_has_its_line(
    client: TestClient, model: Any, cluster: Any, shown: list[Any]
) -> None:
    good = client.post("/plan", json={**JOB, "probe": {"max_probes": 1}}).json()["id"]
    request = {**JOB, "model": model, "cluster": cluster, "probe": {"max_probes": 1}}
    at, tasks = wiring_of(client).clock.now(), wiring_of(client).tasks
    tasks.add([task_record(id="plan-old", created_at=at, request=request, job_hash="0" * 64)])
    answer = client.get("/plans")
    assert answer.status_code == 200, answer.text
    old, young = answer.json()["items"]
    assert [old[name] for name in ("model", "gpu", "num_gpus")] == shown
    assert (old["id"], old["status"]) == ("plan-old", "queued")
    assert (young["id"], young["model"]) == (good, "debug-tiny")


def test_no_pool_reads_a_file_of_the_server(client: TestClient, tmp_path: Path) -> None:
    recording = tmp_path / "secret.jsonl"
    recording.write_text("a line that nobody may learn about\n")
    pool = f"replay:{recording}"
    for path, body, field in (
        ("/plan", {**JOB, "probe": {"pool": pool}}, "probe.pool"),
        ("/sweeps", {**SWEEP, "pool": pool}, "sweep.pool"),
        ("/probes", {"job": {**JOB, "layout": {"dp_shard": 2}}, "pool": pool}, "pool"),
    ):
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["field"]) == (422, field), refused.text
        assert "reads a file" in refused.json()["message"]
        assert "replay" not in refused.json()["remedy"]


def test_a_pool_that_is_none_is_named_by_its_place_in_the_body(client: TestClient) -> None:
    bodies = {"/plan": {**JOB, "probe": {"pool": "cloud"}}, "/sweeps": {**SWEEP, "pool": "cloud"}}
    found = [client.post(path, json=body).json() for path, body in bodies.items()]
    assert [one["field"] for one in found] == ["probe.pool", "sweep.pool"]
    assert {one["remedy"] for one in found} == {"use local, slurm or slurm:PARTITION"}


@pytest.mark.parametrize(("changes", "field"), [
    ({"budget": {"max_gpu_seconds": -1}}, "budget.max_gpu_seconds"),
    ({"name": "\u001b[31m"}, "name"),
    ({"jobs": [JOB, {**JOB, "training": NO_NUMBER}]}, "jobs.1.training.seq_len"),
    ({"jobs": [JOB, {**JOB, "modle": 1}]}, "jobs.1.modle"),
    ({"jobs": [], "models": ["debug-tiny", "llama"], **CROSSED}, "models.1"),
])  # fmt: skip
def test_a_fault_of_a_sweep_is_named_by_its_place_in_it(
    client: TestClient, changes: dict[str, Any], field: str
) -> None:
    refused = client.post("/sweeps", json={**SWEEP, **changes})
    assert (refused.status_code, refused.json()["field"]) == (422, f"sweep.{field}"), refused.text


@pytest.mark.parametrize("kind", ["models", "gpus", "clusters", "schedules", "defaults"])
def test_the_catalogue_is_read_page_by_page(client: TestClient, kind: str) -> None:
    whole = client.get(f"/catalog/{kind}").json()
    assert whole["next_cursor"] is None
    found = pages(client, f"/catalog/{kind}", 5)
    assert [*chain(*found)] == whole["items"]
    assert {len(page) for page in found[:-1]} <= {5}
    assert pages(client, f"/catalog/{kind}", len(whole["items"])) == [whole["items"]]
    name = whole["items"][0]["name"]
    assert client.get(f"/catalog/{kind}/{name}").json()["name"] == name
    for cursor in ("zz", encoded("nobody")):
        assert client.get(f"/catalog/{kind}", params={"cursor": cursor}).status_code == 422


def test_calibrations_are_read_page_by_page(client: TestClient) -> None:
    assert [len(page) for page in pages(client, "/calibrations", 1)] == [1, 1], "to the prior"
    shipped = shipped_calibration()
    learnt: dict[str, Any] = {"software": {}, "document": to_document(shipped), **FOR_CPUS}
    first = datetime(2026, 1, 1, tzinfo=UTC)
    moments = [first + timedelta(seconds=number) for number in range(4)]
    for number, (at, until) in enumerate(zip_longest(moments, moments[1:])):
        record = CalibrationRecord(
            id=f"{shipped.id}+{number}",
            created_at=at,
            superseded_at=until,
            num_runs=number,
            **learnt,
        )
        wiring_of(client).calibrations.save(record)
    whole = client.get("/calibrations").json()
    shown = [(item["runs"], item["in_use"]) for item in whole["items"][2:]]
    assert shown == [(3, True), (2, False), (1, False), (0, False)]
    assert whole["next_cursor"] is None
    for limit in (1, 2, 3, 6):
        found = pages(client, "/calibrations", limit)
        assert [*chain(*found)] == whole["items"]
        assert {len(page) for page in found[:-1]} <= {limit}
    assert client.get("/calibrations", params={"cursor": "zz"}).status_code == 422


def test_the_web_page_is_open_and_asks_only_paths_that_exist(sqlite_url: str) -> None:
    with in_process(sqlite_url, api_keys=api_keys({"reader": "read"}), task_workers=0) as client:
        page = client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy
        docs = client.get("/docs").headers["content-security-policy"]
        assert docs.startswith("default-src 'none'")
        files = [client.get(f"/web/{path.name}") for path in (ROOT / "api" / "web").iterdir()]
        assert {answer.status_code for answer in files} == {200}
        scripts = "".join(answer.text for answer in files)
        assert not re.findall(r"https?://", scripts), "nothing comes from elsewhere"
        assert "innerHTML" not in scripts, "what the service says is text"
        paths = client.get("/openapi.json").json()["paths"]
        asked = {f"/{path}" for path in re.findall(r"""(?:ask|paged)\(\s*["`]([a-z]+)""", scripts)}
        assert asked == {
            "/plan", "/plans", "/catalog", "/jobs", "/probes", "/sweeps", "/accuracy",
            "/calibrations",
        }  # fmt: skip
        known = [path for path in asked if any(f"{one}/".startswith(f"{path}/") for one in paths)]
        assert asked == set(known)
