"""Pipeline schedules: a class each, one line each in this registry.

A schedule's class says all there is to say about it: its order, rules and closed forms, and which
runtimes have it. Only the codes in columns of layouts come from the registry.
"""

from planner.registry import Registry
from planner.schedules.actions import Action, Item, Order, OverlappedPair, leaves, to_csv
from planner.schedules.base import Runtime, Schedule, ScheduleRule
from planner.schedules.dualpipe_v import DualPipeV
from planner.schedules.gpipe import GPipe, LoopedBFS
from planner.schedules.one_f_one_b import Interleaved1F1B, OneFOneB
from planner.schedules.zbv_zero_bubble import ZBVZeroBubble
from planner.schedules.zero_bubble import InterleavedZeroBubble, ZB1p, ZB2p

SCHEDULES: Registry[Schedule] = Registry(
    GPipe(),
    OneFOneB(),
    Interleaved1F1B(),
    LoopedBFS(),
    InterleavedZeroBubble(),
    ZBVZeroBubble(),
    DualPipeV(),
    ZB1p(),
    ZB2p(),
    kind="pipeline schedule",
    field="pp_schedule",
)


def schedules_of(runtime: Runtime) -> tuple[str, ...]:
    """Names of a pipeline runtime's schedules, in the order in which a search tries them."""
    found = (entry for entry in SCHEDULES.values() if runtime in entry.runtimes)
    return tuple(entry.name for entry in sorted(found, key=lambda entry: entry.search_order))


__all__ = [
    "SCHEDULES", "Action", "Item", "Order", "OverlappedPair", "Runtime", "Schedule",
    "ScheduleRule", "leaves", "schedules_of", "to_csv",
]  # fmt: skip
