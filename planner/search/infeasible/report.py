"""The error when there is no plan.

It names the rule that leaves nothing legal, or the nearest miss and what would make it fit.
"""

from collections import Counter

import numpy as np

from planner.errors import InfeasibleError, SpecError
from planner.rules import Context
from planner.search.infeasible.suggested_fixes import fitting_changes
from planner.search.one_size import Progress
from planner.search.size_candidates import OneSize, rejected
from planner.search.space.conflicts import binding_rule, impossible_values
from planner.specs.cluster import ClusterSpec
from planner.specs.job import Job
from planner.specs.plan_comparisons import NearestMiss
from planner.units import counted, format_bytes


def check_given(job: Job, clusters: list[ClusterSpec]) -> None:
    """Raises SpecError if no size allows what `search.fix` and `search.allow` ask for."""
    faults = [
        impossible_values(
            Context(model=job.model, cluster=cluster, training=job.training), job.search
        )
        for cluster in clusters
    ]
    if all(faults):
        raise SpecError(faults[-1])


def nothing_fits(job: Job, sizes: list[OneSize], say: Progress) -> InfeasibleError:
    """The error when nothing fits.

    It names the rule that leaves nothing legal, or the nearest miss and the smallest changes that
    would make it fit.
    """
    counts = rejected(sizes)
    priced = [at_size for at_size in sizes if len(at_size.screened.batch)]
    if not priced:
        return _nothing_legal(job, sizes[-1], counts)
    at_size = min(
        priced,
        key=lambda s: float(s.screened.device_bytes.min() / s.pricer.cluster.usable_memory_bytes),
    )
    row = int(np.argmin(at_size.screened.device_bytes))
    layout, device = at_size.screened.batch.row(row), float(at_size.screened.device_bytes[row])
    usable = float(at_size.pricer.cluster.usable_memory_bytes)
    changes = fitting_changes(job, at_size.pricer.cluster, say)
    remedy = "; or ".join(change.sentence for change in changes)
    remedy = remedy or "use a smaller model: no larger cluster, GPU or shorter sequence suffices"
    miss = NearestMiss(
        layout=layout,
        device_bytes=device,
        usable_bytes=usable,
        missing_bytes=device - usable,
        remedy=remedy,
        changes=changes,
    )
    need, room = format_bytes(device), format_bytes(usable)
    close = ", too close to be safe" if need == room or device <= usable else ""
    message = (
        f"none of {counted(at_size.num_layouts, 'legal layout')} fits "
        f"{counted(at_size.pricer.cluster.num_gpus, 'GPU')}: "
        f"the smallest needs {need} of {room}{close}"
    )
    return InfeasibleError(
        message, remedy=remedy, nearest_miss=miss.model_dump(mode="json"), rejected=dict(counts)
    )


def _nothing_legal(job: Job, at_size: OneSize, counts: Counter[str]) -> InfeasibleError:
    context = Context(model=job.model, cluster=at_size.pricer.cluster, training=job.training)
    binding = binding_rule(context, job.search, at_size.rejected)
    if binding is None:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in counts.most_common(3))
        remedy = "loosen search.fix and search.allow"
        return InfeasibleError(f"no legal layout: {reasons}", remedy=remedy, rejected=dict(counts))
    return InfeasibleError(
        f"no legal layout: {binding.rule}",
        remedy=binding.remedy,
        field=f"layout.{binding.field}",
        rejected=dict(counts),
    )
