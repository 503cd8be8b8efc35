"""How much goes to the host, for the layouts where less than all of it suffices.

Megatron-LM moves any share of the optimizer's states there (--optimizer-offload-fraction), and the
activations of any number of layers (--cpu-offloading-num-layers). A step takes longer and the
device holds less the more that is. The least that fits is found by bisection, for all layouts at
once that do not fit with nothing there. A layout whose time with nothing there is no better than
the worst that is kept drops out before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.columns.bisect import bisected
from planner.cost.memory.host_activations import host_bytes
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.rules.sharding import node_bytes
from planner.search.fit import fitting, priced_and_fitting
from planner.search.space.enumerate import Space
from planner.work.checkpointing import NONE

STEPS = 20  # judgement: Megatron-LM moves whole tensors, of which a rank has tens to hundreds
ROUND = 5 * 2**13  # layouts expanded at once
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the layers, with which shares of the states are sought


@dataclass(frozen=True, slots=True)
class Dial:
    """Share that is moved to the host, in so many steps.

    at: the layouts with these steps there; step 0 is nothing.
    takes: which layouts of a space it is for.
    """

    steps: int
    at: Callable[[LayoutBatch, IntColumn], LayoutBatch]
    takes: Callable[[LayoutBatch], BoolColumn]


def with_share(batch: LayoutBatch, twentieths: IntColumn) -> LayoutBatch:
    """The layouts with these shares of their states on the host, in STEPS-ths; 0 is no offload."""
    share = np.where(twentieths > 0, np.round(twentieths / STEPS, 2), 1.0)
    return replace(batch, cpu_offload=twentieths > 0, optimizer_offload_fraction=share)


def with_layers(batch: LayoutBatch, layers: IntColumn) -> LayoutBatch:
    """The layouts with the activations of so many layers on the host."""
    return replace(batch, activation_offload_layers=layers)


STATES = Dial(STEPS, with_share, lambda batch: batch.cpu_offload)


def activations(pricer: Pricer) -> Dial:
    """All layers but one, where nothing is recomputed or pipelined."""
    return Dial(
        pricer.model.num_hidden_layers - 1,
        with_layers,
        lambda batch: (batch.pp == 1) & (batch.ac_kind == NONE),
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
    rows = np.flatnonzero(dial.takes(space.cells))
    return _best(pricer, space, rows, dial, limit, keep)


def best_of_both(pricer: Pricer, space: Space, dial: Dial, limit: float, keep: int) -> LayoutBatch:
    """As `best_offloaded`, with shares of the states beside some of the layers, of QUARTERS.

    space: of layouts with CPU offload.
    """
    rows = np.flatnonzero(dial.takes(space.cells))
    found = [space.cells.take(slice(0, 0))]
    for part in QUARTERS:
        layers = int(part * dial.steps)
        cells = with_layers(space.cells, np.full(len(space.cells), layers))
        some = _best(pricer, replace(space, cells=cells), rows, STATES, limit, keep)
        fewer, _ = least_offloaded(pricer, some, dial, limit)
        found += [some, fewer]
    return LayoutBatch.concatenate(found)


def _best(
    pricer: Pricer, space: Space, rows: IntColumn, dial: Dial, limit: float, keep: int
) -> LayoutBatch:
    found, seconds = space.cells.take(slice(0, 0)), np.zeros(0)
    if not len(rows):
        return found
    bound = pricer.time_lower_bounds(_all_at(dial, space.cells.take(rows), 0))
    order = np.argsort(bound, kind="stable")
    cells, bound = rows[order], bound[order]
    ends, first = np.cumsum(space.cell_sizes[cells]), 0
    while first < len(cells) and bound[first] < limit:
        reached = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, reached + ROUND, side="right")))
        part = cells[first:last][bound[first:last] < limit]
        _, device = pricer.lower_bounds(_all_at(dial, space.cells.take(part), dial.steps))
        bases = space.expand(part[fitting(pricer, device)])
        bases = bases.take(dial.takes(bases))
        if len(bases):
            bound_of_each, _ = pricer.step_lower_bounds(_all_at(dial, bases, 0), limit)
            bases = bases.take(bound_of_each < limit)
        more, their_seconds = least_offloaded(pricer, bases, dial, limit)
        found = LayoutBatch.concatenate([found, more])
        seconds = np.concatenate([seconds, their_seconds])
        order = np.argsort(seconds, kind="stable")[:keep]
        found, seconds, first = found.take(order), seconds[order], last
        limit = float(seconds[-1]) if len(seconds) == keep else limit
    return found


def least_offloaded(
    pricer: Pricer, bases: LayoutBatch, dial: Dial, limit: float
) -> tuple[LayoutBatch, FloatColumn]:
    """Each base below `limit` seconds with the least on the host that fits, and its step seconds.

    Left out are bases that fit with nothing there, those that do not fit with all of it there, and
    those that need more host memory than there is.
    """
    if len(bases):
        seconds, fits = priced_and_fitting(pricer, _all_at(dial, bases, 0))
        bases = bases.take(~fits & (seconds < limit))
    if len(bases):
        seconds, fits = priced_and_fitting(pricer, _all_at(dial, bases, dial.steps))
        bases, seconds = bases.take(fits), seconds[fits]
    if not len(bases):
        return bases, np.zeros(0)

    def fits_with(rows: IntColumn, middle: IntColumn) -> tuple[BoolColumn, BoolColumn]:
        tried, fits = priced_and_fitting(pricer, dial.at(bases.take(rows), -middle))
        seconds[rows] = np.where(fits, tried, seconds[rows])
        return fits, fits | (tried < limit)  # the answer takes longer than what does not fit

    nothing = np.zeros(len(bases), dtype=np.int64)
    rows, most, _ = bisected(nothing - dial.steps, nothing, fits_with)  # of what stays here
    found, seconds = dial.at(bases.take(rows), -most), seconds[rows]
    kept = (seconds < limit) & legal_mask(found, pricer.rules_context) & _host_holds(pricer, found)
    return found.take(kept), seconds[kept]


def _all_at(dial: Dial, batch: LayoutBatch, step: int) -> LayoutBatch:
    return dial.at(batch, np.full(len(batch), step))


def _host_holds(pricer: Pricer, batch: LayoutBatch) -> BoolColumn:
    """Whether a node's memory holds states and activations, (N,)."""
    cluster = pricer.cluster
    states = node_bytes(pricer.rules_context) * batch.dp_replicate * batch.host_share
    moved = host_bytes(pricer, batch) * cluster.gpus_per_node
    return np.asarray(states + moved <= cluster.host_memory_bytes)
