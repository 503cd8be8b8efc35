"""Orders of pipelines, read from the text that `to_csv` and torch write."""

import re

from planner.cost.pipeline.event_simulation import CompiledSchedule, compile_graph
from planner.cost.pipeline.lowering import lower
from planner.schedules import Action, Order, OverlappedPair
from planner.schedules.actions import as_columns
from planner.trainers.transports import IDEAL, Transport

ACTION = re.compile(r"(\d+)([FIWB])(\d+)")


def from_csv(text: str) -> Order:
    """One line a rank; torch leaves the cells of idle slots empty."""
    return tuple(
        tuple(item_of(cell) for cell in line.split(",") if cell) for line in text.splitlines()
    )


def item_of(cell: str) -> Action | OverlappedPair:
    actions = [
        Action(int(stage), kind, int(microbatch))
        for stage, kind, microbatch in ACTION.findall(cell)
    ]
    item = OverlappedPair(*actions) if "OVERLAP_F_B" in cell else actions[0]
    assert str(item) == cell
    return item


def compile_order(order: Order, transport: Transport = IDEAL) -> CompiledSchedule:
    columns = as_columns(order)
    return compile_graph(lower(columns, transport), columns)
