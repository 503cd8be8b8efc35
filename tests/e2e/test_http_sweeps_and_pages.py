"""Sweeps asked for twice, lists read page by page, and pools that would read files of the server,
on the real app.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from planner.api.http.app import create_app
from planner.api.jobs.leases import new_lease
from planner.api.settings import Settings
from planner.api.storage.job_records import TaskEnd, TaskRecord
from planner.api.storage.records import CalibrationRecord
from planner.cost.machine.shipped import shipped_calibration, to_document
from tests.conftest import ROOT
from tests.served import wiring_of

SWEEP: dict[str, Any] = {
    "name": "nightly", "schedule": "0 2 * * *",
    "jobs": [{"model": "debug-tiny", "cluster": {"gpu": "cpu", "num_gpus": 2},
            "training": {"seq_len": 64, "global_batch_size": 8}}],
}  # fmt: skip


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    settings = Settings(database_url=sqlite_url, probe_workers=0, task_workers=0)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def pages(client: TestClient, path: str, limit: int) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    cursor = None
    while True:
        page = client.get(
            path, params={"limit": limit, **({"cursor": cursor} if cursor else {})}
        ).json()
        found.append(page["items"])
        cursor = page["next_cursor"]
        if cursor is None:
            return found


# ---- sweeps --------------------------------------------------------------------------------------


def test_a_run_that_is_asked_for_twice_with_one_key_runs_once(client: TestClient) -> None:
    where = client.post("/sweeps", json=SWEEP).headers["location"]
    first, again = (client.post(f"{where}/run", headers={"idempotency-key": "k"}) for _ in range(2))
    assert (first.status_code, again.status_code, again.json()) == (202, 202, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert len(client.get(where).json()["runs"]) == 1


def test_a_repeated_pause_does_not_undo_what_came_after_it(client: TestClient) -> None:
    where = client.post("/sweeps", json=SWEEP).headers["location"]
    assert (
        client.post(f"{where}/pause", headers={"idempotency-key": "p"}).json()["state"] == "paused"
    )
    assert (
        client.post(f"{where}/resume", headers={"idempotency-key": "r"}).json()["state"] == "active"
    )
    client.post(f"{where}/pause", headers={"idempotency-key": "p"})
    assert client.get(where).json()["state"] == "active"


def test_a_cancelled_sweep_runs_no_more(client: TestClient) -> None:
    where = client.post("/sweeps", json=SWEEP).headers["location"]
    client.delete(where)
    refused = client.post(f"{where}/run")
    assert (refused.status_code, refused.json()["type"]) == (409, "conflict")
    assert client.get(where).json()["runs"] == []


def test_the_newest_run_is_followed_to_its_end(client: TestClient) -> None:
    where = client.post("/sweeps", json=SWEEP).headers["location"]
    assert events(client, where) == [("done", {"id": where.split("/")[-1], "status": None})]
    run = client.post(f"{where}/run").json()["id"]
    wiring = wiring_of(client)
    held = wiring.tasks.claim(new_lease())
    assert held is not None
    standing = {
        "layouts": 1, "num_layouts": 3, "jobs": 1, "num_jobs": 1, "running": 2, "failures": 0,
        "probes": 3, "max_probes": 20, "gpu_seconds": 60.0, "max_gpu_seconds": 3600.0,
        "quarantined": ["node07"],
    }  # fmt: skip
    wiring.tasks.stand(held, standing)
    assert client.get(where).json()["runs"][0]["standing"] == standing
    wiring.tasks.finish(held, TaskEnd(state="done", message="1 of 3 layouts measured"))
    change, done = events(client, where)
    assert change[0] == "sweep"
    assert (change[1]["run"], change[1]["state"], change[1]["standing"]) == (run, "done", standing)
    assert done == ("done", {"id": where.split("/")[-1], "status": "done"})
    assert client.get("/sweeps/sweep-nope/events").status_code == 404


def events(client: TestClient, where: str) -> list[tuple[str, dict[str, Any]]]:
    """What a sweep's stream says, until it ends."""
    blocks = client.get(f"{where}/events").text.split("\n\n")
    fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks if block]
    return [(one["event"], json.loads(one["data"])) for one in fields]


