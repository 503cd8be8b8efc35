"""How much goes to the host, for the layouts where less than all of it suffices.

Megatron-LM moves any share of the optimizer's states there (--optimizer-offload-fraction), and the
activations of any number of layers (--cpu-offloading-num-layers). A step takes longer and the
device holds less the more that is. The least that fits is found by bisection, for all layouts at
once that do not fit with nothing there. A layout whose time with nothing there is no better than
the worst that is kept drops out before.
"""

from dataclasses import replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.memory.host_activations import host_bytes
from planner.cost.price import Pricer
from planner.rules import Context
from planner.rules.sharding import node_bytes
from planner.search.fit import fitting
from planner.search.space.enumerate import Space
from planner.search.variations.dials import Dial, DialSearch, turned
from planner.work.checkpointing import NONE

STEPS = 20  # judgement: Megatron-LM moves whole tensors, of which a rank has tens to hundreds
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the layers, with which shares of the states are sought


def with_share(batch: LayoutBatch, twentieths: IntColumn) -> LayoutBatch:
    """The layouts with these shares of their states on the host, in STEPS-ths; 0 is no offload."""
    share = np.where(twentieths > 0, np.round(twentieths / STEPS, 2), 1.0)
    return replace(batch, cpu_offload=twentieths > 0, optimizer_offload_fraction=share)


def with_layers(batch: LayoutBatch, layers: IntColumn) -> LayoutBatch:
    """The layouts with the activations of so many layers on the host."""
    return replace(batch, activation_offload_layers=layers)


def states(pricer: Pricer) -> Dial:
    """The share of the states that stays on the device, in STEPS-ths."""
    return Dial(
        least=0,
        steps=STEPS,
        at=lambda batch, staying: with_share(batch, STEPS - staying),
        changes=("cpu_offload", "optimizer_offload_fraction"),
        reads=("cpu_offload",),
        takes=lambda batch: batch.cpu_offload,
        holds=lambda batch: _host_holds(pricer, batch),
    )


def activations(pricer: Pricer) -> Dial:
    """The layers whose activations stay; all but one may leave, where nothing is recomputed."""
    steps = pricer.model.num_hidden_layers - 1
    return Dial(
        least=0,
        steps=steps,
        at=lambda batch, staying: with_layers(batch, steps - staying),
        changes=("activation_offload_layers",),
        reads=("pp", "ac_kind"),
        takes=lambda batch: (batch.pp == 1) & (batch.ac_kind == NONE),
        holds=lambda batch: _host_holds(pricer, batch),
    )


def largest_share(context: Context) -> float:
    """The largest share, in STEPS-ths, that a node's memory holds for one replica; 0 if none."""
    room = context.cluster.host_memory_bytes / node_bytes(context)
    return round(min(int(STEPS * room), STEPS) / STEPS, 2)


def best_offloaded(
    pricer: Pricer, space: Space, dial: Dial, limit: float, keep: int
) -> LayoutBatch:
    """The `keep` fastest of the space below `limit` seconds, with the least on the host that fits.

    Cells that fit with all of it there are looked at, in the order of their bound with none.
    """
    return _best(pricer, space, np.flatnonzero(dial.takes(space.cells)), dial, limit, keep)


def best_of_both(pricer: Pricer, space: Space, dial: Dial, limit: float, keep: int) -> LayoutBatch:
    """As `best_offloaded`, with shares of the states beside some of the layers, of QUARTERS.

    dial: of activations. space: of layouts with CPU offload.
    """
    rows = np.flatnonzero(dial.takes(space.cells))
    found = [space.cells.take(slice(0, 0))]
    for part in QUARTERS:
        cells = with_layers(space.cells, np.full(len(space.cells), int(part * dial.steps)))
        some = _best(pricer, replace(space, cells=cells), rows, states(pricer), limit, keep)
        fewer, _ = least_offloaded(pricer, some, dial, limit)
        found += [some, fewer]
    return LayoutBatch.concatenate(found)


def _best(
    pricer: Pricer, space: Space, rows: IntColumn, dial: Dial, limit: float, keep: int
) -> LayoutBatch:
    if not len(rows):
        return space.cells.take(rows)
    least = pricer.time_lower_bounds(dial.all_at(space.cells.take(rows), dial.steps))
    rows, least = rows[least < limit], least[least < limit]
    if len(rows):
        _, device = pricer.lower_bounds(dial.all_at(space.cells.take(rows), dial.least))
        rows, least = rows[fitting(pricer, device)], least[fitting(pricer, device)]
    most = np.full(len(rows), dial.steps)
    found = DialSearch(pricer, space, dial, rows, most, least, limit).fastest(keep)
    return dial.at(found.bases, found.number)


def least_offloaded(
    pricer: Pricer, bases: LayoutBatch, dial: Dial, limit: float
) -> tuple[LayoutBatch, FloatColumn]:
    """Each base below `limit` seconds with the least on the host that fits, and its step seconds.

    Left out are bases that fit with nothing there, those that do not fit with all of it there, and
    those that need more host memory than there is.
    """
    found = turned(pricer, bases, dial, limit)
    found = found.take(found.seconds < limit)
    return dial.at(found.bases, found.number), found.seconds


def _host_holds(pricer: Pricer, batch: LayoutBatch) -> BoolColumn:
    """Whether a node's memory holds states and activations, (N,)."""
    cluster = pricer.cluster
    states = node_bytes(pricer.rules_context) * batch.dp_replicate * batch.host_share
    moved = host_bytes(pricer, batch) * cluster.gpus_per_node
    return np.asarray(states + moved <= cluster.host_memory_bytes)
