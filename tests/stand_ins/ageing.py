"""Makes what a database holds older: leases and delays then end as if that time had passed."""

from datetime import timedelta

from sqlalchemy import Engine, select

from planner.api.storage.tables import KeptAnswer, ProbeRecord, TaskRecord
from planner.api.storage.transactions import writing

MOMENTS = ("heartbeat_at", "lease_until", "not_before", "started_at")


def age(engine: Engine, seconds: float) -> None:
    """Moves all moments of all jobs and kept answers so far into the past."""
    with writing(engine) as session:
        for kept in session.scalars(select(KeptAnswer)):
            kept.created_at -= timedelta(seconds=seconds)
        for table in (ProbeRecord, TaskRecord):
            for row in session.scalars(select(table)):
                for name in MOMENTS:
                    moment = getattr(row, name)
                    if moment is not None:
                        setattr(row, name, moment - timedelta(seconds=seconds))
