"""Lists of what is stored: jobs of the queues and the audit trail as lines, plans as a table."""

from collections.abc import Callable, Sequence

from rich.text import Text

from planner.api.render.figures import NONE, rate
from planner.api.render.grid import Column, grid, number
from planner.api.storage.job_records import QueuedJob
from planner.api.storage.records import AuditEvent, PlanLine

# each column with what it shows of a plan
COLUMNS: tuple[tuple[Column, Callable[[PlanLine], str]], ...] = (
    (Column(name="id"), lambda plan: plan.id),
    (Column(name="made (UTC)", drop=1), lambda plan: f"{plan.created_at:%Y-%m-%d %H:%M}"),
    (Column(name="model"), lambda plan: plan.model),
    (number("GPUs"), lambda plan: f"{plan.num_gpus:,}"),
    (Column(name="GPU", drop=2), lambda plan: plan.gpu),
    (Column(name="layout", wraps=True, below=True), lambda plan: plan.layout or NONE),
    (number("tok/s/GPU"), lambda plan: rate(plan.tokens_per_second_per_gpu)),
    (Column(name="state", drop=0), lambda plan: plan.status),
)


def plans_table(plans: Sequence[PlanLine], width: int) -> Text:
    """One line a plan; tok/s/GPU as expected of its number 1."""
    rows = [tuple(cell(plan) for _, cell in COLUMNS) for plan in plans]
    return grid([column for column, _ in COLUMNS], rows, width)


def job_line(job: QueuedJob) -> str:
    """One job: its id, state, what it is, who asked, and what it waits for or why it failed."""
    parts = [
        f"{job.id}  {job.kind} {job.state}  {job.about}",
        f"attempt {job.attempts} of {job.max_attempts}",
    ]
    if job.asked_by is not None:
        parts.append(f"asked by {job.asked_by}")
    if job.not_before is not None:
        parts.append(f"not before {job.not_before:%Y-%m-%d %H:%M:%S} UTC")
    if job.state == "running" and job.owner is not None:
        parts.append(f"on {job.owner.split(':')[0]}")
    if job.failure is not None:
        parts.append(job.failure)
    if job.message:
        parts.append(job.message)
    return "; ".join(parts)


def audit_line(event: AuditEvent) -> str:
    """One event: when, who, what, for how many GPU-seconds."""
    spent = "" if event.gpu_seconds is None else f"  {event.gpu_seconds:,.1f} GPU-seconds"
    detail = f"  {event.detail}" if event.detail else ""
    who = event.asked_by or "unknown"
    return f"{event.at:%Y-%m-%d %H:%M:%S}  {who}  {event.action}  {event.subject}{spent}{detail}"
