"""Layouts with one choice changed: neighbours of the winner, and simpler twins of the best.

A plan's reasons quote the neighbours. A twin does without one thing that gains little, which a
screen by time alone leaves behind: activations that are whole on every tensor rank (no sequence
parallelism), or an asynchronous exchange. It may come first in its place
(`search.choice.preference`), so it has to be among the candidates.
"""

from collections.abc import Iterator, Sequence

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.rules import Context, violations_of
from planner.search.space.domains import default_domains
from planner.search.variations.sensitivity import priced_steps, steps_in
from planner.specs.job import SearchSpec
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


def simpler_twins(context: Context, search: SearchSpec, layouts: Sequence[Layout]) -> LayoutBatch:
    """The legal twins of these layouts that are none of them, as far as the search leaves open."""
    known = set(layouts)
    found = dict.fromkeys(
        twin
        for layout in layouts
        for name, twin in _twins(layout)
        if twin not in known and _open(search, name, getattr(twin, name))
    )
    twins = list(found)
    batch = LayoutBatch.from_layouts([*layouts[:1], *twins])
    broken = violations_of([*layouts[:1], *twins], batch, context)
    legal = [twin for twin, faults in zip(twins, broken[1:], strict=True) if not faults]
    return LayoutBatch.from_layouts([*layouts[:1], *legal])


def _twins(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """(the field that is simpler, the twin)."""
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "sequence_parallel", layout.model_copy(update={"sequence_parallel": True})
    if layout.async_tp:
        yield "async_tp", layout.model_copy(update={"async_tp": False})


def _open(search: SearchSpec, name: str, value: object) -> bool:
    return name not in search.fix and value in search.allow.get(name, [value])
