"""`collective` and `simulate` at both edges: the same answer on the command line, over HTTP and
from the library; errors as elsewhere.
"""

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from planner.api.http.app import create_app
from planner.api.settings import Settings
from planner.intake.machines import read_cluster
from planner.plan.collective import collective
from planner.schedules import SCHEDULES, to_csv
from tests.conftest import JOB, Cli, api_keys, needed

ASKED = {"op": "all-reduce", "size": "1 GiB", "cluster": "h100-64"}
PIPELINE: dict[str, Any] = {
    **JOB,
    "id": "p",
    "training": {"seq_len": 2048, "global_batch_size": 32},
    "layout": {
        "pp": 4,
        "pp_schedule": "Interleaved1F1B",
        "virtual_stages": 2,
        "dp_shard": 2,
        "ac": "full",
    },
}
NUM_STAGES, NUM_MICROBATCHES = 8, 16


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    settings = Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('client') / 'x.db'}")
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def flags(asked: dict[str, Any]) -> list[str]:
    return [
        text for key, value in asked.items() for text in (f"--{key.replace('_', '-')}", str(value))
    ]


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


# ---- collective ----


def test_collective_is_the_same_everywhere(cli: Cli, client: TestClient) -> None:
    asked = {**ASKED, "num_ranks": 8, "stride": 8}
    done = cli("collective", *flags(asked), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    posted = client.post("/collective", json=asked)
    assert posted.status_code == 200, posted.text
    ours = collective("all-reduce", 2**30, read_cluster("h100-64"), num_ranks=8, stride=8)
    assert json.loads(done.stdout) == posted.json() == ours.model_dump(mode="json")


def test_collective_in_words(cli: Cli) -> None:
    done = cli("collective", *flags({**ASKED, "algorithm": "ring"}))
    assert done.returncode == 0, done.stderr
    for expected in (
        "all-reduce of 1.0 GiB over 64 ranks",
        "by ring (closed form, datasheet)",
        "126 steps",
        "bus bandwidth",
        "Why: ",
        "tree",
    ):
        assert expected in done.stdout
    assert "\x1b" not in done.stdout


def test_collective_reads_a_cluster_of_ones_own_only_on_the_command_line(
    cli: Cli, client: TestClient, tmp_path: Path
) -> None:
    fabric = [{"name": "wire", "bandwidth": "100 GB/s", "latency": "2 us"}]
    path = write(tmp_path, "mine.json", {"gpu": "h100-sxm-80gb", "num_gpus": 8, "fabric": fabric})
    done = cli(
        "collective",
        *flags({"op": "broadcast", "size": "1 GB", "cluster": path, "algorithm": "ring"}),
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] == pytest.approx(7 * 2e-6 + 1e9 / 100e9)
    answer = client.post("/collective", json={**ASKED, "cluster": str(path)})
    assert (answer.status_code, answer.json()["field"]) == (422, "cluster")
    inline = client.post(
        "/collective", json={**ASKED, "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 16}}
    )
    assert (inline.status_code, inline.json()["num_ranks"]) == (200, 16)


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ({"op": "gossip"}, ["op"]),
        ({"size": "many"}, ["size"]),
        ({"size": 0}, ["size"]),
        ({"size": "1e300 GB"}, ["size"]),
        ({"size": None}, ["size"]),
        ({"cluster": "h100-63"}, ["cluster"]),
        ({"cluster": 8}, ["cluster"]),
        ({"num_ranks": 65}, ["num_ranks"]),
        ({"num_ranks": 1}, ["num_ranks"]),
        ({"num_ranks": 2.5}, ["num_ranks"]),
        ({"stride": 0}, ["stride"]),
        ({"algorithm": "torus"}, ["algorithm"]),
        ({"bytes": 3}, ["bytes"]),
        ({"size": "many", "cluster": "h100-63", "stride": -1}, ["size", "stride", "cluster"]),
    ],
)
def test_wrong_collectives_are_422_with_every_fault(
    client: TestClient, wrong: dict[str, Any], fields: list[str]
) -> None:
    answer = client.post("/collective", json={**ASKED, **wrong})
    assert (answer.status_code, answer.headers["content-type"]) == (
        422,
        "application/problem+json",
    ), answer.text
    body = answer.json()
    found = [error["field"] for error in body["errors"]] if len(fields) > 1 else [body["field"]]
    assert found == fields
    assert body["remedy"]


def test_a_body_that_is_no_question_is_422(client: TestClient) -> None:
    for path in ("/collective", "/simulate"):
        for body in (b"", b"[]", b"7", b"{"):
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 422, (path, body, answer.text)
        assert (
            client.post(path, content=b"x", headers={"content-type": "text/plain"}).status_code
            == 415
        )
        assert client.get(path).status_code == 405


