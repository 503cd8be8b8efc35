"""Plans as both edges list and look them up: stored ones, and those that probes are still spent
on.
"""

from collections.abc import Mapping
from typing import Any, Literal

from api.jobs.records import named_in
from api.storage.common import cursor_of
from api.wiring import Wiring
from planner.errors import Fault, NotFoundError, SpecError
from planner.ports import PlanPage, PlanSummary, TaskFilter, TaskRecord
from planner.specs.plan import Plan, RankedLayout

OPEN: tuple[Literal["queued", "running"], ...] = ("queued", "running")
LEFT_OUT = ("search", "probe", "layout", "measured")  # of a plan's job: what no single layout has


def page_of_plans(wiring: Wiring, cursor: str | None, limit: int) -> PlanPage:
    """Plans and open studies under one cursor: both are in order of (created_at, id). A study's
    plan takes its place when it is made.
    """
    stored = wiring.store.list_plans(cursor, limit)
    studies = [
        wiring.tasks.list(TaskFilter(kind="study", state=state), cursor, limit) for state in OPEN
    ]
    ids = {item.id for item in stored.items}
    lines = [
        *stored.items,
        *(_line_of(task) for page in studies for task in page.items if task.id not in ids),
    ]
    lines.sort(key=lambda line: (line.created_at, line.id), reverse=True)
    more = len(lines) > limit or any((stored.next_cursor, *(page.next_cursor for page in studies)))
    last = lines[:limit][-1] if more else None
    return PlanPage(
        items=tuple(lines[:limit]),
        next_cursor=None if last is None else cursor_of(last.created_at, last.id),
    )


def _line_of(study: TaskRecord) -> PlanSummary:
    named = named_in(study)
    return PlanSummary(
        id=study.id,
        created_at=study.created_at,
        model=named.model,
        gpu=named.gpu,
        num_gpus=named.num_gpus,
        layout=None,
        tokens_per_second_per_gpu=None,
        status=study.state,
        model_version=None,
    )


def study_of(wiring: Wiring, plan_id: str) -> TaskRecord | None:
    """The study that makes, or made, this plan; None for a plan on paper."""
    try:
        task = wiring.tasks.get(plan_id)
    except NotFoundError:
        return None
    return task if task.kind == "study" else None


def state_of(study: TaskRecord) -> dict[str, Any]:
    """How a plan stands that is not made yet, or came to nothing."""
    return {
        "id": study.id,
        "status": study.state,
        "progress": study.progress,
        "failure": study.failure,
        "message": study.message,
    }


def entry_of(plan: Plan, rank: int, field: str = "rank") -> RankedLayout:
    """The layout of this rank. Raises SpecError for a rank that is not there."""
    entry = next((entry for entry in plan.ranked if entry.rank == rank), None)
    if entry is None:
        raise SpecError(
            Fault(field, rank, f"the plan ranks 1 to {len(plan.ranked)}", "choose one of them")
        )
    return entry


def job_of(plan: Plan, entry: RankedLayout) -> dict[str, Any]:
    """The job that prices, plays out or measures one of a plan's layouts, at the size that it was
    found at.
    """
    job = {key: value for key, value in plan.job.items() if key not in LEFT_OUT}
    if isinstance(job["cluster"], Mapping):
        job["cluster"] = {**job["cluster"], "num_gpus": entry.num_gpus}
    return {**job, "layout": entry.layout.model_dump(mode="json")}
