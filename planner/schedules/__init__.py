"""Pipeline schedules: one file each, one line each in this registry."""

from collections.abc import Mapping

from planner.errors import UnknownNameError
from planner.schedules.base import (
    Action,
    Item,
    Order,
    Overlap,
    Schedule,
    ScheduleRule,
    leaves,
    parse_action,
    parse_item,
)
from planner.schedules.dualpipe_v import DualPipeV
from planner.schedules.gpipe import GPipe
from planner.schedules.interleaved_1f1b import Interleaved1F1B
from planner.schedules.interleaved_zero_bubble import InterleavedZeroBubble
from planner.schedules.legality import check_legal
from planner.schedules.looped_bfs import LoopedBFS
from planner.schedules.one_f_one_b import OneFOneB
from planner.schedules.torch_csv import from_csv, to_csv
from planner.schedules.zb_1p import ZB1p
from planner.schedules.zb_2p import ZB2p
from planner.schedules.zbv_zero_bubble import ZBVZeroBubble
from planner.specs.layout import SCHEDULES as NAMES

SCHEDULES: Mapping[str, Schedule] = {
    entry.name: entry
    for entry in (
        GPipe(), OneFOneB(), Interleaved1F1B(), LoopedBFS(), InterleavedZeroBubble(),
        ZBVZeroBubble(), DualPipeV(), ZB1p(), ZB2p(),
    )
}  # fmt: skip

assert tuple(SCHEDULES) == NAMES


def schedule(name: str) -> Schedule:
    """The schedule of this name; raises UnknownNameError with the closest names."""
    if name not in SCHEDULES:
        raise UnknownNameError("pp_schedule", name, SCHEDULES, "pipeline schedule")
    return SCHEDULES[name]


__all__ = [
    "SCHEDULES",
    "Action",
    "Item",
    "Order",
    "Overlap",
    "Schedule",
    "ScheduleRule",
    "check_legal",
    "from_csv",
    "leaves",
    "parse_action",
    "parse_item",
    "schedule",
    "to_csv",
]
