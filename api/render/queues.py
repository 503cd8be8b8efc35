"""Jobs of the queues and the audit trail as lines."""

from planner.api.storage.job_records import QueuedJob
from planner.api.storage.records import AuditEvent


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
