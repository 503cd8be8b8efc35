"""The library's functions: what `import planner` offers, without a database or a service.

The words are the job's: `planner.recommend(model="llama3-8b", cluster={"gpu": "h100-sxm-80gb",
"num_gpus": 8}, training={"seq_len": 8192, "global_batch_size": 64})`. Nothing is stored.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.charts.table import Tabled
from planner.errors import fault
from planner.estimates import estimate_job
from planner.estimates import estimate_jobs as priced
from planner.intake.current import complete
from planner.intake.jobs import JobReader
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.plan import COLUMNS, Plan
from planner.specs.training import TrainingSpec
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:  # it imports Optuna
    from planner.study.of_plan import Study

Words = Mapping[str, Any]
SHOWN = ("job", "layout", "tok/s/GPU", "step", "memory", "fits")


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

    asked = _job(job, model=model, cluster=cluster, training=training, layout=layout, search=search)
    text = json.dumps(asked.request, sort_keys=True, default=str)
    plan_id = f"plan-{hashlib.sha256(text.encode()).hexdigest()[:12]}"  # equal jobs have equal ids
    return planned(asked, now=partial(datetime.now, UTC), progress=progress, plan_id=plan_id)


def estimate(
    job: Job | Words | None = None,
    /,
    *,
    model: str | Words | ModelSpec | None = None,
    cluster: str | Words | ClusterSpec | None = None,
    training: Words | TrainingSpec | None = None,
    layout: Words | Layout | None = None,
) -> Estimate:
    """Predicts one layout: step time, memory, intervals; an impossible layout is an answer with
    `valid` false.

    Raises SpecError for a malformed request, or one without a layout.
    """
    asked = _job(job, model=model, cluster=cluster, training=training, layout=layout)
    return estimate_job(asked)


class EstimateList(list[Estimate], Tabled):
    """Estimates of many jobs, in their order: a list that is also a table.

    jobs: what was asked, one an estimate.
    """

    def __init__(self, estimates: Iterable[Estimate], jobs: Iterable[Job]) -> None:
        super().__init__(estimates)
        self.jobs = list(jobs)

    def columns(self) -> dict[str, list[object]]:
        """Model, GPUs, layout and main figures as columns, SI; None where a layout is not legal."""
        rows = [
            {
                "id": one.id,
                "model": job.model.name,
                "num_gpus": job.cluster.num_gpus,
                "layout": "" if job.layout is None else job.layout.short(),
                "valid": one.valid,
                **{name: getattr(one, name) for name in COLUMNS},
                "violation": one.violations[0].rule if one.violations else None,
            }
            for one, job in zip(self, self.jobs, strict=True)
        ]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def _shown(self) -> tuple[str, dict[str, list[str]], str, str]:
        cells = [
            (
                f"{job.model.name}, {job.cluster.num_gpus:,} GPUs",
                "" if job.layout is None else job.layout.short(),
                f"{one.tokens_per_second_per_gpu or 0.0:,.0f}" if one.valid else "-",
                format_seconds(one.step_seconds or 0.0) if one.valid else "-",
                format_bytes(one.device_bytes or 0.0) if one.valid else "-",
                ("yes" if one.fits else "no") if one.valid else one.violations[0].rule,
            )
            for one, job in zip(self, self.jobs, strict=True)
        ]
        columns = zip(*cells, strict=True) if cells else [()] * len(SHOWN)
        named = dict(zip(SHOWN, map(list, columns), strict=True))
        return f"{len(self):,} estimates", named, "layout", "fits: within what a plan may use"


def estimate_many(jobs: Iterable[Job | Words]) -> EstimateList:
    """One estimate a job, in order, as a list that is also a table.

    Jobs that have a model, a cluster and a training in common are read and priced together.

    Raises SpecError for the first malformed job.
    """
    reader, known = JobReader(), dict[str, Any]()
    asked = [
        _with_shared_parts(job, known) if isinstance(job, Job) else _job(job, reader)
        for job in jobs
    ]
    return EstimateList(priced(asked), asked)


def _with_shared_parts(job: Job, known: dict[str, Any]) -> Job:
    """The job with parts of earlier ones where they are equal: by objects jobs are priced together.

    known: those parts by their text; the job's own are added.
    """
    parts = {name: getattr(job, name) for name in ("model", "cluster", "training")}
    shared = {
        name: known.setdefault(f"{name} {part.model_dump_json()}", part)
        for name, part in parts.items()
    }
    return job.model_copy(update=shared)


def study_of(plan: Plan, values: str | None = None) -> "Study":
    """The Optuna study of a plan, in memory, for Optuna's own tools: `planner.study.of_plan`.

    values: `predicted`, `measured`, `time-memory` or `time-cost`; unless given, what was measured
    where the plan spent probes, else what was predicted.  `optuna.copy_study` writes it elsewhere.

    Raises SpecError for other values, and for measured ones of a plan without probes.
    """
    from planner.study.of_plan import study_of as made

    return made(plan, values)


def _job(job: Job | Words | None, reader: JobReader | None = None, **parts: object) -> Job:
    """The job, or that of these parts; reader: the one of a batch."""
    reader = reader or JobReader()
    given = {key: _as_written(value) for key, value in parts.items() if value is not None}
    if job is None:
        return reader.read(given)
    if given:
        names = ", ".join(given)
        raise fault("job", names, "was given beside a whole job", "put it into the job")
    if isinstance(job, Job):
        return job
    written = complete(job) if job.get("current") is not None else job
    return reader.read({key: _as_written(value) for key, value in written.items()})


def _as_written(value: object) -> object:
    """Layouts and trainings as the mappings that mean them; other specs are taken as they are."""
    if isinstance(value, Layout | TrainingSpec):
        return value.model_dump(mode="json", exclude_unset=True)
    return value
