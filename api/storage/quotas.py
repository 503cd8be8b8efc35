"""Quotas of a key, counted in the transaction that stores its request."""

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from planner.api.asker import Asker
from planner.api.errors import QuotaError
from planner.api.storage.clock import database_time
from planner.api.storage.job_records import OPEN
from planner.api.storage.room import take_turns
from planner.api.storage.tables import PlanRow, ProbeRow, TaskRow
from planner.units import DAY

RETRY_DAILY_SECONDS, RETRY_QUEUE_SECONDS = 3600.0, 60.0


def check_quota(
    session: Session, asker: Asker, *, plans: int = 0, probes: int = 0, gpu_seconds: float = 0.0
) -> None:
    """Raises QuotaError where so much more would be too much. Others of the same key wait."""
    quota = asker.quota
    if quota is None:
        return
    take_turns(session, f"quota of {asker.name}")
    if plans:
        used = plans_today(session, asker.name)
        _check("plans_per_day", used, plans, quota.plans_per_day, RETRY_DAILY_SECONDS)
    if probes:
        used = queued_probes(session, asker.name)
        _check("queued_probes", used, probes, quota.queued_probes, RETRY_QUEUE_SECONDS)
    if gpu_seconds:
        spent = gpu_seconds_today(session, asker.name)
        _check(
            "gpu_seconds_per_day",
            spent,
            gpu_seconds,
            quota.gpu_seconds_per_day,
            RETRY_DAILY_SECONDS,
        )


def _check(name: str, used: float, more: float, limit: float, retry_after_seconds: float) -> None:
    if used + more > limit:
        raise QuotaError(name, used, more, limit, retry_after_seconds=retry_after_seconds)


def plans_today(session: Session, name: str) -> int:
    """Plans of the last 24 hours, and studies that make one."""
    recent = PlanRow.created_at > database_time(-DAY)
    made = select(func.count()).where(PlanRow.asked_by == name, recent)
    studied = select(func.count()).where(
        TaskRow.asked_by == name, TaskRow.kind == "study", TaskRow.state.in_(OPEN)
    )
    return (session.scalar(made) or 0) + (session.scalar(studied) or 0)


def queued_probes(session: Session, name: str) -> int:
    query = select(func.count()).where(ProbeRow.asked_by == name, ProbeRow.state == "queued")
    return session.scalar(query) or 0


def gpu_seconds_today(session: Session, name: str) -> float:
    """GPU-seconds used in the last 24 hours, and all that what is open may use.

    An open study or run of a sweep counts with its budget, its own probes then do not.
    """
    open_tasks = select(TaskRow.id).where(TaskRow.state.in_(OPEN))
    own = or_(ProbeRow.plan_id.is_(None), ProbeRow.plan_id.not_in(open_tasks))
    recent = or_(ProbeRow.state.in_(OPEN), ProbeRow.finished_at > database_time(-DAY))
    probes = select(func.sum(ProbeRow.gpu_seconds)).where(ProbeRow.asked_by == name, own, recent)
    tasks = select(func.sum(TaskRow.gpu_seconds)).where(
        TaskRow.asked_by == name, TaskRow.state.in_(OPEN)
    )
    return float(session.scalar(probes) or 0.0) + float(session.scalar(tasks) or 0.0)