def test_wrong_collective_on_the_command_line_is_one_line_and_exit_2(cli: Cli) -> None:
    done = cli("collective", *flags({**ASKED, "size": "many"}), "--json")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["error"]["field"] == "size"
    assert cli("collective", "--op", "all-reduce").returncode == 2


# ---- simulate ----


def checked_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The compute events of a valid Chrome trace (Trace Event Format): complete events, counters,
    metadata; nothing overlaps on a rank.
    """
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "C", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] > 0
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in {event["tid"] for event in events}:
        spans = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == rank
        )
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))
    return events


def test_simulate_over_http_is_a_chrome_trace(client: TestClient) -> None:
    answer = client.post("/simulate", json=PIPELINE)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), (
        answer.text
    )
    events = checked_trace(json.loads(answer.text))
    names = {event["name"] for event in events}
    assert len(events) == len(names) == 2 * NUM_STAGES * NUM_MICROBATCHES
    assert names >= {"0F0", f"{NUM_STAGES - 1}B{NUM_MICROBATCHES - 1}"}
    assert {event["tid"] for event in events} == set(range(4))
    again = client.post("/simulate", json=PIPELINE, headers={"idempotency-key": "k"})
    assert (
        client.post("/simulate", json=PIPELINE, headers={"idempotency-key": "k"}).headers[
            "idempotent-replayed"
        ]
        == "true"
    )
    assert again.json() == answer.json()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layout": {"dp_shard": 8}}, "layout.pp"),
        ({"layout": None}, "layout.pp"),
        ({"layout": {"pp": 4, "tp": 3}}, "layout.dp_shard"),
        ({"layout": {"pp": 4, "pp_schedule": "2F2B"}}, "layout.pp_schedule"),
        ({"model": "/etc/passwd"}, "model"),
        ({"training": {"seq_len": 2048, "global_batch_size": 2**26}}, "training.global_batch_size"),
    ],
)
def test_simulate_refuses_what_it_cannot_play(
    client: TestClient, change: dict[str, Any], field: str
) -> None:
    answer = client.post("/simulate", json={**PIPELINE, **change})
    assert (answer.status_code, answer.headers["content-type"]) == (
        422,
        "application/problem+json",
    ), answer.text
    assert field in (
        answer.json()["field"],
        *(error["field"] for error in answer.json().get("errors", [])),
    )


def test_keys_guard_both(sqlite_url: str) -> None:
    keys = api_keys({"reader": "read", "maker": "plan"})
    with TestClient(
        create_app(Settings(database_url=sqlite_url, api_keys=SecretStr(keys))),
        raise_server_exceptions=False,
    ) as client:
        for path, body in (("/collective", ASKED), ("/simulate", PIPELINE)):
            statuses = [
                client.post(
                    path, json=body, headers={"authorization": f"Bearer {name}"} if name else {}
                ).status_code
                for name in ("", "reader", "maker")
            ]
            assert statuses == [401, 403, 200]


def test_both_are_in_the_openapi_page(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert "size" in json.dumps(paths["/collective"]["post"]["requestBody"])
    assert "layout" in json.dumps(paths["/simulate"]["post"]["requestBody"])


@pytest.fixture
def simulated(cli: Cli, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The CLI's trace and its CSV."""
    trace, table = tmp_path / "trace.json", tmp_path / "schedule.csv"
    done = cli(
        "simulate",
        "--job",
        write(tmp_path, "job.json", PIPELINE),
        "--trace",
        trace,
        "--csv",
        table,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert len(body["bubble_share"]) == 4
    assert 0 < body["makespan_seconds"] <= body["estimate"]["step_seconds"]
    return json.loads(trace.read_text()), table


def test_simulate_on_the_command_line_writes_the_same_trace(
    simulated: tuple[dict[str, Any], Path], client: TestClient
) -> None:
    trace, table = simulated
    assert checked_trace(trace)
    assert trace == client.post("/simulate", json=PIPELINE).json()
    rows = list(csv.reader(table.read_text().splitlines()))
    assert len(rows) == 4
    assert table.read_text() == to_csv(SCHEDULES["Interleaved1F1B"].actions(4, 2, NUM_MICROBATCHES))


@pytest.mark.torch
def test_the_csv_loads_in_torch(simulated: tuple[dict[str, Any], Path]) -> None:
    needed("torch")
    from torch.distributed.pipelining.schedules import _Action

    rows = list(csv.reader(simulated[1].read_text().splitlines()))
    actions = [[_Action.from_str(cell) for cell in row] for row in rows]
    played = [event["name"] for event in checked_trace(simulated[0])]
    assert sorted(str(action) for row in actions for action in row if action is not None) == sorted(
        played
    )
    assert {action.stage_index % 4 for action in actions[1] if action is not None} == {1}
