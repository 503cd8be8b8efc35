"""Models, GPUs and clusters of the users' own: kept in versions, meant by name everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.conftest import EACH_DATABASE, Cli, api_keys
from tests.e2e.conftest import Say, write
from tests.served import in_process

TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip
SLOW = {"base": "h100-sxm-80gb", "power_limit": "400 W"}
TRAINING = {"seq_len": 512, "global_batch_size": 16}
LAYOUT = {"dp_shard": 8}


def add(app: TestClient, kind: str, name: str, spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = app.post(f"/catalog/{kind}", json={"name": name, "spec": spec}, **more)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/catalog/{kind}/{found['name']}"
    return found


@EACH_DATABASE
def test_versions_never_change(app: TestClient) -> None:
    first = add(app, "models", "ours", TINY)
    assert (first["name"], first["version"]) == ("own/ours@1", 1)
    assert add(app, "models", "ours", TINY)["version"] == 1, "it says the same"
    second = add(app, "models", "ours", {**TINY, "num_hidden_layers": 8})
    assert second["version"] == 2
    assert second["parameters"] > first["parameters"]
    for name, wanted in (("ours", second), ("ours@1", first), ("ours@2", second)):
        assert app.get(f"/catalog/models/own/{name}").json() == wanted
    listed = app.get("/catalog/models").json()["items"]
    assert listed[0]["name"] == "own/ours@2", "one line a name, its newest version"
    assert {"llama3-8b"} <= {line["name"] for line in listed}
    assert app.get("/catalog/models/own/ours@3").status_code == 404


@EACH_DATABASE
def test_a_plan_outlives_the_next_version(app: TestClient) -> None:
    add(app, "models", "ours", TINY)
    add(app, "gpus", "slow", SLOW)
    add(app, "clusters", "pod", {"gpu": "own/slow", "num_gpus": 8})
    job = {"model": "own/ours", "cluster": "own/pod", "training": TRAINING}
    plan = app.post("/plan", json=job).json()
    add(app, "models", "ours", {**TINY, "num_hidden_layers": 8})
    add(app, "gpus", "slow", {**SLOW, "power_limit": "300 W"})
    again = app.get(f"/plans/{plan['id']}").json()
    assert again == plan
    assert again["job"]["model"]["num_hidden_layers"] == 4
    assert again["job"]["cluster"]["gpu"]["power_limit_watts"] == 400
    line = app.get("/plans").json()["items"][0]
    assert (line["model"], line["gpu"]) == ("own/ours@1", "own/slow@1")
    newer = app.post("/plan", json=job).json()
    assert newer["job"]["model"]["num_hidden_layers"] == 8
    # the pod was made from the GPU's first version, and stays so until it has another itself
    assert newer["job"]["cluster"]["gpu"]["power_limit_watts"] == 400


@pytest.mark.parametrize("how", ["one", "in a list", "in lines"])
def test_estimates_mean_them(app: TestClient, how: str) -> None:
    def seconds(model: Any) -> float:
        job = {"model": model, "cluster": cluster, "training": TRAINING, "layout": LAYOUT}
        if how == "in lines":
            kind = {"content-type": "application/jsonl"}
            text = app.post("/estimate", content=f"{json.dumps(job)}\n", headers=kind).text
            return float(json.loads(text)["step_seconds"])
        answer = app.post("/estimate", json=job if how == "one" else [job]).json()
        return float((answer if how == "one" else answer[0])["step_seconds"])

    add(app, "models", "ours", TINY)
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    assert seconds("own/ours@1") == seconds(TINY) > 0


def test_the_rest_of_the_service_means_them(app: TestClient) -> None:
    add(app, "models", "ours", TINY)
    add(app, "clusters", "pod", {"gpu": "h100-sxm-80gb", "num_gpus": 8})
    job = {"model": "own/ours", "cluster": "own/pod", "training": TRAINING}
    question = {"op": "all-reduce", "size": "1 GiB", "cluster": "own/pod"}
    assert app.post("/collective", json=question).json()["num_ranks"] == 8
    piped = {**job, "layout": {"pp": 2, "dp_shard": 4, "pp_schedule": "1F1B"}}
    assert app.post("/simulate", json=piped).json()["traceEvents"]
    row = {**job, "layout": LAYOUT, "measured": {"status": "ok", "step_seconds": 1.0}}
    stored = app.post("/measurements", json=row)
    assert stored.status_code == 201, stored.text
    sweep = {"name": "ours", "models": ["own/ours"], "clusters": ["own/pod"],
             "trainings": [TRAINING], "measure": {"top_k": 1}}  # fmt: skip
    spec = app.post("/sweeps", json=sweep).json()["spec"]
    assert spec["jobs"][0]["model"]["name"] == "own/ours@1"


@pytest.mark.parametrize(("kind", "name", "spec", "status", "field"), [
    *(("models", name, TINY, 422, "name") for name in ("Ours", "../x", "a\n")),
    ("models", "ours", {**TINY, "num_attention_heads": 3}, 422, None),
    ("models", "ours", {"name_or_path": "/etc/passwd"}, 422, None),
    ("models", "ours", [], 422, "spec"),
    ("gpus", "ours", {"base": "h100-sxm-80gb", "memory": "-1 GiB"}, 422, None),
    ("gpus", "ours", {"base": "own/none"}, 422, "base"),
    ("clusters", "ours", {"gpu": "no-such-gpu", "num_gpus": 8}, 422, "spec.gpu"),
    ("defaults", "ours", TINY, 404, "kind"), ("nonsense", "ours", TINY, 404, "kind"),
])  # fmt: skip
def test_what_is_no_entry_is_refused(
    shared: TestClient, kind: str, name: str, spec: Any, status: int, field: str | None
) -> None:
    answer = shared.post(f"/catalog/{kind}", json={"name": name, "spec": spec})
    assert answer.status_code == status, answer.text
    assert field in (None, answer.json()["field"])
    for path in ("models", "gpus", "clusters"):
        items = shared.get(f"/catalog/{path}").json()["items"]
        assert not any(line["name"].startswith("own/") for line in items)


def test_an_unknown_name_says_where_to_look(app: TestClient) -> None:
    job = {"model": "own/none", "cluster": "8xh100", "training": TRAINING}
    refused = app.post("/plan", json=job)
    assert (refused.status_code, refused.json()["field"]) == (422, "model")
    assert "/catalog/models" in refused.json()["remedy"]


def test_a_name_is_its_owner_s(sqlite_url: str) -> None:
    keys = api_keys(dict.fromkeys(("ann", "bob"), "plan+read"))
    with in_process(sqlite_url, api_keys=keys, probe_workers=0, task_workers=0) as app:
        ann, bob = ({"headers": {"authorization": f"Bearer {name}"}} for name in ("ann", "bob"))
        add(app, "models", "ours", TINY, **ann)
        body = {"name": "ours", "spec": {**TINY, "num_hidden_layers": 2}}
        assert app.post("/catalog/models", json=body, **bob).status_code == 403
        assert app.get("/catalog/models/own/ours", **bob).json()["asked_by"] == "ann"


def test_the_command_line_has_them(cli: Cli, say: Say, tmp_path: Path) -> None:
    tiny = write(tmp_path, "tiny.yaml", TINY)

    assert "own/ours@1" in say("catalog", "models", "ours", "--add", tiny)
    assert "own/ours@1" in say("catalog", "models", "--own")
    assert "num_hidden_layers: 4" in say("catalog", "models", "own/ours")
    asked = ("--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--seq-len", "512")
    plan = say("recommend", "--model", "own/ours", *asked, "--global-batch-size", "16", "--json")
    assert json.loads(plan)["job"]["model"]["name"] == "own/ours@1"
    llama = {"model_type": "llama", "rms_norm_eps": 1e-05, **TINY}
    config = write(tmp_path, "config.json", llama)
    assert "own/config@1" in say("catalog", "models", "config", "--add", config)
    assert cli("catalog", "models", "own/none").returncode == 2
    assert cli("catalog", "defaults", "x", "--add", tiny).returncode == 2
