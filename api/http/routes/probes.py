"""POST /probes, GET /probes, GET and DELETE /probes/{id}.

The service's own workers run them, or others on the same database.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask

from planner.api.catalog import named
from planner.api.http.bodies import JSON, CheckedByPlanner
from planner.api.http.routes.parameters import Cursor, PageSize, Text, answers
from planner.api.http.routing import Wired, strict_route
from planner.api.http.schemas import JobBody, PlanProbes, ProbeDetail, ProbeLine, ProbesAccepted
from planner.api.http.security import Prober, Reader
from planner.api.input.names import probe_id_of
from planner.api.jobs import probes as jobs
from planner.api.jobs.probes import (
    PREFIX,
    SERVICE_ATTEMPTS,
    enqueue,
    options_of,
    pool_of,
    probe_of_job,
    probes_of_plan,
)
from planner.api.own_entries import with_own
from planner.api.storage.records import Page
from planner.errors import fault
from planner.probes.campaign import ProbeRequest

router = APIRouter(tags=["probes"], route_class=strict_route())
ProbeJson = Annotated[Any, CheckedByPlanner(ProbeRequest | PlanProbes | JobBody), Body()]
JOB_KEYS = frozenset({"model", "cluster", "training"})


@router.post("/probes", status_code=202, responses=answers(ProbesAccepted, 404, 502, code=202))
def post_probes(request: Request, wiring: Wired, key: Prober, values: ProbeJson = None) -> Response:
    """A job with its layout, or the best layouts of a plan, to be measured.

    202: queued; follow `location`.
    """
    values = with_own(wiring, values)
    if not isinstance(values, Mapping):
        rule = "must be a mapping of keys to values"
        raise fault("body", values, rule, "send job, or plan and top_k")
    if JOB_KEYS & set(values):
        asked = probe_of_job({**options_of(values), "job": dict(values)}, allow_files=False)
    elif "plan" in values:
        options = {name: value for name, value in values.items() if name not in ("plan", "top_k")}
        asked = probes_of_plan(wiring, str(values["plan"]), _whole(values.get("top_k", 1)), options)
    else:
        asked = probe_of_job(dict(values), allow_files=False)
    for name in {one.request.pool for one in asked}:
        pool_of(wiring, name, allow_files=False)
    records = enqueue(wiring, asked, max_attempts=SERVICE_ATTEMPTS)
    first, ids = records[0].id, [record.id for record in records]
    body = ProbesAccepted(id=first, ids=ids).model_dump_json()
    headers, wake = {"location": f"/{PREFIX}s/{first}"}, request.app.state.probe_workers.wake
    return Response(body, 202, headers, media_type=JSON, background=BackgroundTask(wake))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise fault("top_k", value, "must be a whole number", "write for example 3")
    return value


@router.get("/probes")
def list_probes(
    wiring: Wired,
    _: Reader,
    state: Annotated[
        Literal["queued", "running", "done", "failed", "cancelled"] | None, Query()
    ] = None,
    model: Text = None,
    gpu: Text = None,
    plan: Text = None,
    pool: Text = None,
    cursor: Cursor = None,
    limit: PageSize = 50,
) -> Page[ProbeLine]:
    """Probes, newest first. Workers end those whose runner crashed within seconds."""
    names = named({"model": model, "gpu": gpu})
    page = wiring.probes.list(cursor, limit, state=state, plan_id=plan, pool=pool, **names)
    lines = [ProbeLine.model_validate(record) for record in page.items]
    return Page[ProbeLine](items=lines, next_cursor=page.next_cursor)


@router.get("/probes/{probe_id}")
def get_probe(wiring: Wired, probe_id: str, _: Reader) -> ProbeDetail:
    """One probe with the results of its runs."""
    name = probe_id_of(wiring, probe_id, "probe_id")
    return ProbeDetail.model_validate(wiring.probes.get(name))


@router.delete("/probes/{probe_id}")
def cancel_probe(wiring: Wired, probe_id: str, _: Prober) -> ProbeDetail:
    """Cancels a queued probe; a running one ends at its next heartbeat.

    403: another key asked for it, and this one is no `admin`.
    """
    return ProbeDetail.model_validate(jobs.cancel_probe(wiring, probe_id))
