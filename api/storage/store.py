"""Plans and estimates in SQL, for SQLite and PostgreSQL alike."""

import json
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from planner.api.identity import asker, hash_of_job
from planner.api.storage.audit import note
from planner.api.storage.common import (
    TableStore,
    flush_new,
    is_id,
    plain_text,
    readable,
    record_of,
    unknown,
)
from planner.api.storage.job_records import EndState
from planner.api.storage.records import PlanLine, StoredEstimate
from planner.api.storage.room import check_quota
from planner.api.storage.tables import FIGURES, EstimateRow, PlanLayoutRow, PlanRow
from planner.api.storage.transactions import reading, writing
from planner.cost.pipeline.recently_used import RecentlyUsed
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.plan import Plan, RankedLayout

MOST_PLANS = 64  # kept in memory


class SqlStore(TableStore[PlanLine]):
    """Keeps plans and estimates."""

    table, what, where = PlanRow, "plan", "`planner-cli plans` lists them"
    columns = tuple(name for name in PlanLine.model_fields if hasattr(PlanRow, name))

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._plans: RecentlyUsed[str, Plan] = RecentlyUsed(MOST_PLANS)

    def item(self, row: PlanRow) -> PlanLine:
        return PlanLine.model_validate(row)

    def save_plan(self, plan: Plan, job: Job) -> None:
        """Stores the plan of a job under its id, for the person who asks.

        Raises ConflictError when the id is taken, QuotaError for one plan too many.
        """
        who = asker()
        with writing(self.engine) as session:
            check_quota(session, who, plans=1)
            add_plan(session, plan, job, "done", who.name)
            note(session, who.name, "plan.made", plan.id)

    def check_plans_left(self) -> None:
        """Raises QuotaError where who asks has no plan left today, before one is computed."""
        who = asker()
        if who.quota is not None:
            with reading(self.engine) as session:
                check_quota(session, who, plans=1)

    def get_plan(self, plan_id: str) -> Plan:
        """The plan as it was stored. Raises NotFoundError.

        A stored plan never changes, so the newest ones that were asked for are not read again.
        """
        known = self._plans.get(plan_id)
        if known is not None:
            return known
        with reading(self.engine) as session:
            row = self.row(session, plan_id)
            with readable("plan", row.id):
                plan = Plan.model_validate(row.body)
        self._plans.put(plan_id, plan)
        return plan

    def save_estimates(self, estimates: Sequence[StoredEstimate]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        with writing(self.engine) as session:
            session.add_all(_estimate_row(stored) for stored in estimates)
            flush_new(session, ", ".join(stored.id for stored in estimates[:3]))

    def get_estimate(self, estimate_id: str) -> StoredEstimate:
        """The estimate as it was stored. Raises NotFoundError."""
        with reading(self.engine) as session:
            row = session.get(EstimateRow, estimate_id) if is_id(estimate_id) else None
            if row is None:
                raise unknown(
                    "estimate", estimate_id, "give the one in the location of POST /estimate"
                )
            with readable("estimate", row.id):
                estimate = Estimate.model_validate(row.estimate)
            return record_of(StoredEstimate, row, estimate=estimate)


def add_plan(
    session: Session, plan: Plan, job: Job, status: EndState, asked_by: str | None
) -> None:
    """Adds the plan and its ranked layouts to a transaction. Raises ConflictError.

    status: "cancelled" for the best so far of a study that somebody ended.
    """
    winner = plan.ranked[0]
    on_paper = winner.estimate.tokens_per_second_per_gpu
    row = PlanRow(
        id=plan.id,
        created_at=datetime.fromisoformat(plan.created_at),
        job_hash=hash_of_job(job.request),
        model=plain_text(job.model.name),
        gpu=plain_text(job.cluster.gpu.name),
        num_gpus=winner.num_gpus,
        seq_len=job.training.seq_len,
        global_batch_size=job.training.global_batch_size,
        trainer=job.training.trainer,
        layout=winner.layout.short(),
        tokens_per_second_per_gpu=None if on_paper is None else on_paper * winner.expected_speedup,
        status=status,
        seed=plan.seed,
        model_version=plan.model_version,
        calibration_id=plan.calibration_id,
        asked_by=None if asked_by is None else plain_text(asked_by),
        body=json.loads(plan.model_dump_json()),
    )
    session.add(row)
    flush_new(session, plan.id)
    session.add_all(_layout_row(plan.id, entry) for entry in plan.ranked)


def _layout_row(plan_id: str, entry: RankedLayout) -> PlanLayoutRow:
    return PlanLayoutRow(
        plan_id=plan_id,
        rank=entry.rank,
        layout=entry.layout.model_dump(mode="json"),
        num_gpus=entry.num_gpus,
        source=entry.source,
        oom_probability=entry.estimate.oom_probability,
        **{name: getattr(entry.estimate, name) for name in FIGURES},
    )


def _estimate_row(stored: StoredEstimate) -> EstimateRow:
    return EstimateRow(
        id=stored.id,
        created_at=stored.created_at,
        job_hash=hash_of_job(stored.job),
        job=json.loads(json.dumps(stored.job, default=str)),
        estimate=json.loads(stored.estimate.model_dump_json()),
        model_version=stored.estimate.model_version,
        calibration_id=stored.estimate.calibration_id,
    )
