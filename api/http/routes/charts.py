"""Charts as Vega-Lite specifications with their data inside: of a plan, of a sweep."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response

from planner.api.http.bodies import JSON
from planner.api.http.routing import ThreadRoute, Wired
from planner.api.http.security import Reader
from planner.api.input.jobs import parse_job
from planner.api.input.names import plan_id_of, sweep_id_of
from planner.api.jobs.plans import entry_of, job_of, study_of
from planner.api.jobs.sweeps import sweep_detail
from planner.api.render.charts import study_chart, sweep_chart
from planner.charts.chart import Chart
from planner.errors import NotFoundError
from planner.plan.timeline import timeline

router = APIRouter(tags=["charts"], route_class=ThreadRoute)
PlanChart = Literal["pareto", "memory", "time", "timeline", "progress"]
MOST_RUNS = 200
SPECIFICATION = {
    "description": "A Vega-Lite specification",
    "content": {JSON: {"schema": {"type": "object"}}},
}
ANSWERS: dict[int | str, dict[str, Any]] = {200: SPECIFICATION}


@router.get("/plans/{plan_id}/charts/{kind}", responses=ANSWERS)
def plan_chart(
    wiring: Wired, plan_id: str, kind: PlanChart, _: Reader, rank: Annotated[int, Query()] = 1
) -> Response:
    """Throughput against memory, what memory or time consist of, or one rank's pipeline in time.

    rank: of the layout whose `timeline` is drawn, which has pp of 2 or more.
    progress: the best step while probes are spent, also before there is a plan.
    """
    if kind == "progress":
        study = study_of(wiring, plan_id)
        if study is None:
            raise NotFoundError(f"no study makes plan {plan_id!r}; only one with probes has it")
        return _answer(study_chart(event.body for event in wiring.tasks.events(study.id)))
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id, "plan_id"))
    if kind != "timeline":
        return _answer(plan.plot(kind))
    job = parse_job(job_of(plan, entry_of(plan, rank)), allow_files=False)
    return _answer(timeline(job).plot())


@router.get("/sweeps/{sweep_id}/chart", responses=ANSWERS)
def sweep_over_time(wiring: Wired, sweep_id: str, _: Reader) -> Response:
    """Step times of a sweep's layouts over its newest runs, against the first of them."""
    sweep = wiring.sweeps.get(sweep_id_of(wiring, sweep_id, "sweep_id"))
    return _answer(sweep_chart(sweep_detail(wiring, sweep, MOST_RUNS)))


def _answer(chart: Chart) -> Response:
    return Response(json.dumps(chart.spec), media_type=JSON)
