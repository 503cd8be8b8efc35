"""`collective` and `simulate` at both edges: the same answer on the command line, over HTTP and
from the library; errors as elsewhere.
"""

import csv
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from planner.intake.machines import read_cluster
from planner.plan.collective import collective
from planner.schedules import SCHEDULES, to_csv
from tests.conftest import JOB, Cli, api_keys, needed
from tests.e2e.conftest import Say, write
from tests.served import in_process

WRONG = [
    *(("size", size) for size in ("many", 0, "1e300 GB", None)),
    *(("num_ranks", number) for number in (65, 1, 2.5)),
    *(("cluster", cluster) for cluster in ("h100-63", 8)),
    *(("op", "gossip"), ("stride", 0), ("algorithm", "torus"), ("bytes", 3)),
]
ASKED = {"op": "all-reduce", "size": "1 GiB", "cluster": "h100-64"}
LAYOUT = {"pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "dp_shard": 2}
TRAINING = {"seq_len": 2048, "global_batch_size": 32}
PIPELINE = {**JOB, "id": "p", "training": TRAINING, "layout": {**LAYOUT, "ac": "full"}}
NUM_STAGES, NUM_MICROBATCHES = 8, 16


def asking(cli: Cli, **asked: Any) -> "subprocess.CompletedProcess[str]":
    words = [(f"--{key.replace('_', '-')}", value) for key, value in asked.items()]
    return cli("collective", *itertools.chain(*words), "--json")


def test_collective_is_the_same_everywhere(cli: Cli, shared: TestClient) -> None:
    asked = {**ASKED, "num_ranks": 8, "stride": 8}
    done = asking(cli, **asked)
    assert (done.returncode, done.stderr) == (0, "")
    posted = shared.post("/collective", json=asked)
    assert posted.status_code == 200, posted.text
    ours = collective("all-reduce", 2**30, read_cluster("h100-64"), num_ranks=8, stride=8)
    assert json.loads(done.stdout) == posted.json() == ours.model_dump(mode="json")


def test_collective_in_words(say: Say) -> None:
    size = ("--op", "all-reduce", "--size", "1 GiB", "--cluster", "h100-64")
    shown = say("collective", *size, "--algorithm", "ring")
    head = ("all-reduce of 1.0 GiB over 64 ranks", "by ring (closed form, datasheet)", "126 steps")
    for expected in (*head, "bus bandwidth", "Why: ", "tree"):
        assert expected in shown
    assert "\x1b" not in shown


def test_collective_reads_a_cluster_of_ones_own_only_on_the_command_line(
    cli: Cli, shared: TestClient, tmp_path: Path
) -> None:
    fabric = [{"name": "wire", "bandwidth": "100 GB/s", "latency": "2 us"}]
    path = write(tmp_path, "mine.json", {"gpu": "h100-sxm-80gb", "num_gpus": 8, "fabric": fabric})
    done = asking(cli, op="broadcast", size="1 GB", cluster=path, algorithm="ring")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] == pytest.approx(7 * 2e-6 + 1e9 / 100e9)
    answer = shared.post("/collective", json={**ASKED, "cluster": str(path)})
    assert (answer.status_code, answer.json()["field"]) == (422, "cluster")
    inline = {"gpu": "a100-sxm-80gb", "num_gpus": 16}
    answer = shared.post("/collective", json={**ASKED, "cluster": inline})
    assert (answer.status_code, answer.json()["num_ranks"]) == (200, 16)


@pytest.mark.parametrize(("wrong", "fields"), [
    *(({name: value}, [name]) for name, value in WRONG),
    ({"size": "many", "cluster": "h100-63", "stride": -1}, ["size", "stride", "cluster"]),
])  # fmt: skip
def test_wrong_collectives_are_422_with_every_fault(
    shared: TestClient, wrong: dict[str, Any], fields: list[str]
) -> None:
    body = refused(shared.post("/collective", json={**ASKED, **wrong}))
    found = [error["field"] for error in body["errors"]] if len(fields) > 1 else [body["field"]]
    assert found == fields
    assert body["remedy"]


def refused(answer: httpx.Response) -> dict[str, Any]:
    kind = answer.headers["content-type"]
    assert (answer.status_code, kind) == (422, "application/problem+json"), answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/collective", "/simulate"])
def test_a_body_that_is_no_question_is_422(shared: TestClient, path: str) -> None:
    for body in (b"", b"[]", b"7", b"{"):
        refused(shared.post(path, content=body, headers={"content-type": "application/json"}))


