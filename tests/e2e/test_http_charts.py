"""Charts, explanations, the job's schema and pasted texts over HTTP."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner.specs.plan import Plan
from tests.conftest import JOB, ROOT

SHORT = {**JOB, "search": {"top_k": 3}}


@pytest.fixture(scope="module")
def plan(shared: TestClient) -> dict[str, Any]:
    return shared.post("/plan", json=SHORT).json()


@pytest.mark.parametrize("kind", ["pareto", "memory", "time"])
def test_a_chart_is_the_librarys(shared: TestClient, plan: dict[str, Any], kind: Any) -> None:
    answer = shared.get(f"/plans/{plan['id']}/charts/{kind}")
    assert answer.status_code == 200
    assert answer.json() == Plan.model_validate(plan).plot(kind).spec
    assert shared.get(f"/plans/plan-nope/charts/{kind}").status_code == 404


def test_what_has_no_pipeline_has_no_timeline(shared: TestClient, plan: dict[str, Any]) -> None:
    assert shared.get(f"/plans/{plan['id']}/charts/nonsense").status_code == 422
    assert shared.get(f"/plans/{plan['id']}/charts/timeline?rank=99").status_code == 422
    assert plan["ranked"][0]["layout"]["pp"] == 1
    refused = shared.get(f"/plans/{plan['id']}/charts/timeline").json()
    assert (refused["field"], refused["message"]) == ("layout.pp", "a timeline needs a pipeline")


def test_explanations_are_the_command_lines(shared: TestClient, plan: dict[str, Any]) -> None:
    from planner.plan.explain import explain

    parsed = Plan.model_validate(plan)
    alone = shared.get(f"/plans/{plan['id']}/explain").json()
    assert (alone["lines"], alone["changed"]) == (explain(parsed, 1, None), {})
    both = shared.get(f"/plans/{plan['id']}/explain?rank=2&versus=1").json()
    assert both["lines"] == explain(parsed, 2, 1)
    first, second = (entry["layout"] for entry in plan["ranked"][:2])
    assert both["changed"] == {
        name: [first[name], second[name]] for name in first if first[name] != second[name]
    }
    assert shared.get(f"/plans/{plan['id']}/explain?rank=9").status_code == 422


def test_a_pasted_text_is_read(shared: TestClient) -> None:
    assert shared.get("/jobs/schema").json()["required"] == ["model", "cluster", "training"]
    found = shared.post("/jobs/read", json={"text": "{tp: 8}", "name": "x.yaml"}).json()
    assert (found["kind"], found["job"]) == ("layout", {"layout": {"tp": 8}})
    for body in ({}, {"text": 3}, {"text": "words"}, {"text": "{}", "name": "x" * 401}):
        assert shared.post("/jobs/read", json=body).status_code == 422


def test_accuracy_is_of_the_runs_stored_here(shared: TestClient) -> None:
    assert shared.get("/accuracy").json()["runs"] == []
    lines = (ROOT / "benchmarks" / "measured" / "public.jsonl").read_text().splitlines()[:3]
    rows = f"[{','.join(lines)}]"
    headers = {"content-type": "application/json"}
    assert shared.post("/measurements", content=rows, headers=headers).status_code == 201
    found = shared.get("/accuracy").json()
    assert len(found["runs"]) + found["refused"] == 3
    assert len(found["chart"]["datasets"]["runs"]) == len(found["runs"])
    assert len(shared.get("/accuracy?limit=1").json()["runs"]) == 1


def test_the_script_of_the_charts_is_sent_once(shared: TestClient) -> None:
    first = shared.get("/web/vega.js")
    assert "vegaEmbed" in first.text
    again = shared.get("/web/vega.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
