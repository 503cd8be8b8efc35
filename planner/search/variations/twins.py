"""Simpler twins of the best layouts, which a screen by time alone leaves behind.

A twin does without one thing that gains little: activations that sequence parallelism leaves whole,
an asynchronous exchange, a memory budget that fills the card. It may come first in its place
(`search.choice.preference`), so it has to be among the candidates.
"""

from collections.abc import Iterator, Sequence

from planner.columns import LayoutBatch
from planner.rules import Context, violations_of
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout, format_ac, parse_ac

LESS_BUDGET = (0.05, 0.1)  # of what is kept, to leave room on the card; judgement


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
    changes: list[tuple[str, object]] = []
    if layout.tp > 1 and not layout.sequence_parallel:
        changes.append(("sequence_parallel", True))
    if layout.async_tp:
        changes.append(("async_tp", False))
    kind, number = parse_ac(layout.ac)
    if kind == "memory-budget":
        changes += [("ac", format_ac(kind, number - less)) for less in LESS_BUDGET if number > less]
    for name, value in changes:
        yield name, layout.model_copy(update={name: value})


def _open(search: SearchSpec, name: str, value: object) -> bool:
    return name not in search.fix and value in search.allow.get(name, [value])
