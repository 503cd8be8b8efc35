"""Layer splits near the trainer's own: what a search tries beside it, and what a step in `layers_per_stage` means."""

import numpy as np

from planner.columns import LayoutBatch
from planner.cost import stages
from planner.cost.price import Pricer
from planner.specs.layout import Layout


def shifted(pricer: Pricer, layout: Layout, first: int, last: int) -> tuple[int, ...]:
    """The trainer's split with `first` and `last` layers moved from the outer stages to the inner ones, as evenly as it goes."""
    sizes = np.array(stages.layers_of_stages(LayoutBatch.from_layouts([layout]), 0, pricer.model, pricer.rules))
    if len(sizes) < 3:
        return tuple(int(size) for size in (sizes + np.array([-first, first] if len(sizes) == 2 else [0])))
    sizes[0] -= first
    sizes[-1] -= last
    moved = first + last
    for step in range(abs(moved)):
        inner = sizes[1:-1]
        place = 1 + int(np.argmin(inner) if moved > 0 else np.argmax(inner))
        sizes[place] += 1 if moved > 0 else -1
        del step
    return tuple(int(size) for size in sizes)
