"""The layouts that a run of a sweep measures of each job, why, and within which budget."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from planner.api.errors import lines_of
from planner.api.jobs.plans import job_with_layout
from planner.api.jobs.probes import RequestedProbe, probe_of_job
from planner.api.jobs.schedule import is_within
from planner.api.storage.job_records import ProbeRecord
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.price import Pricer
from planner.errors import PlannerError
from planner.plan.recommend import recommend
from planner.rules import legal_mask
from planner.rules.base import Context
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.measurement import question_hash
from planner.specs.sweep import SweepSpec
from planner.trainers.registry import resolve_layout

CANDIDATES = 30  # best layouts among which the least sure are sought


@dataclass(eq=False, kw_only=True)
class Item:
    """One layout that a run measures, and why.

    requested: its probe; or why it cannot be run.
    predicted_seconds: of a step; None where the model has no number for it.
    attempts: its probes that ended, oldest first. avoid: hosts that the next one keeps off, if it
        confirms what was measured on them, and otherwise while enough others are left.
    line: what is reported of it, once it is known.
    confirms: it runs once more elsewhere, because its host is suspected to be slow.
    """

    job: Job
    layout: Layout
    why: str
    predicted_seconds: float | None
    requested: RequestedProbe | str
    attempts: list[ProbeRecord] = field(default_factory=list)
    avoid: frozenset[str] = frozenset()
    line: dict[str, Any] | None = None
    confirms: bool = False

    @cached_property
    def key(self) -> tuple[str, str]:
        """(question, layout) of the request."""
        return question_hash(self.job), self.layout.short()


def items_of(
    spec: SweepSpec,
    job: Job,
    *,
    now: Callable[[], datetime],
    calibration: Callable[[], Calibration | None],
    run_id: str,
) -> Iterator[Item]:
    """Baseline layouts first: changes are seen by them. Each layout once.

    Raises what planning raises, where the sweep asks for layouts of the plan.
    """
    measure, seen = spec.measure, set[Layout]()
    ranked: list[tuple[Layout, float | None, float]] = []
    if measure.top_k or measure.informative:
        plan = recommend(job, now=now, calibration=calibration())
        ranked = [
            (entry.layout, entry.estimate.step_seconds, entry.estimate.time_sd)
            for entry in plan.ranked[:CANDIDATES]
        ]
    least_sure = sorted(ranked[measure.top_k :], key=lambda entry: -entry[2])[: measure.informative]
    best = enumerate(ranked[: measure.top_k], start=1)
    for layout, seconds, why in (
        *((layout, seconds, "anchor") for layout, seconds in _anchors(spec, job)),
        *((layout, seconds, f"rank {rank}") for rank, (layout, seconds, _) in best),
        *((layout, seconds, f"least sure ({sd:.0%})") for layout, seconds, sd in least_sure),
    ):
        if layout not in seen:
            seen.add(layout)
            yield Item(
                job=job,
                layout=layout,
                why=why,
                predicted_seconds=seconds,
                requested=_requested(spec, job, layout, run_id),
            )


def _anchors(spec: SweepSpec, job: Job) -> Iterator[tuple[Layout, float | None]]:
    """The baseline layouts, with what the model predicts of them."""
    field, size = "sweep.measure.anchors", job.cluster.num_gpus
    layouts = [
        resolve_layout(values, trainer=job.training.trainer, num_gpus=size, field=field)
        for values in spec.measure.anchors
    ]
    seconds = dict[Layout, float]()
    for size in job.cluster.num_gpus_choices:
        cluster = job.cluster.with_num_gpus(size)
        context = Context(model=job.model, cluster=cluster, training=job.training)
        own = [layout for layout in layouts if layout.num_gpus == size]
        legal = legal_mask(LayoutBatch.from_layouts(own), context) if own else ()
        own = [layout for layout, fine in zip(own, legal, strict=True) if fine]
        if own:
            pricer = Pricer.build(job.model, cluster, job.training)
            priced = pricer.step_seconds(LayoutBatch.from_layouts(own))
            seconds |= dict(zip(own, priced.tolist(), strict=True))
    for layout in layouts:
        yield layout, seconds.get(layout)


def _requested(spec: SweepSpec, job: Job, layout: Layout, run_id: str) -> RequestedProbe | str:
    """The probe of this layout; why not, where the layout cannot be run."""
    sizes = job.cluster.num_gpus_choices
    if layout.num_gpus not in sizes:
        return f"takes {layout.num_gpus} GPUs, the job has {', '.join(map(str, sizes))}"
    request = {
        "job": job_with_layout(job.request, layout, layout.num_gpus),
        "pool": spec.pool,
        "trainer": spec.trainer,
        "steps": spec.steps,
        "time_limit_seconds": spec.time_limit_seconds,
    }
    try:
        return probe_of_job(request, allow_files=False, plan_id=run_id)[0]
    except PlannerError as error:
        return "; ".join(lines_of(error))


@dataclass(slots=True)
class SpentByRun:
    """Use of a run so far. most_at_once: probes that ran side by side."""

    probes: int = 0
    gpu_seconds: float = 0.0
    most_at_once: int = 0
    retried: int = 0

    def limited(
        self,
        wanted: RequestedProbe,
        spec: SweepSpec,
        running: Iterable[RequestedProbe],
        now: Callable[[], datetime],
    ) -> RequestedProbe | str:
        """The probe with the time that the budget leaves it; why there is none.

        The last of a budget has what is left. Beside others a probe starts only where its whole
        time limit is covered, so that the run never spends more than its budget.
        """
        budget, limit = spec.budget, wanted.request.time_limit_seconds
        hours, zone = budget.hours, spec.time_zone
        if hours is not None and not is_within(hours, now(), zone):
            return f"outside the hours of the budget, {hours} {zone}"
        promised = [one.request.time_limit_seconds * one.devices for one in running]
        left = budget.max_gpu_seconds - self.gpu_seconds - sum(promised)
        spent = self.probes >= budget.max_probes or left <= 0
        if spent or (promised and left < limit * wanted.devices):
            return "the budget is spent"
        limit = min(limit, max(1.0, left / wanted.devices))
        own = wanted.request.model_copy(update={"time_limit_seconds": limit})
        return replace(wanted, request=own)
