"""The winner compared with the current layout: how many times as fast, and what changes.

It shows the difference in the user's own file.
"""

import math

from planner.calibration.correlated import CorrelatedErrors
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.estimates import as_violations, estimate_layouts
from planner.export import FORMATS, export
from planner.intake.current import Current, read_again
from planner.intake.trainer_files.canonical import canonical, really_changed
from planner.intake.trainer_files.rewrite import (
    EXPORTED,
    Rewritten,
    kind_of,
    rewrite,
    rewrite_config,
)
from planner.plan.explain import difference
from planner.search.choice.preference import MOST_GIVEN_UP, SURE, difference_sd, spread_within_stack
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.plan_comparisons import VersusCurrent


def versus_current(
    job: Job, winner: Layout, estimate: Estimate, pricer: Pricer
) -> VersusCurrent | None:
    """The comparison; None for a job without a current layout.

    estimate: of the winner, from `pricer` at its size.
    """
    layout = job.layout
    if layout is None:
        return None
    own, cluster, priced = job.cluster, pricer.cluster, pricer
    if layout.num_gpus in own.num_gpus_choices:
        own = own.with_num_gpus(layout.num_gpus)
    if own.num_gpus != cluster.num_gpus:
        priced = Pricer.build(job.model, own, job.training, pricer.calibration)
    today, times = estimate_layouts(priced, [layout])[0], None
    if today.step_seconds and estimate.step_seconds:
        times = today.step_seconds / estimate.step_seconds
    changed = really_changed(layout, winner, job.model.num_hidden_layers, job.training.trainer)
    sd = _gain_sd(pricer, layout, winner) if times is not None and priced is pricer else None
    current = read_again(job.request, job.model, layout.num_gpus)
    refusals = () if current is None or current.run is None else current.run.refusals
    runs = bool(today.fits) and not today.violations and not refusals
    alike = not changed or (times and sd is not None and not _tells_apart(times, sd))
    written = Rewritten()
    if current is not None and changed:
        written = _rewritten(job, cluster, layout, winner, current)
    return VersusCurrent(
        layout=layout,
        estimate=today,
        speedup=times,
        times_as_fast=times,
        gain_sd=sd,
        keep=bool(runs and times is not None and alike),
        changed=changed,
        reasons=difference(today, estimate, layout, winner),
        missing_bytes=_missing(today),
        violations=[*today.violations, *as_violations(refusals)],
        source=None if current is None else {"format": current.format, "name": current.spec.name},
        measured=None if current is None else current.spec.measured,
        diff=written.diff,
        files=dict(written.files),
        settings=dict(written.settings),
        notes=_notes(layout, winner, current, written),
    )


def _gain_sd(pricer: Pricer, layout: Layout, winner: Layout) -> float:
    """Standard deviation of log(current step / winner's step), as in the choice of number 1."""
    batch = LayoutBatch.from_layouts([layout, winner])
    spread = spread_within_stack(pricer, batch)
    errors = CorrelatedErrors.of(batch, spread, pricer.training.global_batch_size)
    return float(difference_sd(errors, 1)[0])


def _tells_apart(times: float, sd: float) -> bool:
    """Whether a gain is significant by the rule that chooses number 1.

    A change without such a gain is not worth a new launch.
    """
    return math.log(times) > min(SURE * sd, math.log1p(MOST_GIVEN_UP))


def _missing(estimate: Estimate) -> float | None:
    missing = (estimate.device_bytes or 0.0) - (estimate.usable_bytes or 0.0)
    return missing if missing > 0.0 else None


def _rewritten(
    job: Job, cluster: ClusterSpec, layout: Layout, winner: Layout, current: Current
) -> Rewritten:
    if current.format in ("configuration", "megatron-bridge"):
        kind = kind_of(current.spec.text)
        of = None if current.stated is None else current.stated.version
        made = [
            export(one, job.model, cluster, job.training, to=kind, version=of)
            if kind in EXPORTED
            else None
            for one in (layout, winner)
        ]
        batch = job.training.global_batch_size
        if not kind:
            name = current.spec.name
            return Rewritten(notes=(f"{name} is not changed in place: set the fields below in it",))
        return rewrite_config(current.spec, (layout, winner), made, batch)
    if current.stated is None or current.stated.trainer not in FORMATS:
        return Rewritten()
    stated = current.stated
    exported = export(
        winner, job.model, cluster, job.training, to=stated.trainer, version=stated.version
    )
    plain = canonical(winner, job.model.num_hidden_layers, job.training.trainer)
    return rewrite(current, plain, exported, job.training.global_batch_size)


def _notes(
    layout: Layout, winner: Layout, current: Current | None, written: Rewritten
) -> list[str]:
    notes = [] if current is None else [*current.spec.notes]
    if current is not None and current.run is not None:
        notes += current.run.notes
    if layout.num_gpus != winner.num_gpus:
        notes.append(f"number 1 runs on {winner.num_gpus:,} GPUs instead of {layout.num_gpus:,}")
    return [*notes, *written.notes]
