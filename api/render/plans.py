"""A list of stored plans as a table."""

from collections.abc import Sequence

from rich.text import Text

from api.render.figures import NONE, rate
from api.render.grid import Column, grid, number
from planner.ports import PlanSummary

COLUMNS = (
    Column(name="id"),
    Column(name="made (UTC)", drop=1),
    Column(name="model"),
    number("GPUs"),
    Column(name="GPU", drop=2),
    Column(name="layout", wraps=True, below=True),
    number("tok/s/GPU"),
    Column(name="state", drop=0),
)


def plans_table(plans: Sequence[PlanSummary], width: int) -> Text:
    """One line a plan; tok/s/GPU as expected of its number 1."""
    rows = [
        (
            plan.id,
            f"{plan.created_at:%Y-%m-%d %H:%M}",
            plan.model,
            f"{plan.num_gpus:,}",
            plan.gpu,
            plan.layout or NONE,
            rate(plan.tokens_per_second_per_gpu),
            plan.status,
        )
        for plan in plans
    ]
    return grid(COLUMNS, rows, width)
