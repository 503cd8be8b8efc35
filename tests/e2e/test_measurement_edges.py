"""Who may store, delete and share measurements, and what comes of them, on the real app and the
real command line.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.conftest import Cli, api_keys, job_values
from tests.served import in_process

KEYS = api_keys({"ann": "read+plan+probe", "bob": "read+plan+probe", "root": "admin"})
JOB = job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 16, layout={"dp_shard": 8, "ac": "full"})


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    with in_process(sqlite_url, api_keys=KEYS, probe_workers=0, task_workers=0) as client:
        yield client


def by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def row(row_id: str, seconds: float, **numbers: Any) -> dict[str, Any]:
    return {**JOB, "id": row_id, "measured": {"rung": "probed", "step_seconds": seconds, **numbers}}


def step(client: TestClient, name: str) -> float:
    return client.post("/estimate", json=JOB, headers=by(name)).json()["step_seconds"]


def test_a_key_teaches_itself_until_an_admin_shares_and_forgets(client: TestClient) -> None:
    before = step(client, "bob")
    stored = client.post("/measurements", json=row("a-1", 2 * before), headers=by("ann")).json()
    assert stored == {"new": ["a-1"], "known": [], "refused": {}}
    assert step(client, "ann") > 1.5 * before
    assert step(client, "bob") == before
    search = {"top_k": 1, "fix": {"ac": "full", "compile": False}}
    asked = {**JOB, "layout": None, "search": search}
    anns, bobs = (client.post("/plan", json=asked, headers=by(name)) for name in ("ann", "bob"))
    assert anns.json()["calibration_id"] != bobs.json()["calibration_id"]
    for name, status in (("ann", 403), ("bob", 403), ("root", 200)):
        assert client.post("/measurements/a-1/share", headers=by(name)).status_code == status
    assert step(client, "bob") > 1.5 * before
    for name, status in (("bob", 403), ("ann", 204), ("ann", 404)):
        assert client.delete("/measurements/a-1", headers=by(name)).status_code == status
    assert step(client, "bob") == before


def test_an_impossible_row_is_stored_with_the_reason_and_moves_nothing(client: TestClient) -> None:
    before = step(client, "root")
    gpu = {**custom("h100-sxm-80gb"), "peak_flops": {"bf16": 1e18}}
    rows = [
        row("fast", 1e-6),
        row("large", 2 * before, peak_reserved_bytes=200e9),
        row("torn", 2 * before, tokens_per_second_per_gpu=1e6),
        {**row("claimed", 1e-4), "cluster": {"gpu": gpu, "num_gpus": 8}},
        row("tomorrow", 2 * before, created_at="2999-01-01T00:00:00+00:00"),
    ]
    stored = client.post("/measurements", json=rows, headers=by("root")).json()
    assert set(stored.get("refused", stored)) == {one["id"] for one in rows}
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


def test_the_command_line_says_what_is_not_believed_and_forgets(cli: Cli, tmp_path: Path) -> None:
    done = cli("measurements", "import", written(tmp_path, row("fast", 1e-6), row("slow", 20.0)))
    assert done.returncode == 0, done.stderr
    assert "fast: not believed, counts for nothing: a step of 1e-06 s is faster" in done.stdout
    assert "learned: " in done.stderr
    assert "not believed: fast" in cli("measurements", "list").stderr
    gone = cli("measurements", "delete", "slow")
    assert (gone.returncode, gone.stdout) == (0, "1 measurement deleted\n")
    left = json.loads(cli("measurements", "list", "--json").stdout)["items"]
    assert [(one["id"], one["measured"]["asked_by"][:4]) for one in left] == [("fast", "cli:")]
    assert cli("measurements", "delete", "slow").returncode == 2
    assert cli("measurements", "share").returncode == 2
    assert cli("measurements", "share", "fast").stdout == "0 measurements shared\n"


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_only_a_shared_import_counts_for_all(cli: Cli, client: TestClient, tmp_path: Path) -> None:
    before = step(client, "ann")
    mine = written(tmp_path, row("mine", 2 * before))
    assert cli("measurements", "import", mine).returncode == 0
    assert step(client, "ann") == before
    ours = written(tmp_path, row("ours", 2 * before))
    assert cli("measurements", "import", ours, "--shared").returncode == 0
    assert step(client, "ann") > 1.5 * before


def test_an_import_is_undone_and_says_which_plans_rest_on_it(cli: Cli, tmp_path: Path) -> None:
    def told(*words: object) -> Any:
        return json.loads(cli(*map(str, words), "--json").stdout)

    imported = told("measurements", "import", written(tmp_path, row("slow", 3.0)))
    (learnt,) = imported["calibrations"]
    where = ("--model", "llama3-8b", "--gpu", "h100-sxm-80gb", "--num-gpus", 8)
    plan = told("recommend", *where, "--seq-len", 8192, "--global-batch-size", 16)
    assert plan["calibration_id"] == learnt, "the command line's own runs count for its user"
    shown = told("calibrations", "show", learnt)
    assert (shown["rests_on"], shown["plans"]) == (["slow"], [plan["id"]])
    assert shown["owner"].startswith("cli:")
    assert cli("calibrations", "revert", learnt).stdout.startswith("1 run left out")
    assert "not in use" in cli("calibrations", "list").stdout
    believed = {"believed": ["slow"], "calibrations": [learnt]}
    assert told("measurements", "believe", "slow") == believed
