"""The winner's neighbours: the same layout with one choice changed, legal and priced.

A plan's reasons quote them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.search.fit import fitting
from planner.search.space.domains import default_domains
from planner.search.variations.sensitivity import steps_in
from planner.specs.layout import Layout

STEPPED = ("tp", "cp", "pp", "dp_replicate", "ep", "micro_batch_size", "pp_schedule")
CHOSEN = (
    "ac", "precision", "zero_stage", "compile", "async_tp", "cp_method", "moe_dispatcher",
    "cpu_offload", "float8_all_gather",
)  # fmt: skip


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
    """All legal single changes of a layout, priced with it."""
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
    for name in STEPPED:
        for new, variant in steps_in(pricer, layout, name):
            yield name, getattr(layout, name), new, variant
    domains = default_domains(
        Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    )
    for name in CHOSEN:
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


def fastest(found: Sequence[Neighbour], name: str) -> Neighbour | None:
    here = [n for n in found if n.field == name and n.fits]
    return min(here, key=lambda n: n.step_ratio) if here else None
