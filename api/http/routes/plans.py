"""POST /plan, GET /plans, GET and DELETE /plans/{id}, GET /plans/{id}/events."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask

from planner.api.http.bodies import JSON, JobJson
from planner.api.http.events import ANSWER, Snapshot, of_plan, stream
from planner.api.http.lanes import PLANNING
from planner.api.http.requests import (
    Threads,
    answer_after,
    answer_once,
    in_thread,
    in_turn,
    wiring_of,
)
from planner.api.http.routes.parameters import Cursor, PageSize, answers, problems, with_etag
from planner.api.http.routing import Wired, strict_route
from planner.api.http.schemas import Explained, PlanAccepted, PlanState
from planner.api.http.security import Planner, Reader, require_scope
from planner.api.input.names import plan_id_of
from planner.api.jobs.plans import entry_of, open_plans, page_of_plans, state_of, study_of
from planner.api.jobs.probes import probes_of
from planner.api.jobs.studies import ask_study, end_plan
from planner.api.service import (
    PaperQuestion,
    ask_on_paper,
    keep_plan,
    known_plan,
    plan_on_paper,
    renamed,
)
from planner.api.settings import ApiKey
from planner.api.storage.job_records import OPEN
from planner.api.storage.records import Page, PlanLine
from planner.errors import NotFoundError
from planner.plan.explain import explain
from planner.specs.layout import changed_fields
from planner.specs.plan import Plan

router = APIRouter(tags=["plans"], route_class=strict_route())
DONE = "done"
NUMBER = re.compile(r"[0-9]{1,9}")


@router.post(
    "/plan", responses={200: {"model": Plan}, 202: {"model": PlanAccepted}, **problems(502)}
)
async def post_plan(request: Request, key: Planner, job: JobJson = None) -> Response:
    """A job in, a ranked plan out. 409: nothing fits, with the nearest miss.

    `Idempotency-Key` is honoured. With `probe` the answer is 202: a worker spends the probes, and
    GET `location` (or its events) shows how far it is. It needs the scope `probe` too.
    """
    wiring = wiring_of(request)
    if isinstance(job, Mapping) and job.get("probe") is not None:
        require_scope(key, "probe")

        def queue() -> Response:
            study = ask_study(wiring, job, allow_files=False, ours=False)
            body = PlanAccepted(id=study.id, status=study.state).model_dump_json()
            wake = BackgroundTask(request.app.state.task_workers.wake)
            headers = {"location": f"/plans/{study.id}"}
            return Response(body, 202, headers, media_type=JSON, background=wake)

        return await answer_once(request, key, queue)

    def keep(asked: tuple[PaperQuestion, Plan]) -> Response:
        question, plan = asked
        keep_plan(wiring, question, plan)
        headers = {"location": f"/plans/{plan.id}"}
        return Response(plan.model_dump_json(), headers=headers, media_type=JSON)

    return await answer_after(request, key, partial(_planned, request, key, job), keep)


async def _planned(request: Request, key: ApiKey, job: Any) -> tuple[PaperQuestion, Plan]:
    """The question and its answer."""
    wiring = wiring_of(request)

    def ask() -> tuple[PaperQuestion, Plan | None]:
        question = ask_on_paper(wiring, job, allow_files=False, owner=key.name)
        wiring.store.check_plans_left()
        return question, known_plan(wiring, question)

    question, plan = await in_thread(request, ask, Threads.WRITES)
    if plan is None:
        asked = question.values, question.calibration
        answer = await in_turn(request, key, plan_on_paper, *asked, lane=PLANNING)
        plan = renamed(wiring, question, answer)
    return question, plan


@router.get("/plans")
def list_plans(
    wiring: Wired,
    _: Reader,
    open: Annotated[bool, Query(description="Only those that probes are still spent on.")] = False,
    cursor: Cursor = None,
    limit: PageSize = 50,
) -> Page[PlanLine]:
    """Stored plans, and those that probes are still spent on, newest first."""
    read = open_plans if open else page_of_plans
    return read(wiring, cursor, limit)


@router.get("/plans/{plan_id}", responses=answers(Plan, etag=True))
def get_plan(request: Request, wiring: Wired, plan_id: str, _: Reader) -> Response:
    """One stored plan, by its id or a beginning that it alone has.

    Of a plan that still spends probes, or that came to nothing, how it stands.
    """
    name = plan_id_of(wiring, plan_id, "plan_id")
    try:
        text = wiring.store.get_plan(name).model_dump_json()
    except NotFoundError:
        task = study_of(wiring, name)
        if task is None:
            raise
        text = json.dumps(state_of(task))
    return with_etag(request, text)


@router.get("/plans/{plan_id}/explain")
def explain_plan(
    wiring: Wired,
    plan_id: str,
    _: Reader,
    rank: Annotated[int, Query()] = 1,
    versus: Annotated[int | None, Query()] = None,
) -> Explained:
    """Explains the layout of this rank, or compares it with the layout of rank `versus`."""
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id, "plan_id"))
    lines, changed = explain(plan, rank, versus), {}
    if versus is not None:
        old, new = entry_of(plan, versus, "versus").layout, entry_of(plan, rank).layout
        changes = changed_fields(old, new).items()
        changed = {name: [getattr(old, name), value] for name, value in changes}
    return Explained(id=plan.id, rank=rank, versus=versus, lines=lines, changed=changed)


@router.get("/plans/{plan_id}/events", responses=ANSWER)
def get_events(
    request: Request,
    wiring: Wired,
    plan_id: str,
    _: Reader,
    last_event_id: Annotated[
        str | None, Header(max_length=400, description="The last `study` event that was received.")
    ] = None,
) -> Response:
    """Server-sent events: `study` for every step of a study, `probe`, and `done` at the end.

    A `probe` event is sent for every change of a probe. `study` events are numbered; with
    `Last-Event-ID` they go on after it.
    """
    after = int(last_event_id) if last_event_id and NUMBER.fullmatch(last_event_id) else 0
    task = study_of(wiring, plan_id)
    if task is None:
        wiring.store.get_plan(plan_id)

    def read() -> Snapshot:
        nonlocal after
        if task is None:
            probes = probes_of(wiring, plan_id)
            ended = not any(record.state in OPEN for record in probes)
            return of_plan(plan_id, probes, DONE if ended else None)
        state, events = wiring.tasks.get(plan_id).state, wiring.tasks.events(plan_id, after)
        after = events[-1].number if events else after
        ended_as = None if state in OPEN else state
        return of_plan(plan_id, probes_of(wiring, plan_id), ended_as, events)

    return stream(request, read)


@router.delete("/plans/{plan_id}")
def cancel_plan(wiring: Wired, plan_id: str, _: Planner) -> PlanState:
    """Cancels what still runs for a plan: its study, its queued and running probes.

    A plan that was answered stays, and `message` says so. 403: another key asked for it, and this
    one is no `admin`.
    """
    state, cancelled, message = end_plan(wiring, plan_id)
    return PlanState(id=plan_id, status=state, cancelled_probes=cancelled, message=message)