def test_wrong_collective_on_the_command_line_is_one_line_and_exit_2(cli: Cli) -> None:
    done = asking(cli, **{**ASKED, "size": "many"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert json.loads(done.stdout)["error"]["field"] == "size"
    assert asking(cli, op="all-reduce").returncode == 2


def checked_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The compute events of a valid Chrome trace (Trace Event Format): complete events, counters,
    metadata; nothing overlaps on a rank.
    """
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "C", "M")
        assert [type(event[name]) for name in ("pid", "tid", "name")] == [int, int, str]
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for of_rank in spans.values():
        pairs = itertools.pairwise(sorted(of_rank))
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairs)
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_simulate_over_http_is_a_chrome_trace(shared: TestClient) -> None:
    answer = shared.post("/simulate", json=PIPELINE)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    events = checked_trace(json.loads(answer.text))
    names = {event["name"] for event in events}
    assert len(events) == len(names) == 2 * NUM_STAGES * NUM_MICROBATCHES
    assert names >= {"0F0", f"{NUM_STAGES - 1}B{NUM_MICROBATCHES - 1}"}
    assert {event["tid"] for event in events} == set(range(4))
    key = {"idempotency-key": "k"}
    first, again = (shared.post("/simulate", json=PIPELINE, headers=key) for _ in range(2))
    assert first.json() == again.json() == answer.json()
    assert again.headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize(("change", "field"), [
    ({"layout": {"dp_shard": 8}}, "layout.pp"), ({"layout": None}, "layout.pp"),
    ({"layout": {"pp": 4, "tp": 3}}, "layout.dp_shard"),
    ({"layout": {"pp": 4, "pp_schedule": "2F2B"}}, "layout.pp_schedule"),
    ({"model": "/etc/passwd"}, "model"),
    ({"training": {"seq_len": 2048, "global_batch_size": 2**26}}, "training.global_batch_size"),
])  # fmt: skip
def test_simulate_refuses_what_it_cannot_play(
    shared: TestClient, change: dict[str, Any], field: str
) -> None:
    body = refused(shared.post("/simulate", json={**PIPELINE, **change}))
    assert field in (body["field"], *(error["field"] for error in body.get("errors", [])))


@pytest.mark.parametrize(("path", "body"), [("/collective", ASKED), ("/simulate", PIPELINE)])
def test_keys_guard_both(sqlite_url: str, path: str, body: dict[str, Any]) -> None:
    keys = api_keys({"reader": "read", "maker": "plan"})
    with in_process(sqlite_url, api_keys=keys) as client:
        for name, status in (("", 401), ("reader", 403), ("maker", 200)):
            headers = {"authorization": f"Bearer {name}"} if name else {}
            assert client.post(path, json=body, headers=headers).status_code == status


@pytest.fixture
def simulated(say: Say, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The CLI's trace and its CSV."""
    trace, table = tmp_path / "trace.json", tmp_path / "schedule.csv"
    job = write(tmp_path, "job.json", PIPELINE)
    words = ("--job", job, "--trace", trace, "--csv", table, "--json")
    body = json.loads(say("simulate", *words))
    assert len(body["bubble_share"]) == 4
    assert 0 < body["makespan_seconds"] <= body["estimate"]["step_seconds"]
    return json.loads(trace.read_text()), table


def test_simulate_on_the_command_line_writes_the_same_trace(
    simulated: tuple[dict[str, Any], Path], shared: TestClient
) -> None:
    trace, table = simulated
    assert checked_trace(trace)
    assert trace == shared.post("/simulate", json=PIPELINE).json()
    assert table.read_text() == to_csv(SCHEDULES["Interleaved1F1B"].actions(4, 2, NUM_MICROBATCHES))


@pytest.mark.torch
def test_the_csv_loads_in_torch(simulated: tuple[dict[str, Any], Path]) -> None:
    needed("torch")
    from torch.distributed.pipelining.schedules import _Action

    trace, table = simulated
    rows = [
        [action for cell in row if (action := _Action.from_str(cell)) is not None]
        for row in csv.reader(table.read_text().splitlines())
    ]
    assert len(rows) == 4
    played = sorted(event["name"] for event in checked_trace(trace))
    assert sorted(str(action) for row in rows for action in row) == played
    assert {action.stage_index % 4 for action in rows[1]} == {1}
