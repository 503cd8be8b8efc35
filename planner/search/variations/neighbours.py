"""The winner's neighbours: the same layout with one choice changed, legal and priced.

A plan's reasons quote them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.schedules import SCHEDULES
from planner.search.fit import fitting
from planner.search.space.domains import default_domains
from planner.specs.layout import Layout

DEGREES = ("tp", "cp", "pp", "dp_replicate", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One change: the field, both values, and its effect.

    step_ratio: its step time over the layout's own.
    """

    field: str
    old: object
    new: object
    layout: Layout
    step_ratio: float
    device_bytes: float
    fits: bool


def neighbours(pricer: Pricer, layout: Layout) -> list[Neighbour]:
    """All legal single changes of a layout, priced with it.

    Degrees double or halve at the expense of dp_shard.
    """
    variants = list(_variants(pricer, layout))
    if not variants:
        return []
    legal = legal_mask(
        LayoutBatch.from_layouts([variant for *_, variant in variants]), pricer.rules_context
    )
    changes = [change for change, allowed in zip(variants, legal, strict=True) if allowed]
    if not changes:
        return []
    batch = LayoutBatch.from_layouts([layout, *(variant for *_, variant in changes)])
    prices = pricer.price(batch)
    fits = fitting(pricer, prices.least_device_bytes)
    ratio = prices.step_seconds / prices.step_seconds[0]
    return [
        Neighbour(
            field=f,
            old=old,
            new=new,
            layout=variant,
            step_ratio=float(ratio[i]),
            device_bytes=float(prices.device_bytes[i]),
            fits=bool(fits[i]),
        )
        for i, (f, old, new, variant) in enumerate(changes, start=1)
    ]


def _variants(pricer: Pricer, layout: Layout) -> Iterator[tuple[str, object, object, Layout]]:
    for axis in DEGREES:
        yield from _degree_changes(layout, axis)
    for factor in (0.5, 2.0):
        size = int(layout.micro_batch_size * factor)
        if size >= 1 and size != layout.micro_batch_size:
            yield (
                "micro_batch_size",
                layout.micro_batch_size,
                size,
                layout.model_copy(update={"micro_batch_size": size}),
            )
    domains = default_domains(
        Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    )
    for name in (
        "ac",
        "precision",
        "zero_stage",
        "compile",
        "async_tp",
        "cp_method",
        "moe_dispatcher",
        "cpu_offload",
        "float8_all_gather",
    ):
        old = getattr(layout, name)
        unsharded = layout.dp_shard * layout.cp == 1 and pricer.rules.sharding.degrees_decide
        if (
            (name == "cp_method" and layout.cp == 1)
            or (name == "moe_dispatcher" and layout.ep == 1)
            or (name == "zero_stage" and unsharded)
        ):
            continue
        for new in domains[name].values:
            if new != old:
                update: dict[str, object] = {name: new}
                if name == "precision" and new != "float8-tensorwise":
                    update["float8_all_gather"] = False
                if name == "cpu_offload":
                    update["optimizer_offload_fraction"] = 1.0
                yield name, old, new, layout.model_copy(update=update)
    if layout.pp > 1:
        yield from _schedule_changes(layout)


def _degree_changes(layout: Layout, axis: str) -> Iterator[tuple[str, object, object, Layout]]:
    old = getattr(layout, axis)
    for new in (old // 2, old * 2):
        if new < 1 or new == old:
            continue
        update: dict[str, object] = {axis: new}
        if axis != "ep":
            ranks = layout.dp_shard * old
            if ranks % new:
                continue
            update["dp_shard"] = ranks // new
        if axis == "tp":
            update["sequence_parallel"] = layout.sequence_parallel or (old == 1 and new > 1)
            update["async_tp"] = layout.async_tp and new > 1
            update["etp"] = new if layout.etp == old and old > 1 else layout.etp
        if axis == "pp" and new == 1:
            update |= {"virtual_stages": 1, "pp_schedule": "1F1B"}
        yield axis, old, new, layout.model_copy(update=update)


def _schedule_changes(layout: Layout) -> Iterator[tuple[str, object, object, Layout]]:
    for name in SCHEDULES:
        if name != layout.pp_schedule:
            virtual = 1 if SCHEDULES[name].single_stage else max(2, layout.virtual_stages)
            yield (
                "pp_schedule",
                layout.pp_schedule,
                name,
                layout.model_copy(update={"pp_schedule": name, "virtual_stages": virtual}),
            )


def fastest(found: Sequence[Neighbour], name: str) -> Neighbour | None:
    here = [n for n in found if n.field == name and n.fits]
    return min(here, key=lambda n: n.step_ratio) if here else None


def span(found: list[Neighbour]) -> float:
    """Largest gain of a single fitting change, as a share of the step.

    Negative if no change is faster.
    """
    ratios = np.array([n.step_ratio for n in found if n.fits])
    return float(1.0 - ratios.min()) if len(ratios) else 0.0
