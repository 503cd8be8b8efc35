"""Layer splits near the trainer's own.

A search tries them besides it, and a step in `layers_per_stage` is one of them.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from planner.columns import LayoutBatch
from planner.cost.pipeline import stages
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.search.variations.budgets import largest_budgets
from planner.specs.layout import Layout, parse_ac

MAX_SHIFT = 2  # layers moved off an outer stage: the embedding and the head weigh about as much


def shifted(pricer: Pricer, layout: Layout, first: int, last: int) -> tuple[int, ...]:
    """The trainer's split with `first` and `last` layers moved to the inner stages.

    They are moved from the outer stages, as evenly as possible.
    """
    sizes = np.array(
        stages.layers_of_stages(LayoutBatch.from_layouts([layout]), 0, pricer.model, pricer.rules)
    )
    if len(sizes) < 3:
        return tuple(
            int(size) for size in (sizes + np.array([-first, first] if len(sizes) == 2 else [0]))
        )
    sizes[0] -= first
    sizes[-1] -= last
    moved = first + last
    for step in range(abs(moved)):
        inner = sizes[1:-1]
        place = 1 + int(np.argmin(inner) if moved > 0 else np.argmax(inner))
        sizes[place] += 1 if moved > 0 else -1
        del step
    return tuple(int(size) for size in sizes)


def uneven(pricer: Pricer, layouts: Sequence[Layout]) -> LayoutBatch:
    """The pipelined ones of these layouts, with up to MAX_SHIFT layers moved at outer stages.

    All are legal, each once. One with a memory budget comes with the largest that fits after the
    move, and without recomputation.
    """
    moved: dict[Layout, None] = {}
    for layout in layouts:
        for first, last in (
            product(range(-MAX_SHIFT, MAX_SHIFT + 1), repeat=2) if layout.pp > 1 else ()
        ):
            sizes = shifted(pricer, layout, first, last)
            if (first or last) and min(sizes) >= 1:
                update: dict[str, object] = {"layers_per_stage": sizes}
                moved.setdefault(layout.model_copy(update=update))
                if parse_ac(layout.ac)[0] == "memory-budget":
                    moved.setdefault(layout.model_copy(update=update | {"ac": "none"}))
    if not moved:
        return LayoutBatch.from_layouts(layouts).take(slice(0, 0))
    batch = LayoutBatch.from_layouts(list(moved))
    batch = batch.take(
        legal_mask(
            batch, Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
        )
    )
    budgets = np.array(
        [
            parse_ac(row.ac)[0] == "memory-budget"
            for row in (batch.row(i) for i in range(len(batch)))
        ],
        dtype=np.bool_,
    )
    refitted, _ = largest_budgets(pricer, batch.take(budgets), np.inf, len(batch))
    return LayoutBatch.concatenate([batch.take(~budgets), refitted])
