"""The layout whose probe shows what an unmeasured mechanism is worth.

It differs from number 1, which is probed too, in as little as the mechanism needs: the pair
isolates it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.calibration.basis import rests_on
from planner.calibration.intervals import oom_probability
from planner.calibration.mechanisms import Mechanism
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.rules import legal_mask
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import Layout, changed_fields

MOST_CHANGED = 2  # fields; what needs more is measured as the fastest on paper has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolating:
    """The layout to probe beside number 1, and why, as a clause."""

    layout: Layout
    reason: str


def isolating(pricer: Pricer, first: Layout, paper: Layout) -> Isolating | None:
    """The probe beside number 1 that measures what the fastest on paper rests on.

    Of the layouts between the two that rest on it: the one with the fewest changes to number 1
    that fits and is predicted to be no slower. None where `paper` rests on nothing new.
    """
    known = rests_on(first, pricer, pricer.calibration)
    wanted = [one for one in rests_on(paper, pricer, pricer.calibration) if one not in known]
    if not wanted:
        return None
    said = measures(wanted)
    steps = list(_between(first, paper))
    if pricer.rules.sharding.degrees_decide:  # one rank shards nothing, whatever its stage is
        steps = [
            one.model_copy(update={"zero_stage": 0}) if one.dp_shard * one.cp == 1 else one
            for one in steps
        ]
    batch = LayoutBatch.from_layouts([first, *steps, paper])
    prices = pricer.price(batch)
    oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
    good = legal_mask(batch, pricer.rules_context) & (oom <= OOM_LIMIT)
    good &= prices.step_seconds <= prices.step_seconds[0]
    for place, layout in enumerate(steps, 1):
        if good[place] and set(wanted) <= set(rests_on(layout, pricer, pricer.calibration)):
            changes = changed_fields(first, layout).items()
            but = ", ".join(f"{name} {value}" for name, value in changes)
            return Isolating(layout=layout, reason=f"number 1 but for {but}: {said}")
    return Isolating(layout=paper, reason=f"the fastest on paper: {said}")


def measures(mechanisms: Sequence[Mechanism]) -> str:
    """Mechanisms that a probe measures for the first time, as a clause; empty for none."""
    words = ", ".join(one.words for one in mechanisms)
    return f"measures {words}, which no run behind the calibration used" if words else ""


def _between(first: Layout, paper: Layout) -> Iterator[Layout]:
    """Number 1 with some of the fields of the fastest on paper, fewest changes first."""
    differing = changed_fields(first, paper)
    for count in range(1, min(MOST_CHANGED, len(differing) - 1) + 1):
        for changes in combinations(differing.items(), count):
            yield first.model_copy(update=dict(changes))
