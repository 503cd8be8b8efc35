"""The library's functions: what `import planner` offers, without a database or a service.

The words are the job's: `planner.recommend(model="llama3-8b", cluster={"gpu": "h100-sxm-80gb",
"num_gpus": 8}, training={"seq_len": 8192, "global_batch_size": 64})`. Nothing is stored.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from planner.errors import Fault, SpecError
from planner.estimates import estimate_job
from planner.estimates import estimate_jobs as priced
from planner.intake.current import complete
from planner.intake.jobs import read_job
from planner.ports import Ports
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:  # it imports Optuna
    from planner.study.of_plan import Study

Words = Mapping[str, Any]


def recommend(
    job: Job | Words | None = None,
    /,
    *,
    model: str | Words | ModelSpec | None = None,
    cluster: str | Words | ClusterSpec | None = None,
    training: Words | TrainingSpec | None = None,
    layout: Words | Layout | None = None,
    search: Words | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The layouts that train fastest and fit, best first.

    job: a whole job, as `read_current` gives it or as a mapping; otherwise its parts by name.
    layout: the one run today, which the plan compares with.  search: the contract's `search`
    mapping (top_k, fix, allow, objective, prefer, seed).  progress: called with a line now and
    then.

    Raises SpecError for a malformed request, InfeasibleError where nothing fits, UnsupportedError
    where the trainer cannot run the job at all.
    """
    from planner.plan.recommend import recommend as planned

    parts = {
        "model": model,
        "cluster": cluster,
        "training": training,
        "layout": layout,
        "search": search,
    }
    asked = _job(job, parts)
    return planned(asked, ports=Ports(clock=_Clock(), ids=_Named(asked)), progress=progress)


def estimate(
    job: Job | Words | None = None,
    /,
    *,
    model: str | Words | ModelSpec | None = None,
    cluster: str | Words | ClusterSpec | None = None,
    training: Words | TrainingSpec | None = None,
    layout: Words | Layout | None = None,
) -> Estimate:
    """What one layout reaches: step time, memory, intervals; an impossible layout is an answer with
    `valid` false.

    Raises SpecError for a malformed request, or one without a layout.
    """
    parts = {"model": model, "cluster": cluster, "training": training, "layout": layout}
    return estimate_job(_job(job, parts))


def estimate_many(jobs: Iterable[Job | Words]) -> list[Estimate]:
    """One estimate a job, in order. Raises SpecError for the first malformed job."""
    return priced([_job(job, {}) for job in jobs])


def study_of(plan: Plan, values: str | None = None) -> "Study":
    """The Optuna study of a plan, in memory, for Optuna's own tools: `planner.study.of_plan`.

    values: `predicted`, `measured`, `time-memory` or `time-cost`; unless given, what was measured
    where the plan spent probes, else what was predicted.  `optuna.copy_study` writes it elsewhere.

    Raises SpecError for other values, and for measured ones of a plan without probes.
    """
    from planner.study.of_plan import study_of as made

    return made(plan, values)


def _job(job: Job | Words | None, parts: Mapping[str, object]) -> Job:
    given = {key: _as_written(value) for key, value in parts.items() if value is not None}
    if job is None:
        return read_job(given)
    if given:
        names = ", ".join(given)
        raise SpecError(Fault("job", names, "was given beside a whole job", "put it into the job"))
    if isinstance(job, Job):
        return job
    written = complete(job) if job.get("current") is not None else job
    return read_job({key: _as_written(value) for key, value in written.items()})


def _as_written(value: object) -> object:
    """Layouts and trainings as the mappings that mean them; other specs are taken as they are."""
    if isinstance(value, Layout | TrainingSpec):
        return value.model_dump(mode="json", exclude_unset=True)
    return value


class _Clock:
    def now(self) -> datetime:
        return datetime.now(UTC)


class _Named:
    """The same job has the same id."""

    def __init__(self, job: Job) -> None:
        text = json.dumps(job.request, sort_keys=True, default=str)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{self.digest}"
