"""Plans and estimates in SQL, for SQLite and PostgreSQL alike."""

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Engine, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.errors import fault
from api.identity import hash_of_job
from api.storage.engine import store_errors
from api.storage.tables import EstimateRow, PlanLayoutRow, PlanRow
from planner.errors import ConflictError, NotFoundError
from planner.ports import PlanLabels, PlanPage, PlanSummary, StoredEstimate
from planner.specs.estimate import Estimate
from planner.specs.plan import Plan, RankedLayout

MAX_PAGE = 200
DONE = "done"
SHOWN_CHARACTERS = 200


class SqlStore:
    """A PlanStore and an EstimateStore on one engine; see `planner.ports` for what each method promises."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(planner_writes=True)

    def save_plan(self, plan: Plan, labels: PlanLabels) -> None:
        """Stores plan and layouts in one transaction."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add(_plan_row(plan, labels))
            _flush_new(session, plan.id)
            session.add_all(_layout_row(plan.id, entry) for entry in plan.ranked)
            session.commit()

    def get_plan(self, plan_id: str) -> Plan:
        """The plan as it was stored."""
        with store_errors(self.engine), Session(self.engine) as session:
            row = session.get(PlanRow, plan_id) if _is_id(plan_id) else None
            if row is None:
                raise NotFoundError(f"no plan of id {plan_id[:SHOWN_CHARACTERS]!r}; give the id that `recommend` printed")
            return Plan.model_validate(row.body)

    def list_plans(self, cursor: str | None = None, limit: int = 50) -> PlanPage:
        """Newest first, by (created_at, id), which later plans never disturb."""
        query = select(
            PlanRow.id, PlanRow.created_at, PlanRow.model, PlanRow.gpu, PlanRow.num_gpus, PlanRow.layout,
            PlanRow.tokens_per_second_per_gpu, PlanRow.status, PlanRow.model_version,
        ).order_by(PlanRow.created_at.desc(), PlanRow.id.desc())  # fmt: skip
        if cursor is not None:
            query = query.where(tuple_(PlanRow.created_at, PlanRow.id) < tuple_(*_read_cursor(cursor)))
        if not 1 <= limit <= MAX_PAGE:
            raise fault("limit", limit, f"must be 1 to {MAX_PAGE}", "ask for more pages instead")
        with store_errors(self.engine), Session(self.engine) as session:
            rows = session.execute(query.limit(limit + 1)).all()
        items = tuple(PlanSummary(**row._mapping) for row in rows[:limit])
        return PlanPage(items=items, next_cursor=_cursor(items[-1]) if len(rows) > limit else None)

    def save_estimates(self, estimates: Sequence[StoredEstimate]) -> None:
        """Stores all or none."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add_all(_estimate_row(stored) for stored in estimates)
            _flush_new(session, ", ".join(stored.id for stored in estimates[:3]))
            session.commit()

    def get_estimate(self, estimate_id: str) -> StoredEstimate:
        """The estimate as it was stored."""
        with store_errors(self.engine), Session(self.engine) as session:
            row = session.get(EstimateRow, estimate_id) if _is_id(estimate_id) else None
            if row is None:
                raise NotFoundError(f"no estimate of id {estimate_id[:SHOWN_CHARACTERS]!r}; give the one in the location of POST /estimate")
            return StoredEstimate(id=row.id, created_at=row.created_at, job=row.job, estimate=Estimate.model_validate(row.estimate))


def _flush_new(session: Session, what: str) -> None:
    try:
        session.flush()
    except IntegrityError:
        raise ConflictError(f"{what} exists already") from None


def _is_id(text: str) -> bool:
    """Ours are printable ASCII; PostgreSQL refuses to look for anything with a NUL in it."""
    return text.isascii() and text.isprintable()


def _text(value: str) -> str:
    """Text that both databases can hold: no NUL, no half of a surrogate pair."""
    return value.replace("\0", "").encode("utf-8", "replace").decode("utf-8")[:SHOWN_CHARACTERS]


def _plan_row(plan: Plan, labels: PlanLabels) -> PlanRow:
    winner = plan.ranked[0]
    return PlanRow(
        id=plan.id,
        created_at=datetime.fromisoformat(plan.created_at),
        job_hash=labels.job_hash,
        model=_text(labels.model),
        gpu=_text(labels.gpu),
        num_gpus=winner.num_gpus,
        layout=winner.layout.short(),
        tokens_per_second_per_gpu=winner.estimate.tokens_per_second_per_gpu,
        status=DONE,
        seed=plan.seed,
        model_version=plan.model_version,
        calibration_id=plan.calibration_id,
        body=json.loads(plan.model_dump_json()),
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


def _layout_row(plan_id: str, entry: RankedLayout) -> PlanLayoutRow:
    estimate = entry.estimate
    return PlanLayoutRow(
        plan_id=plan_id, rank=entry.rank, layout=entry.layout.model_dump(mode="json"), num_gpus=entry.num_gpus, source=entry.source,
        step_seconds=estimate.step_seconds, tokens_per_second_per_gpu=estimate.tokens_per_second_per_gpu,
        peak_allocated_bytes=estimate.peak_allocated_bytes, peak_reserved_bytes=estimate.peak_reserved_bytes,
        device_bytes=estimate.device_bytes, oom_probability=estimate.oom_probability,
    )  # fmt: skip


def _cursor(last: PlanSummary) -> str:
    return base64.urlsafe_b64encode(f"{last.created_at.isoformat()}|{last.id}".encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[datetime, str]:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        moment, _, plan_id = text.partition("|")
        created_at = datetime.fromisoformat(moment)
    except (ValueError, binascii.Error):
        created_at, plan_id = datetime.min, ""
    if created_at.tzinfo is None or not plan_id or not _is_id(plan_id):
        raise fault("cursor", cursor, "is not a cursor that this service gave", "leave it out to start at the newest plan")
    return created_at, plan_id
