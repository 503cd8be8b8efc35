"""Suggests a nearby global batch size that would train much faster per token, or more plainly.

Data parallelism splits a batch evenly, and so do microbatches of a pipeline: with 63 sequences, 64
GPUs can use neither. What matters is the divisor that a batch shares with the number of GPUs.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np

from planner.calibration.mechanisms import points
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.rules import Context
from planner.rules.base import divisors
from planner.search.fit import OOM_LIMIT
from planner.search.screen import Goal
from planner.search.space.enumerate import build_space
from planner.search.space_search import screen
from planner.specs.job import SearchSpec
from planner.specs.layout import FieldValue, Layout
from planner.units import counted, times

NEAR = 0.25  # of the batch: a batch further away is another experiment; judgement
WORTH = 1.10  # least speedup per token that is reported; judgement
# Judgement: a layout of so many points less (decision 0006) is plainer, and worth a word at the
# same speed.
PLAINER = 2
TRIED = 3  # batch sizes that are priced
SAME = 0.02  # gains this close to the largest count as equal; judgement
REFINED = 16  # of the layouts priced at a batch, those that are simulated
# The winner's choices that another batch does not change.
SETTLED = (
    "precision", "param_dtype", "reduce_dtype", "master_dtype", "compile", "optimizer_in_backward",
    "cpu_offload", "optimizer_offload_fraction", "moe_dispatcher", "cp_method",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NearBatch:
    """The batch and its best layout.

    speedup: tokens per second over those of the plan's winner.
    plainer: whether its layout uses much less than the winner.
    """

    global_batch_size: int
    speedup: float
    layout: Layout
    plainer: bool

    def sentence(self, asked: int, winner: Layout) -> str:
        ranks = counted(winner.dp_degree, "data-parallel rank")
        plain = "the plainer " if self.plainer else ""
        return (
            f"global_batch_size {self.global_batch_size:,} instead of {asked:,} would be "
            f"at least {times(self.speedup)} as fast a token, with {plain}{self.layout.short()}; "
            f"number 1 can split {counted(asked, 'sequence')} over {ranks} alone, on "
            f"{counted(winner.num_gpus, 'GPU')}"
        )


def near_batch(
    pricer: Pricer, winner: Layout, step_seconds: float, search: SearchSpec
) -> NearBatch | None:
    """The nearest of the best batch sizes that gain more than WORTH, or make it much plainer.

    None if there is none.

    Nothing is priced unless a near batch shares a larger divisor with the number of GPUs than the
    requested one. The winner's precision and switches are then fixed, and degrees, microbatch and
    checkpointing are searched, so that the gain is at least the reported one.
    step_seconds: of the winner, as predicted.
    """
    asked = pricer.training.global_batch_size
    most_points = _points(pricer, winner) - PLAINER
    found = []
    for size in nearby(asked, pricer.cluster.num_gpus):
        best = _best(pricer, winner, size, search)
        if best is not None:
            seconds, layout = best
            speedup = (size / seconds) / (asked / step_seconds)
            plainer = _points(pricer, layout) <= most_points
            found.append(
                NearBatch(global_batch_size=size, speedup=speedup, layout=layout, plainer=plainer)
            )
    gaining = [one for one in found if one.speedup > (1.0 if one.plainer else WORTH)]
    if not gaining:
        return None
    most = max(one.speedup for one in gaining)
    alike = [one for one in gaining if one.speedup > most * (1.0 - SAME)]
    return min(alike, key=lambda one: abs(one.global_batch_size - asked))


def _points(pricer: Pricer, layout: Layout) -> int:
    return int(points(LayoutBatch.from_layouts([layout]), pricer)[0])


def nearby(asked: int, num_gpus: int) -> list[int]:
    """Batch sizes within NEAR that divide among more ranks, at most TRIED.

    Those that divide among most ranks come first. A size that is further away than another must
    divide among more ranks.
    """
    near = {
        size
        for degree in divisors(num_gpus)
        for size in (asked // degree * degree, -(-asked // degree) * degree)
        if size > 0
        and abs(size - asked) <= NEAR * asked
        and gcd(size, num_gpus) > gcd(asked, num_gpus)
    }
    kept: list[int] = []
    for size in sorted(near, key=lambda size: (abs(size - asked), -size)):
        if not kept or gcd(size, num_gpus) > gcd(kept[-1], num_gpus):
            kept.append(size)
    return kept[::-1][:TRIED]


def _best(
    pricer: Pricer, winner: Layout, size: int, search: SearchSpec
) -> tuple[float, Layout] | None:
    """(step seconds, layout) of the fastest that fits at this batch; None if none does."""
    training = pricer.training.model_copy(update={"global_batch_size": size})
    other = Pricer.build(pricer.model, pricer.cluster, training, pricer.calibration)
    context = Context(model=other.model, cluster=other.cluster, training=training)
    space = build_space(context, _narrowed(search, winner))
    screened = screen(other, space, Goal(count=1, slack=1.0, keep=REFINED))
    if not screened.num_fitting:
        return None
    rows = np.flatnonzero(screened.oom <= OOM_LIMIT)[:REFINED]
    batch = screened.batch.take(rows)
    seconds = refine(other, batch, other.price(batch)).step_seconds
    first = int(np.argmin(seconds))
    return float(seconds[first]), batch.row(first)


def _narrowed(search: SearchSpec, winner: Layout) -> SearchSpec:
    """The user's own choices, and the winner's in fields that they leave open.

    Fields that depend on the batch stay open.
    """
    chosen = {*search.fix, *search.allow}
    fix = {name: getattr(winner, name) for name in SETTLED if name not in chosen}
    allow = {name: values for name, values in _open(winner).items() if name not in chosen}
    return search.model_copy(
        update={"fix": {**search.fix, **fix}, "allow": {**search.allow, **allow}}
    )


def _open(winner: Layout) -> dict[str, list[FieldValue]]:
    """Values that are enough to find a layout as good as the winner's kind.

    A layout that splits the batch over more ranks needs no more of the other axes than the winner.
    """
    degrees: dict[str, list[FieldValue]] = {
        name: list(divisors(getattr(winner, name))) for name in ("tp", "cp", "pp")
    }
    experts = [degree for degree in (winner.ep // 2, winner.ep, 2 * winner.ep) if degree > 0]
    return {
        **degrees,
        "ep": list(dict.fromkeys(experts)) if winner.ep > 1 else [1],
        "ac": list(dict.fromkeys((winner.ac, "none", "full"))),
        "pp_schedule": list(dict.fromkeys((winner.pp_schedule, "1F1B"))),
    }
