"""Ids cut short: any beginning that only one object has, with or without its kind before it."""

from itertools import chain
from typing import Any

from planner.api.storage.common import TableStore, is_id
from planner.api.wiring import Wiring
from planner.errors import fault
from planner.units import counted

SHOWN = 4  # of the ids that a beginning could mean
LONGEST = 100


def plan_id_of(wiring: Wiring, text: str, field: str = "PLAN_ID") -> str:
    """The id of the plan, or of the study that makes one, that begins so.

    The text itself where none does. Raises SpecError where several do.
    """
    return _only(text, "plan", field, wiring.store, wiring.tasks)


def probe_id_of(wiring: Wiring, text: str, field: str = "PROBE_ID") -> str:
    """The probe's whole id, from the beginning of it."""
    return _only(text, "probe", field, wiring.probes)


def sweep_id_of(wiring: Wiring, text: str, field: str = "SWEEP_ID") -> str:
    """The sweep's whole id, from the beginning of it."""
    return _only(text, "sweep", field, wiring.sweeps)


def _only(text: str, kind: str, field: str, *stores: TableStore[Any]) -> str:
    typed = text.strip().lower()
    if not typed or not is_id(typed) or len(typed) > LONGEST:
        return text
    start = typed if typed.startswith(f"{kind}-") else f"{kind}-{typed}"
    names = (store.ids_starting(start, SHOWN + 1) for store in stores)
    found = sorted(set(chain.from_iterable(names)), reverse=True)
    if typed in found or len(found) == 1:
        return typed if typed in found else found[0]
    if not found:
        return text
    more = len(found) > SHOWN
    shown = ", ".join(found[:SHOWN]) + (", ..." if more else "")
    number = f"more than {counted(SHOWN, kind)}" if more else counted(len(found), kind)
    raise fault(field, text, f"is the beginning of {number}: {shown}", "give more of it")
