"""Plans as both edges list and find them: stored ones, and those that probes are still spent on."""

from collections.abc import Mapping
from typing import Any

from planner.api.storage.common import cursor_of, told
from planner.api.storage.job_records import OPEN, TaskRecord
from planner.api.storage.records import Page, PlanLine
from planner.api.wiring import Wiring
from planner.errors import NotFoundError, SpecError, fault
from planner.intake.jobs import read_job
from planner.specs.layout import Layout
from planner.specs.plan import Plan, RankedLayout

NOT_OF_ONE_LAYOUT = ("search", "probe", "layout", "measured")  # fields of a plan's job


def page_of_plans(wiring: Wiring, cursor: str | None, limit: int) -> Page[PlanLine]:
    """Plans and open studies in one list, both by (created_at, id).

    A study's plan has the id and the time of its study, so it takes its place when it is made.
    """
    stored, studies = wiring.store.list(cursor, limit), open_plans(wiring, cursor, limit)
    ids = {item.id for item in stored.items}
    lines = [*stored.items, *(line for line in studies.items if line.id not in ids)]
    lines.sort(key=lambda line: (line.created_at, line.id), reverse=True)
    more = len(lines) > limit or stored.next_cursor or studies.next_cursor
    last = lines[:limit][-1] if more else None
    return Page(
        items=lines[:limit],
        next_cursor=None if last is None else cursor_of(last.created_at, last.id),
    )


def open_plans(wiring: Wiring, cursor: str | None, limit: int) -> Page[PlanLine]:
    """Plans that probes are still spent on, newest first."""
    studies = wiring.tasks.list(cursor, limit, kind="study", state=OPEN)
    return Page(items=[*map(_line_of, studies.items)], next_cursor=studies.next_cursor)


def _line_of(study: TaskRecord) -> PlanLine:
    model, gpu, num_gpus = subject_of(study)
    return PlanLine(
        id=study.id,
        created_at=study.created_at,
        model=model,
        gpu=gpu,
        num_gpus=num_gpus,
        status=study.state,
    )


def subject_of(study: TaskRecord) -> tuple[str, str, int]:
    """(model, GPU, number of GPUs) that a study's job names.

    Of a job that no longer parses (another version stored it, a model is gone): what was typed.
    """
    try:
        job = read_job(study.request, allow_files=False)
    except SpecError:
        model, cluster = study.request.get("model"), study.request.get("cluster")
        machine = cluster if isinstance(cluster, Mapping) else {"gpu": cluster}
        sizes = machine.get("num_gpus")
        sizes = sizes if isinstance(sizes, list) else [sizes]
        numbers = [size for size in sizes if isinstance(size, int)]
        return _name_typed(model), _name_typed(machine.get("gpu")), max(numbers, default=0)
    return job.model.name, job.cluster.gpu.name, job.cluster.num_gpus


def _name_typed(value: object) -> str:
    """The name of a model or GPU, given as text or inside a mapping."""
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else "unknown"


def study_of(wiring: Wiring, plan_id: str) -> TaskRecord | None:
    """The study that makes, or made, this plan; None for a plan without probes."""
    try:
        task = wiring.tasks.get(plan_id)
    except NotFoundError:
        return None
    return task if task.kind == "study" else None


def state_of(study: TaskRecord) -> dict[str, Any]:
    """The state of a plan that is not made yet, or whose study failed."""
    shown = told(study, "progress", "failure", "message")
    return {"id": study.id, "status": study.state, **shown}


def entry_of(plan: Plan, rank: int, field: str = "rank") -> RankedLayout:
    """The layout of this rank. Raises SpecError for a rank that is not there."""
    entry = next((entry for entry in plan.ranked if entry.rank == rank), None)
    if entry is None:
        raise fault(field, rank, f"the plan ranks 1 to {len(plan.ranked)}", "choose one of them")
    return entry


def job_of(plan: Plan, entry: RankedLayout) -> dict[str, Any]:
    """The job that prices, simulates or measures one of a plan's layouts, at its own size."""
    return job_with_layout(plan.job, entry.layout, entry.num_gpus)


def job_with_layout(request: Mapping[str, Any], layout: Layout, num_gpus: int) -> dict[str, Any]:
    """The job of a search as one with this layout on so many GPUs."""
    values = job_without_layout(request)
    if isinstance(values["cluster"], Mapping):
        values["cluster"] = {**values["cluster"], "num_gpus": num_gpus}
    return {**values, "layout": layout.model_dump(mode="json")}


def job_without_layout(request: Mapping[str, Any]) -> dict[str, Any]:
    """The job as it was asked, without what only a search or a run needs."""
    return {key: value for key, value in request.items() if key not in NOT_OF_ONE_LAYOUT}
