"""Lists as tables and lines: the catalogue, stored plans, jobs of the queues, the audit trail."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from planner.api.render.figures import NONE, rate
from planner.api.render.grid import Column, Columns, grid, listed, number
from planner.api.storage.job_records import QueuedJob
from planner.api.storage.records import AuditEvent, PlanLine
from planner.units import TERA, format_bandwidth, format_bytes, format_count

COLUMNS: Columns[PlanLine] = (
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
    return listed(COLUMNS, plans, width)


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


def catalog_table(kind: str, lines: Sequence[dict[str, Any]], width: int) -> Text:
    """One row an entry; of `defaults` one column a trainer, because there are many fields.

    On narrow terminals text that does not fit stands below its row, and the last columns are left
    out.
    """
    if kind == "defaults":
        return _defaults_table(lines, width)
    keys = list(lines[0]) if lines else []
    columns = []
    for index, key in enumerate(keys):
        right = not isinstance(lines[0][key], str)
        text = not right and key != "name"
        drop = None if index == 0 else len(keys) - index
        columns.append(Column(name=_title(key), right=right, wraps=text, below=text, drop=drop))
    return grid(columns, [[_shown(key, line[key]) for key in keys] for line in lines], width)


def _defaults_table(lines: Sequence[dict[str, Any]], width: int) -> Text:
    """Trainers that do not fit beside the others follow in a table of their own."""
    keys = [key for key in lines[0] if key != "name"]
    parts, taken = [], 0
    while taken < len(lines):
        some = len(lines) - taken
        while some > 1 and not _fits(keys, lines[taken : taken + some], width):
            some -= 1
        parts.append(_trainers(keys, lines[taken : taken + some], width))
        taken += some
    return Text("\n\n").join(parts)


def _fits(keys: Sequence[str], lines: Sequence[dict[str, Any]], width: int) -> bool:
    return max(len(line) for line in _trainers(keys, lines, sys.maxsize).plain.split("\n")) <= width


def _trainers(keys: Sequence[str], lines: Sequence[dict[str, Any]], width: int) -> Text:
    columns = [Column(name="field"), *(Column(name=str(line["name"])) for line in lines)]
    rows = [(key, *(_shown(key, line.get(key)) for line in lines)) for key in keys]
    return grid(columns, rows, width)


def _title(key: str) -> str:
    for suffix in ("_bytes_per_second", "_flops_per_second", "_bytes", "_watts"):
        if key.endswith(suffix):
            return key.removesuffix(suffix).replace("_", " ")
    return key.removeprefix("num_").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_flops_per_second"):
        return f"{value / TERA:,.0f} TFLOP/s" if value >= TERA else f"{value / TERA:.2g} TFLOP/s"
    if key.endswith("_bytes_per_second"):
        return format_bandwidth(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_watts"):
        return f"{value:.0f} W"
    if key.endswith("parameters"):
        return format_count(value)
    return f"{value:,}" if isinstance(value, int) and key != "hidden_size" else str(value)
