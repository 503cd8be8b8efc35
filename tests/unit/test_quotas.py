"""What one key may use, counted in SQL; whose things are whose."""

from typing import Any

import pytest
from sqlalchemy import Engine

from planner.api.errors import ForbiddenError, QuotaError
from planner.api.identity import Asker, asker
from planner.api.settings import Quota
from planner.api.storage.job_records import JobEnd, Lease
from planner.api.storage.room import check_quota
from planner.api.storage.tasks import SqlProbeStore, SqlTaskStore
from planner.api.storage.transactions import writing
from tests.stand_ins.records import probe_record, task_record

LEASE = Lease(owner="us", seconds=60.0)
QUOTA = Quota(plans_per_day=2, queued_probes=2, gpu_seconds_per_day=100.0)
ANN = Asker("ann", admin=False, quota=QUOTA)


def may(engine: Engine, who: Asker = ANN, **more: Any) -> str | None:
    """The quota that stands against it."""
    try:
        with writing(engine) as session:
            check_quota(session, who, **more)
    except QuotaError as error:
        return error.name
    return None


def seconds_left(engine: Engine, seconds: float) -> bool:
    """Whether so many may still be used, and no more."""
    more = may(engine, gpu_seconds=seconds + 0.1)
    return may(engine, gpu_seconds=seconds) is None and more == "gpu_seconds_per_day"


def test_an_open_study_counts_with_its_budget_and_then_with_its_probes(memory: Engine) -> None:
    tasks, probes = SqlTaskStore(memory), SqlProbeStore(memory)
    tasks.add([task_record(asked_by="ann", gpu_seconds=70.0)])
    probes.add([probe_record(plan_id="plan-1", asked_by="ann", gpu_seconds=40.0)])
    assert seconds_left(memory, 30.0)
    assert (may(memory, plans=1), may(memory, plans=2)) == (None, "plans_per_day")
    tasks.finish(tasks.claim(LEASE), JobEnd(state="done", gpu_seconds=40.0))
    assert seconds_left(memory, 60.0)
    assert may(memory, Asker("boss", admin=True), gpu_seconds=1e12, plans=10**6) is None


def test_a_key_changes_its_own_and_an_admin_everything() -> None:
    ANN.check_owner("probe", "probe-1", "ann")
    Asker("boss", admin=True).check_owner("probe", "probe-1", "ann")
    for owner in ("bob", None):
        with pytest.raises(ForbiddenError, match="not by ann"):
            ANN.check_owner("probe", "probe-1", owner)
    assert asker().name.startswith("cli:")
    assert asker().admin