def test_a_host_that_is_kept_out_is_listed_and_let_in(client: TestClient) -> None:
    quarantine = wiring_of(client).quarantine
    evidence = ["3 of 3 probes failed on it, 0 of 70 elsewhere"]
    for pool, host in (("slurm", "n1"), ("slurm:b", "n1"), ("slurm", "n2")):
        quarantine.add(pool, host, seconds=60.0, found_by="sweep-run-1", evidence=evidence)
    quarantine.add("slurm", "n3", seconds=-1.0, found_by="sweep-run-1", evidence=evidence)
    listed = client.get("/quarantine", params={"pool": "slurm"}).json()
    assert [(one["host"], one["evidence"]) for one in listed] == [
        ("n1", evidence),
        ("n2", evidence),
    ]
    assert client.delete("/quarantine/n1").json() == {"host": "n1", "pools": 2}
    assert [one["host"] for one in client.get("/quarantine").json()] == ["n2"]
    assert client.delete("/quarantine/n1").status_code == 404


# ---- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "cluster", "shown"),
    [
        ("gone", {"gpu": "h100-sxm-80gb", "num_gpus": [8, 16]}, ("gone", "h100-sxm-80gb", 16)),
        (
            {"name": "mine", "layers": "gone"},
            {"gpu": {"name": "ours"}, "num_gpus": 4},
            ("mine", "ours", 4),
        ),
        (["gone"], "a-preset", ("unknown", "a-preset", 0)),
        (None, {"num_gpus": "8"}, ("unknown", "unknown", 0)),
    ],
)
def test_an_open_study_whose_job_no_longer_parses_has_its_line(
    client: TestClient, model: Any, cluster: Any, shown: tuple[Any, ...]
) -> None:
    good = client.post("/plan", json={**SWEEP["jobs"][0], "probe": {"max_probes": 1}}).json()["id"]
    request = {
        "model": model,
        "cluster": cluster,
        "training": {"seq_len": 64, "global_batch_size": 8},
        "probe": {"max_probes": 1},
    }
    wiring = wiring_of(client)
    wiring.tasks.add(
        [
            TaskRecord(
                id="plan-old",
                kind="study",
                created_at=wiring.clock.now(),
                request=request,
                job_hash="0" * 64,
            )
        ]
    )
    answer = client.get("/plans")
    assert answer.status_code == 200, answer.text
    old, young = answer.json()["items"]
    assert (old["id"], old["model"], old["gpu"], old["num_gpus"], old["status"]) == (
        "plan-old",
        *shown,
        "queued",
    )
    assert (young["id"], young["model"]) == (good, "debug-tiny")


# ---- files of the server -------------------------------------------------------------------------


def test_no_pool_reads_a_file_of_the_server(client: TestClient, tmp_path: Path) -> None:
    recording = tmp_path / "secret.jsonl"
    recording.write_text("a line that nobody may learn about\n")
    pool = f"replay:{recording}"
    (job,) = SWEEP["jobs"]
    for path, body, field in (
        ("/plan", {**job, "probe": {"pool": pool}}, "probe.pool"),
        ("/sweeps", {**SWEEP, "pool": pool}, "sweep.pool"),
        ("/probes", {"job": {**job, "layout": {"dp_shard": 2}}, "pool": pool}, "pool"),
    ):
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["field"]) == (422, field), refused.text
        assert "reads a file" in refused.json()["message"]
        assert "replay" not in refused.json()["remedy"]


def test_a_pool_that_is_none_is_named_by_its_place_in_the_body(client: TestClient) -> None:
    (job,) = SWEEP["jobs"]
    for path, body, field in (
        ("/plan", {**job, "probe": {"pool": "cloud"}}, "probe.pool"),
        ("/sweeps", {**SWEEP, "pool": "cloud"}, "sweep.pool"),
    ):
        refused = client.post(path, json=body).json()
        assert (refused["field"], refused["remedy"]) == (
            field,
            "use local, slurm or slurm:PARTITION",
        )


