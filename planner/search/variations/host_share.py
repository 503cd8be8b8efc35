"""How much of the optimizer's states lies on the host, for the layouts where a share suffices.

Megatron-LM moves any share to the host (--optimizer-offload-fraction). The update takes longer and
the device holds less the larger it is. The smallest share that fits is found by bisection over
multiples of STEP, for all layouts at once that do not fit without offload. A layout whose time with
all states on the device is no better than the worst that is kept drops out before.
"""

from dataclasses import replace

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.rules.features import node_bytes
from planner.search.bounds import OOM_LIMIT
from planner.search.space.enumerate import Space

STEPS = 20  # judgement: Megatron-LM moves whole tensors, of which a rank has tens to hundreds
ROUND = 2 * CHUNK  # layouts expanded at once


def with_share(batch: LayoutBatch, twentieths: IntColumn) -> LayoutBatch:
    """The layouts with these shares of their states on the host, in STEPS-ths; 0 is no offload."""
    share = np.where(twentieths > 0, np.round(twentieths / STEPS, 2), 1.0)
    return replace(batch, cpu_offload=twentieths > 0, optimizer_offload_fraction=share)


def largest_share(context: Context) -> float:
    """The largest share, in STEPS-ths, that a node's memory holds for one replica; 0 if none."""
    room = context.cluster.host_memory_bytes / node_bytes(context)
    return round(min(int(STEPS * room), STEPS) / STEPS, 2)


def best_shares(pricer: Pricer, space: Space, limit: float, keep: int) -> LayoutBatch:
    """The `keep` fastest of the space below `limit` seconds, at the smallest share that fits.

    space: of layouts with CPU offload; cells that fit with all states on the host are looked at, in
        the order of their bound with none there.
    """
    found, seconds = space.cells.take(slice(0, 0)), np.zeros(0)
    bound = pricer.time_lower_bounds(_at(space.cells, 0)) if len(space.cells) else seconds
    cells = np.argsort(bound, kind="stable")
    ends, first = np.cumsum(space.cell_sizes[cells]), 0
    while first < len(cells) and bound[cells[first]] < limit:
        reached = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, reached + ROUND, side="right")))
        part = cells[first:last]
        part = part[bound[part] < limit]
        _, device = pricer.lower_bounds(_at(space.cells.take(part), STEPS))
        bases = space.expand(part[_fits(pricer, np.maximum(device, 1.0))])
        bases = bases.take(bases.cpu_offload)
        if len(bases):
            bases = bases.take(pricer.step_lower_bounds(_at(bases, 0))[0] < limit)
        more, their_seconds = smallest_shares(pricer, bases, limit)
        found = LayoutBatch.concatenate([found, more])
        seconds = np.concatenate([seconds, their_seconds])
        order = np.argsort(seconds, kind="stable")[:keep]
        found, seconds, first = found.take(order), seconds[order], last
        limit = float(seconds[-1]) if len(seconds) == keep else limit
    return found


def smallest_shares(
    pricer: Pricer, bases: LayoutBatch, limit: float
) -> tuple[LayoutBatch, FloatColumn]:
    """Each base below `limit` seconds at the smallest share that fits, and its step seconds.

    Left out are bases that fit without offload, those that do not fit with all states on the host,
    and those whose share needs more host memory than there is.
    """
    if len(bases):
        seconds, fits = _priced(pricer, _at(bases, 0))
        bases = bases.take(~fits & (seconds < limit))
    if len(bases):
        seconds, fits = _priced(pricer, _at(bases, STEPS))
        bases, seconds = bases.take(fits), seconds[fits]
    if not len(bases):
        return bases, np.zeros(0)
    low, high = np.zeros(len(bases), dtype=np.int64), np.full(len(bases), STEPS)
    while len(bases) and (high - low > 1).any():
        middle = (low + high + 1) // 2
        tried, fits = _priced(pricer, with_share(bases, middle))
        seconds, high, low = (
            np.where(fits, tried, seconds),
            np.where(fits, middle, high),
            np.where(fits, low, middle),
        )
        alive = fits | (tried < limit)  # the answer takes longer than a share that does not fit
        bases, low, high, seconds = bases.take(alive), low[alive], high[alive], seconds[alive]
    found = with_share(bases, high)
    kept = (seconds < limit) & legal_mask(found, pricer.rules_context)
    return found.take(kept), seconds[kept]


def _at(batch: LayoutBatch, twentieths: int) -> LayoutBatch:
    return with_share(batch, np.full(len(batch), twentieths))


def _priced(pricer: Pricer, batch: LayoutBatch) -> tuple[FloatColumn, BoolColumn]:
    """(step seconds, whether it fits), (N,)."""
    seconds, fits = np.zeros(len(batch)), np.zeros(len(batch), dtype=np.bool_)
    for start in range(0, len(batch), CHUNK):
        rows = slice(start, start + CHUNK)
        prices = pricer.price(batch.take(rows))
        seconds[rows], fits[rows] = prices.step_seconds, _fits(pricer, prices.least_device_bytes)
    return seconds, fits


def _fits(pricer: Pricer, device_bytes: FloatColumn) -> BoolColumn:
    return oom_probability(pricer.profile, pricer.cluster, device_bytes) <= OOM_LIMIT
