"""The typed client against the real app; an OpenAPI document that says what the app does."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from planner.api.client import Client, ServiceError
from planner.specs.estimate import Estimate
from planner.specs.plan import Plan
from tests.conftest import EACH_DATABASE, LAYOUT, job_values


@pytest.fixture
def client(app: TestClient) -> Iterator[Client]:
    with Client("http://testserver", transport=app._transport) as found:
        yield found


def is_refused(status: int, ask: Callable[..., object], *words: Any) -> None:
    with pytest.raises(ServiceError) as error:
        ask(*words)
    assert error.value.status == status


@EACH_DATABASE
def test_plans_and_estimates_have_the_planners_types(client: Client, job: dict[str, Any]) -> None:
    plan = client.plan({**job, "search": {"top_k": 2}})
    assert isinstance(plan, Plan)
    for _ in range(2):  # then by its ETag
        assert client.get_plan(plan.id) == plan
    assert [line.id for line in client.plans()] == [plan.id]
    assert list(client.plans(open=True)) == []
    told = client.explain(plan.id, rank=2, versus=1)
    assert told.changed
    assert told.lines
    assert client.cancel_plan(plan.id).status == "done"
    assert [event.name for event in client.events(plan.id)][-1] == "done"
    assert client.estimate({**job, "layout": LAYOUT}).valid
    same, wrong = client.estimate_many([{**job, "layout": plan.ranked[0].layout}, {"model": 1}])
    assert isinstance(same, Estimate)
    assert isinstance(wrong, dict)
    assert same.step_seconds == pytest.approx(plan.ranked[0].estimate.step_seconds, rel=1e-3)
    assert wrong["error"]["field"]


@EACH_DATABASE
def test_the_rest_of_the_service(client: Client, job: dict[str, Any]) -> None:
    names = [line["name"] for line in client.catalog("gpus")]
    assert client.catalog_entry("gpus", names[0])["name"] == names[0]
    assert client.catalog_entry("models", "meta-llama/Llama-3.1-8B")["name"] == "llama3.1-8b"
    assert next(client.calibrations()).in_use
    assert client.job_schema()["title"] == "Job"
    row = {**job, "layout": LAYOUT, "measured": {"step_seconds": 9.0, "status": "ok"}}
    stored = client.store_measurements(row)
    assert [found["id"] for found in client.measurements(gpu="h100-sxm-80gb")] == stored.new
    assert client.store_measurements(row).known == stored.new
    assert list(client.measurements(status="oom")) == []
    assert list(client.probes()) == list(client.sweeps()) == []
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 16}
    assert client.collective({"op": "all-reduce", "size": "1 GiB", "cluster": cluster}).seconds
    is_refused(404, client.get_probe, "probe-none")


def test_many_estimates_come_as_lines(client: Client, job: dict[str, Any]) -> None:
    jobs = [{**job, "id": number, "layout": LAYOUT} for number in range(5)]
    jobs[3] |= {"model": "none"}
    answers = list(client.estimate_lines(jobs, at_once=2))
    assert [one["error"]["type"] for one in answers if isinstance(one, dict)] == ["invalid_request"]
    assert [one.id for one in answers if not isinstance(one, dict)] == [0, 1, 2, 4]
    alone = client.estimate(jobs[0])
    assert alone.model_dump() == answers[0].model_dump()  # type: ignore[union-attr]


def test_lines_take_no_wrong_idempotency_key(app: TestClient) -> None:
    headers = {"content-type": "application/jsonl", "idempotency-key": "k" * 256}
    refused = app.post("/estimate", content="{}\n", headers=headers)
    assert (refused.status_code, refused.json()["field"]) == (422, "idempotency-key")


@EACH_DATABASE
def test_who_did_what_and_what_waits(client: Client, job: dict[str, Any]) -> None:
    plan = client.plan({**job, "search": {"top_k": 1}})
    (made,) = client.audit(action="plan.made")
    assert made.subject == plan.id
    entry = client.add_entry("clusters", "pod", {"gpu": "h100-sxm-80gb", "num_gpus": 8})
    assert client.catalog_entry("clusters", "own/pod")["spec"] == entry["spec"]
    assert next(client.audit()).subject == "clusters/pod@1"
    assert client.queue() == client.queue(failed=True) == []
    is_refused(404, client.retry_job, "probe-none")


@EACH_DATABASE
def test_sweeps_come_typed(client: Client) -> None:
    jobs = [job_values("llama3.2-1b", "cpu", 1, 32, 1)]
    made = client.add_sweep({"name": "nightly", "jobs": jobs, "schedule": "0 3 * * *"})
    assert (made.name, made.state, made.runs) == ("nightly", "active", [])
    assert client.get_sweep(made.id) == made
    assert [sweep.id for sweep in client.sweeps()] == [made.id]
    assert client.pause_sweep(made.id).state == "paused"
    assert client.resume_sweep(made.id).next_due_at == made.next_due_at
    assert client.cancel_sweep(made.id).state == "cancelled"
    is_refused(409, client.run_sweep, made.id)


def test_an_etag_saves_the_answer(app: TestClient, job: dict[str, Any]) -> None:
    plan = app.post("/plan", json={**job, "search": {"top_k": 1}}).json()

    def get(**headers: str) -> httpx.Response:
        return app.get(f"/plans/{plan['id']}", headers=headers)

    tag = get().headers["etag"]
    for held in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = get(**{"if-none-match": held})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    other = get(**{"if-none-match": '"other"'})
    assert (other.status_code, other.json()) == (200, plan)


def test_the_document_resolves_describes_a_job_and_errors_as_problems(shared: TestClient) -> None:
    document = shared.get("/openapi.json").json()
    references = list(_values(document, "$ref"))
    assert len(references) > 100
    for reference in references:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in place, reference
            place = place[part]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names = {one["name"] for one in operation.get("parameters", [])}
            assert ("Idempotency-Key" in names) == (method == "post"), (method, path)
            assert ("If-None-Match" in names) == ("304" in operation["responses"])
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert set(response["content"]) == {"application/problem+json"}, (method, path)
    job = document["components"]["schemas"]["JobBody"]
    assert job["required"] == ["model", "cluster", "training"]
    assert "seq_len" in _names(job["properties"]["training"])
    assert "ac" in job["properties"]["layout"]["properties"]


def _values(part: Any, name: str) -> Iterator[str]:
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if key == name and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _values(value, name)


def _names(schema: Any) -> set[str]:
    found = set(schema.get("properties", {}))
    for one in schema.get("anyOf", []):
        found |= _names(one)
    return found
