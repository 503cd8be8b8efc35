"""Ending what runs for a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.api.asker import asker
from planner.api.jobs.plans import study_of
from planner.api.jobs.probes import probes_of
from planner.api.storage.job_records import OPEN, ProbeRecord, TaskRecord
from planner.api.wiring import Wiring
from planner.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A cancelled job. study: as it stands now; None of a plan on paper."""

    study: TaskRecord | None
    probes: Sequence[ProbeRecord]
    message: str


def end_plan(wiring: Wiring, plan_id: str) -> _Ended:
    """Cancels the study of a plan and what is queued or runs of its probes.

    Raises NotFoundError; ForbiddenError where another key asked for any of them.
    """
    who, study = asker(), study_of(wiring, plan_id)
    owner = wiring.store.asked_by(plan_id) if study is None else study.asked_by
    was_open = study is not None and study.state in OPEN
    probes = [record for record in probes_of(wiring, plan_id) if record.state in OPEN]
    if was_open or not probes:
        who.check_owner("plan", plan_id, owner)
    for record in probes:
        who.check_owner("probe", record.id, record.asked_by)
    if study is not None:
        study = wiring.tasks.cancel(plan_id, who.name)
    ended = [wiring.probes.cancel(record.id, who.name) for record in probes]
    cancelled = [
        *(["its study"] if was_open else []),
        *([counted(len(ended), "probe")] if ended else []),
    ]
    message = (
        f"cancelled: {' and '.join(cancelled)}"
        if cancelled
        else "nothing was running for it: nothing was cancelled, and what is stored stays"
    )
    return _Ended(study=study, probes=ended, message=message)
