"""Simpler twins of the best layouts, which a screen by time alone leaves behind.

A twin does without one thing that gains little: activations that are whole on every tensor rank
(no sequence parallelism), or an asynchronous exchange. It may come first in its place
(`search.choice.preference`), so it has to be among the candidates.
"""

from collections.abc import Iterator, Sequence

from planner.columns import LayoutBatch
from planner.rules import Context, violations_of
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout


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
