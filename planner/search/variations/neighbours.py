"""The winner's neighbours: the same layout with one choice changed, legal and priced.

A plan's reasons quote them.
"""

from collections.abc import Iterator, Sequence

from planner.cost.price import Pricer
from planner.search.space.domains import default_domains
from planner.search.variations.sensitivity import priced_steps, steps_in
from planner.specs.layout import Layout
from planner.specs.plan_comparisons import SensitivityStep

STEPPED = ("tp", "cp", "pp", "dp_replicate", "ep", "micro_batch_size", "pp_schedule")
CHOSEN = (
    "ac", "precision", "zero_stage", "compile", "async_tp", "cp_method", "moe_dispatcher",
    "cpu_offload", "float8_all_gather",
)  # fmt: skip


def neighbours(pricer: Pricer, layout: Layout) -> list[SensitivityStep]:
    """All legal single changes of a layout, priced with it."""
    steps = priced_steps(pricer, layout, list(_variants(pricer, layout)))
    return [step for step in steps if step.refused is None]


def _variants(pricer: Pricer, layout: Layout) -> Iterator[tuple[str, object, Layout]]:
    for name in STEPPED:
        for new, variant in steps_in(pricer, layout, name):
            yield name, new, variant
    domains = default_domains(pricer.rules_context)
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
                yield name, new, layout.model_copy(update=update)


def fastest(found: Sequence[SensitivityStep], name: str) -> SensitivityStep | None:
    here = [n for n in found if n.field == name and n.fits]
    return max(here, key=lambda n: n.times_as_fast, default=None)
