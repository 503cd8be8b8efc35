"""Who may store, delete and share measurements, and what comes of them, on the real app and the
real command line.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner.api.http.app import create_app
from planner.api.settings import Settings
from tests.conftest import Cli, api_keys

KEYS = api_keys({"ann": "read+plan+probe", "bob": "read+plan+probe", "root": "admin"})
JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"seq_len": 8192, "global_batch_size": 16},
    "layout": {"dp_shard": 8, "ac": "full"},
}


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    settings = Settings(database_url=sqlite_url, api_keys=KEYS, probe_workers=0, task_workers=0)
    with TestClient(create_app(settings)) as client:
        yield client


def by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def row(row_id: str, seconds: float, **numbers: Any) -> dict[str, Any]:
    return {**JOB, "id": row_id, "measured": {"rung": "probed", "step_seconds": seconds, **numbers}}


def step(client: TestClient, name: str) -> float:
    answer = client.post("/estimate", json=JOB, headers=by(name))
    seconds: float = answer.json()["step_seconds"]
    return seconds


def test_a_key_teaches_itself_until_an_admin_shares_and_forgets(client: TestClient) -> None:
    before = step(client, "bob")
    assert client.post("/measurements", json=row("a-1", 2 * before), headers=by("ann")).json() == {
        "new": ["a-1"],
        "known": [],
        "refused": {},
    }
    assert step(client, "ann") > 1.5 * before
    assert step(client, "bob") == before
    asked = {key: value for key, value in JOB.items() if key != "layout"}
    asked |= {"search": {"top_k": 1, "fix": {"ac": "full", "compile": False}}}
    plans = {
        name: client.post("/plan", json=asked, headers=by(name)).json() for name in ("ann", "bob")
    }
    assert plans["ann"]["calibration_id"] != plans["bob"]["calibration_id"]
    for name, status in (("ann", 403), ("bob", 403), ("root", 200)):
        assert client.post("/measurements/a-1/share", headers=by(name)).status_code == status
    assert step(client, "bob") > 1.5 * before
    for name, status in (("bob", 403), ("ann", 204), ("ann", 404)):
        assert client.delete("/measurements/a-1", headers=by(name)).status_code == status
    assert step(client, "bob") == before


def test_an_impossible_row_is_stored_with_the_reason_and_moves_nothing(client: TestClient) -> None:
    before = step(client, "root")
    rows = [
        row("fast", 1e-6),
        row("large", 2 * before, peak_reserved_bytes=200e9),
        row("torn", 2 * before, tokens_per_second_per_gpu=1e6),
        {
            **row("claimed", 1e-4),
            "cluster": {
                "gpu": {**custom("h100-sxm-80gb"), "peak_flops": {"bf16": 1e18}},
                "num_gpus": 8,
            },
        },
        row("tomorrow", 2 * before, created_at="2999-01-01T00:00:00+00:00"),
    ]
    stored = client.post("/measurements", json=rows, headers=by("root")).json()
    assert set(stored.get("refused", stored)) == {"fast", "large", "torn", "claimed", "tomorrow"}
    shown = client.get("/measurements/fast", headers=by("bob")).json()["measured"]
    assert shown["asked_by"] == "root"
    assert "faster than" in shown["refused"]
    assert step(client, "root") == before
    again = client.get("/measurements", headers=by("root")).json()["items"]
    assert client.post("/measurements", json=again, headers=by("root")).json()["new"] == []


def custom(name: str) -> dict[str, Any]:
    """A GPU as a user describes one, under a name of the catalogue."""
    return {
        "name": name, "family": "hopper", "memory": "80 GB", "memory_bandwidth": "3 TB/s",
        "power_limit": "700 W", "num_sms": 132,
        "scale_up": {"gpus": 8, "bandwidth": "450 GB/s", "latency": "2 us", "topology": "switch"},
        "scale_out": {"bandwidth": "400 Gb/s", "latency": "4 us", "topology": "switch"},
    }  # fmt: skip


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_refused_at_the_door(client: TestClient, number: str) -> None:
    text = json.dumps(row("n", 1.0)).replace('"step_seconds": 1.0', f'"step_seconds": {number}')
    kind = {"content-type": "application/json"}
    answer = client.post("/measurements", content=text, headers={**by("root"), **kind})
    assert answer.status_code == 422


def test_the_command_line_says_what_is_not_believed_and_forgets(cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(one) for one in (row("fast", 1e-6), row("slow", 20.0))))
    done = cli("measurements", "import", rows)
    assert done.returncode == 0, done.stderr
    assert "fast: not believed, counts for nothing: a step of 1e-06 s is faster" in done.stdout
    assert "learned: " in done.stderr
    listed = cli("measurements", "list")
    assert "not believed: fast" in listed.stderr
    gone = cli("measurements", "delete", "slow")
    assert (gone.returncode, gone.stdout) == (0, "1 measurement deleted\n")
    left = json.loads(cli("measurements", "list", "--json").stdout)["items"]
    assert [(one["id"], one["measured"]["asked_by"][:4]) for one in left] == [("fast", "cli:")]
    assert cli("measurements", "delete", "slow").returncode == 2
    assert cli("measurements", "share").returncode == 2
    assert cli("measurements", "share", "fast").stdout == "0 measurements shared\n"


def test_an_import_counts_for_everyone_with_shared_alone(
    cli: Cli, client: TestClient, tmp_path: Path
) -> None:
    before, rows = step(client, "ann"), tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("mine", 2 * before)))
    assert cli("measurements", "import", rows).returncode == 0
    assert step(client, "ann") == before
    rows.write_text(json.dumps(row("ours", 2 * before)))
    assert cli("measurements", "import", rows, "--shared").returncode == 0
    assert step(client, "ann") > 1.5 * before


def test_an_import_is_undone_and_says_which_plans_rest_on_it(cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("slow", 3.0)))
    imported = json.loads(cli("measurements", "import", rows, "--json").stdout)
    (learnt,) = imported["calibrations"]
    where = ("--model", "llama3-8b", "--gpu", "h100-sxm-80gb", "--num-gpus", 8)
    how = ("--seq-len", 8192, "--global-batch-size", 16)
    plan = json.loads(cli("recommend", *where, *how, "--json").stdout)
    assert plan["calibration_id"] == learnt, "the command line's own runs count for its user"
    shown = json.loads(cli("calibrations", "show", learnt, "--json").stdout)
    assert (shown["rests_on"], shown["plans"]) == (["slow"], [plan["id"]])
    assert shown["owner"].startswith("cli:")
    assert cli("calibrations", "revert", learnt).stdout.startswith("1 run left out")
    assert "not in use" in cli("calibrations", "list").stdout
    believed = json.loads(cli("measurements", "believe", "slow", "--json").stdout)
    assert believed == {"believed": ["slow"], "calibrations": [learnt]}