def test_a_fault_of_a_sweep_is_named_by_its_place_in_it(client: TestClient) -> None:
    (job,) = SWEEP["jobs"]
    crossed = {
        "models": ["debug-tiny", "llama"],
        "clusters": [job["cluster"]],
        "trainings": [job["training"]],
    }
    bad = {**job, "training": {"seq_len": "x", "global_batch_size": 8}}
    for changes, field in (
        ({"budget": {"max_gpu_seconds": -1}}, "sweep.budget.max_gpu_seconds"),
        ({"name": "\u001b[31m"}, "sweep.name"),
        ({"jobs": [job, bad]}, "sweep.jobs.1.training.seq_len"),
        ({"jobs": [job, {**job, "modle": 1}]}, "sweep.jobs.1.modle"),
        ({"jobs": [], **crossed}, "sweep.models.1"),
    ):
        refused = client.post("/sweeps", json={**SWEEP, **changes})
        assert (refused.status_code, refused.json()["field"]) == (422, field), refused.text


# ---- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["models", "gpus", "schedules"])
def test_the_catalogue_is_read_page_by_page(client: TestClient, kind: str) -> None:
    whole = client.get(f"/catalog/{kind}").json()
    assert whole["next_cursor"] is None
    found = pages(client, f"/catalog/{kind}", 5)
    assert [item for page in found for item in page] == whole["items"]
    assert {len(page) for page in found[:-1]} == {5}
    assert client.get(f"/catalog/{kind}", params={"cursor": "zz"}).status_code == 422


def test_calibrations_are_read_page_by_page(client: TestClient) -> None:
    shipped = shipped_calibration()
    first = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(4):
        wiring_of(client).calibrations.save(
            CalibrationRecord(
                id=f"{shipped.id}+{number}",
                created_at=first + timedelta(seconds=number),
                superseded_at=None if number == 3 else first + timedelta(seconds=number + 1),
                trainer="fsdp",
                gpu="cpu",
                software={},
                num_runs=number,
                document=to_document(shipped),
            )
        )
    whole = client.get("/calibrations").json()
    assert [(item["runs"], item["in_use"]) for item in whole["items"][2:]] == [
        (3, True),
        (2, False),
        (1, False),
        (0, False),
    ]
    assert whole["next_cursor"] is None
    for limit in (1, 2, 3, 6):
        found = pages(client, "/calibrations", limit)
        assert [item for page in found for item in page] == whole["items"]
        assert {len(page) for page in found[:-1]} <= {limit}
    assert client.get("/calibrations", params={"cursor": "zz"}).status_code == 422


def test_calibrations_without_any_learnt_end_with_the_prior(client: TestClient) -> None:
    assert [len(page) for page in pages(client, "/calibrations", 1)] == [1, 1]


# ---- the web page --------------------------------------------------------------------------------


def test_the_web_page_is_open_and_asks_only_paths_that_exist(sqlite_url: str) -> None:
    keys = f"reader:read:{hashlib.sha256(b'secret').hexdigest()}"
    settings = Settings(
        database_url=sqlite_url, api_keys=SecretStr(keys), probe_workers=0, task_workers=0
    )
    with TestClient(create_app(settings)) as client:
        page = client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert (
            client.get("/docs").headers["content-security-policy"].startswith("default-src 'none'")
        )
        names = [path.name for path in (ROOT / "api" / "web").iterdir()]
        files = {name: client.get(f"/web/{name}") for name in names}
        assert {answer.status_code for answer in files.values()} == {200}
        scripts = "".join(answer.text for answer in files.values())
        assert not re.findall(r"https?://", scripts), "nothing comes from elsewhere"
        assert "innerHTML" not in scripts, "what the service says is text"
        paths = client.get("/openapi.json").json()["paths"]
        asked = {f"/{path}" for path in re.findall(r"""(?:ask|paged)\(\s*["`]([a-z]+)""", scripts)}
        assert asked == {
            "/plan", "/plans", "/catalog", "/jobs", "/probes", "/sweeps", "/accuracy",
            "/calibrations",
        }  # fmt: skip
        assert all(
            any(path == known or known.startswith(f"{path}/") for known in paths) for path in asked
        )
