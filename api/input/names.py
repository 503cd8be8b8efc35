"""Ids cut short: any beginning that only one object has, with or without its kind before it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from planner.api.storage.common import TableStore, is_id
from planner.api.wiring import Wiring
from planner.errors import fault
from planner.units import counted

SHOWN = 4  # of the ids that a beginning could mean
LONGEST = 100


def _id_of(
    kind: str,
    stores: Callable[[Wiring], Sequence[TableStore[Any]]],
    wiring: Wiring,
    text: str,
    field: str | None = None,
) -> str:
    """The whole id of the only object of this kind that begins so.

    The text itself where none does. field: names the text in an error; KIND_ID unless given.
    Raises SpecError where several do.
    """
    typed = text.strip().lower()
    if not typed or not is_id(typed) or len(typed) > LONGEST:
        return text
    start = typed if typed.startswith(f"{kind}-") else f"{kind}-{typed}"
    names = (store.ids_starting(start, SHOWN + 1) for store in stores(wiring))
    found = sorted(set(chain.from_iterable(names)), reverse=True)
    if typed in found or len(found) == 1:
        return typed if typed in found else found[0]
    if not found:
        return text
    more = len(found) > SHOWN
    shown = ", ".join(found[:SHOWN]) + (", ..." if more else "")
    number = f"more than {counted(SHOWN, kind)}" if more else counted(len(found), kind)
    field = field or f"{kind.upper()}_ID"
    raise fault(field, text, f"is the beginning of {number}: {shown}", "give more of it")


# a task: the study that makes a plan
plan_id_of = partial(_id_of, "plan", lambda wiring: (wiring.store, wiring.tasks))
probe_id_of = partial(_id_of, "probe", lambda wiring: (wiring.probes,))
sweep_id_of = partial(_id_of, "sweep", lambda wiring: (wiring.sweeps,))
