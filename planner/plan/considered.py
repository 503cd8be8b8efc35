"""Layouts that the search looked at, stored with the plan: the study of a plan is made of it.

Of every size the ranked layouts, the front of time against memory, the best of the others, the
fastest that do not fit, and what a sampler tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.intervals import spread
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.refine import simulated_step_seconds
from planner.cost.run.whole_run import busy_seconds, run_columns
from planner.search.choice import pareto
from planner.search.fit import OOM_LIMIT, fitting
from planner.search.size_candidates import OneSize, PlanCandidate, score_of
from planner.specs.job import Job
from planner.specs.layout import Layout, changed_fields
from planner.specs.plan import ConsideredLayout, Source

MOST_CONSIDERED = 100  # layouts that fit, over all sizes; judgement: what a plot can show
FEWEST_A_SIZE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """N layouts of one size that fit: simulated where that was done, else as screened."""

    layouts: Sequence[Layout]
    step_seconds: FloatColumn
    device_bytes: FloatColumn

    def front(self, most: int) -> IntColumn:
        """Rows that no other beats in both step time and memory, thinned to `most`."""
        return pareto.front(self.step_seconds, self.device_bytes, most)


def fitting_layouts(at_size: OneSize) -> Fitting:
    """Everything priced at this size that fits and was kept."""
    screened = at_size.screened
    known: dict[Layout, tuple[float, float]] = {}
    for step, device, layout in at_size.candidates:  # fastest first
        known.setdefault(layout, (step, device))
    for one in at_size.sampled:
        if one.step_seconds is not None and one.device_bytes is not None and one.fits:
            known.setdefault(one.layout, (one.step_seconds, one.device_bytes))
    rows = np.flatnonzero(screened.oom <= OOM_LIMIT)
    numbers = zip(
        screened.step_seconds[rows].tolist(), screened.device_bytes[rows].tolist(), strict=True
    )
    for layout, both in zip(screened.batch.take(rows).layouts(), numbers, strict=True):
        known.setdefault(layout, both)
    # whole bytes: what differs by rounding alone is no point of a front
    return Fitting(
        layouts=list(known),
        step_seconds=np.array([step for step, _ in known.values()]),
        device_bytes=np.array([round(device) for _, device in known.values()], dtype=np.float64),
    )


def considered(
    job: Job, sizes: Sequence[OneSize], ranked: Sequence[PlanCandidate], fitting: Sequence[Fitting]
) -> list[ConsideredLayout]:
    """The ranked layouts in their order, then the others that fit by the objective.

    Behind them what does not fit, and what a rule refused. fitting: `fitting_layouts` of each size.
    """
    base = ranked[0].layout
    ranks = {
        (choice.at_size.pricer.cluster.num_gpus, choice.layout): place
        for place, choice in enumerate(ranked, start=1)
    }
    most = max(MOST_CONSIDERED // len(sizes), FEWEST_A_SIZE)
    found = [
        entry
        for at_size, fits in zip(sizes, fitting, strict=True)
        for entry in _of_size(job, at_size, fits, base, ranks, most, len(sizes))
    ]
    return sorted(
        found,
        key=lambda one: (
            one.rank is None,
            one.rank or 0,
            one.refused is not None,
            (one.oom_probability or 0.0) > OOM_LIMIT,
            one.objective or 0.0,
        ),
    )


def _looked_at(
    job: Job, at_size: OneSize, fitting: Fitting, first: Sequence[Layout], most: int
) -> list[Layout]:
    """The first ones, the front, the best of the others, then what was tried or does not fit."""
    ahead = [*first, *(fitting.layouts[row] for row in fitting.front(len(fitting.layouts)))]
    smallest = job.search.objective == "memory"
    order = np.argsort(fitting.device_bytes if smallest else fitting.step_seconds, kind="stable")
    best = list(dict.fromkeys([*ahead, *(fitting.layouts[row] for row in order)]))
    best = best[: max(most, len(set(ahead)))]
    tried = [trial.layout for trial in at_size.sampled if trial.refused is None]
    return list(dict.fromkeys([*best, *tried, *at_size.screened.unfit.layouts()]))


def _of_size(
    job: Job,
    at_size: OneSize,
    fitting: Fitting,
    base: Layout,
    ranks: dict[tuple[int, Layout], int],
    most: int,
    num_sizes: int,
) -> list[ConsideredLayout]:
    num_gpus = at_size.pricer.cluster.num_gpus
    steps = dict(zip(fitting.layouts, fitting.step_seconds.tolist(), strict=True))
    ahead = [layout for size, layout in ranks if size == num_gpus]
    ahead.append(PlanCandidate(at_size, at_size.first).layout)  # of `sizes`
    tried = {trial.layout: trial for trial in at_size.sampled}
    priced = _looked_at(job, at_size, fitting, ahead, most)
    entries = _priced(job, at_size, priced, steps, several=num_sizes > 1) if priced else []
    entries += [
        ConsideredLayout(changed={}, num_gpus=num_gpus, refused=trial.refused)
        for trial in tried.values()
        if trial.refused is not None
    ]
    layouts = [*priced, *(trial.layout for trial in tried.values() if trial.refused is not None)]
    return [
        entry.model_copy(
            update={
                "changed": changed_fields(base, layout),
                "rank": ranks.get((num_gpus, layout)),
                "sampled_by": job.search.sampler if layout in tried else None,
            }
        )
        for entry, layout in zip(entries, layouts, strict=True)
    ]


def _priced(
    job: Job,
    at_size: OneSize,
    layouts: Sequence[Layout],
    steps: Mapping[Layout, float],
    *,
    several: bool,
) -> list[ConsideredLayout]:
    """The numbers of legal layouts.

    steps: of those that have a step time already. What does not fit is not simulated for this.
    """
    pricer = at_size.pricer
    batch = LayoutBatch.from_layouts(layouts)
    prices = pricer.price(batch)
    fits = fitting(pricer, prices.least_device_bytes)
    step = np.array([steps.get(layout, np.nan) for layout in layouts])
    step = np.where(np.isnan(step) & ~fits, prices.step_seconds, step)
    new = np.flatnonzero(np.isnan(step))
    if len(new):
        others = batch.take(new)
        step[new] = simulated_step_seconds(pricer, others, pricer.price(others))
    doubt = spread(pricer, batch, prices, step)
    runs = run_columns(pricer, batch, step, busy_seconds(prices))
    device = np.round(prices.device_bytes)
    scores = score_of(job.search.objective, runs, device, several=several)
    low, high = doubt.step_seconds
    simulated = {layout for *_, layout in at_size.candidates}
    sources: list[Source] = [
        "simulated"
        if layout.pp > 1 and (layout in simulated or (fits[row] and layout not in steps))
        else "screened"
        for row, layout in enumerate(layouts)
    ]
    return [
        ConsideredLayout(
            changed={},
            num_gpus=pricer.cluster.num_gpus,
            source=sources[row],
            step_seconds=float(step[row]),
            interval_seconds=(float(low[row]), float(high[row])),
            device_bytes=float(device[row]),
            oom_probability=float(doubt.oom_probability[row]),
            objective=float(scores[row]),
            time_to_train_seconds=float(runs.wall_seconds[row]),
            cost=float(runs.bill.cost[row]),
            gpu_hours=float(runs.bill.gpu_hours[row]),
        )
        for row in range(len(layouts))
    ]
