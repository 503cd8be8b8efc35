"""A plan as the database keeps it, made without anything that a database needs.

So a process that has opened the database can store what another one made, and know nothing of
plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.specs.job import Job
    from planner.specs.plan import Plan, RankedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLabels:
    """What a stored plan is found by.

    job_hash: of the job without its id and labels, so that equal questions have equal hashes.
    status: "done"; "cancelled" for the best so far of a study that somebody ended.
    asked_by: the key, as of a job of a queue.
    """

    job_hash: str
    model: str
    gpu: str
    seq_len: int
    global_batch_size: int
    trainer: str
    status: str = "done"
    asked_by: str | None = None

    @classmethod
    def of(
        cls, job: "Job", job_hash: str, status: str = "done", asked_by: str | None = None
    ) -> "PlanLabels":
        """Those of this job's plan."""
        return cls(
            job_hash=job_hash,
            model=job.model.name,
            gpu=job.cluster.gpu.name,
            seq_len=job.training.seq_len,
            global_batch_size=job.training.global_batch_size,
            trainer=job.training.trainer,
            status=status,
            asked_by=asked_by,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValues:
    """A plan as it is stored.

    winner: what is told of number one beside the labels, by column.
    layouts: the ranked layouts, by column.
    body: the plan as JSON.
    """

    id: str
    created_at: datetime
    labels: PlanLabels
    seed: int
    model_version: str
    calibration_id: str
    winner: Mapping[str, Any]
    layouts: tuple[Mapping[str, Any], ...]
    body: str

    @classmethod
    def of(cls, plan: "Plan", labels: PlanLabels) -> "PlanValues":
        """Those of this plan."""
        winner = plan.ranked[0]
        on_paper = winner.estimate.tokens_per_second_per_gpu
        return cls(
            id=plan.id,
            created_at=datetime.fromisoformat(plan.created_at),
            labels=labels,
            seed=plan.seed,
            model_version=plan.model_version,
            calibration_id=plan.calibration_id,
            winner={
                "num_gpus": winner.num_gpus,
                "layout": winner.layout.short(),
                "tokens_per_second_per_gpu": None
                if on_paper is None
                else on_paper * winner.expected_speedup,
            },
            layouts=tuple(map(_layout_values, plan.ranked)),
            body=plan.model_dump_json(),
        )


def _layout_values(entry: "RankedLayout") -> dict[str, Any]:
    estimate = entry.estimate
    return {
        "rank": entry.rank,
        "layout": entry.layout.model_dump(mode="json"),
        "num_gpus": entry.num_gpus,
        "source": entry.source,
        "step_seconds": estimate.step_seconds,
        "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
        "device_bytes": estimate.device_bytes,
        "oom_probability": estimate.oom_probability,
    }
