"""A list of stored plans as a table."""

from collections.abc import Callable, Sequence

from rich.text import Text

from planner.api.render.figures import NONE, rate
from planner.api.render.grid import Column, grid, number
from planner.api.storage.records import PlanLine

# each column with what it shows of a plan
COLUMNS: tuple[tuple[Column, Callable[[PlanLine], str]], ...] = (
    (Column(name="id"), lambda plan: plan.id),
    (Column(name="made (UTC)", drop=1), lambda plan: f"{plan.created_at:%Y-%m-%d %H:%M}"),
    (Column(name="model"), lambda plan: plan.model),
    (number("GPUs"), lambda plan: f"{plan.num_gpus:,}"),
    (Column(name="GPU", drop=2), lambda plan: plan.gpu),
    (Column(name="layout", wraps=True, below=True), lambda plan: plan.layout or NONE),
    (number("tok/s/GPU"), lambda plan: rate(plan.tokens_per_second_per_gpu)),
    (Column(name="state", drop=0), lambda plan: plan.status),
)


def plans_table(plans: Sequence[PlanLine], width: int) -> Text:
    """One line a plan; tok/s/GPU as expected of its number 1."""
    rows = [tuple(cell(plan) for _, cell in COLUMNS) for plan in plans]
    return grid([column for column, _ in COLUMNS], rows, width)
