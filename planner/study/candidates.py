"""The legal layouts that a probe could be spent on, as columns, with the prior of each.

The prior is what the cost model predicts before any probe.
Letters: N candidates, Q directions of error that candidates share, C cells of the space.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from planner.calibration import similarity as likeness
from planner.calibration import student
from planner.calibration.intervals import TimeSpread, memory_deviation, oom_probability, time_spread
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.columns.table import Table
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.errors import InfeasibleError
from planner.search.fit import OOM_LIMIT
from planner.search.space.enumerate import Space
from planner.specs.layout import Layout
from planner.specs.measurement import Measured

MOST = 100_000
MOST_PRICED = 400_000  # about a second
SIMULATED = 2000
# Judgement: a layout predicted this much slower than the best one that fits is not worth a probe,
# even if the model is 30% wrong about both.
SLACK = 1.5
# Judgement: layouts that probably do not fit are candidates too, because a probe can show that the
# memory model was too pessimistic.
RISKIEST = 0.5
# the first kind that was measured is compared
MEMORY_KINDS = ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The prior of a study, from any source.

    Of a calibration its directions and the offsets of stack and units are shared, the rest is each
    candidate's own.

    log_seconds (N,): mean of the logarithm of step seconds.
    sd (N,): standard deviation of each candidate's own error around it, similar for
        similar layouts (`similarity`).
    factor (N, Q): errors that candidates share on top, covariance factor @ factor.T (of draws: the
        draws less their mean over the root of their number).
    oom_probability (N,): P(device memory > usable).
    memory_sd (N,): standard deviation of the logarithm of memory.
    """

    log_seconds: FloatColumn
    sd: FloatColumn
    factor: FloatColumn
    oom_probability: FloatColumn
    memory_sd: FloatColumn

    def predicted(self, row: int) -> dict[str, Any]:
        """The prior of one candidate as attributes of its trial."""
        seconds = float(np.exp(self.log_seconds[row]))
        sd = float(np.sqrt(self.sd[row] ** 2 + (self.factor[row] ** 2).sum()))
        width = float(np.exp(student.TWO_SIDED_90 * sd))
        return {
            "predicted_step_seconds": seconds,
            "interval_seconds": [seconds / width, seconds * width],
            "oom_probability": float(self.oom_probability[row]),
        }

    def take(self, rows: IntColumn) -> "Prior":
        return Prior(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Sizes that all candidates of a study have in common.

    usable_bytes: device memory that a plan may use.
    """

    usable_bytes: float
    num_gpus: int
    global_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """N legal layouts, fastest prediction first.

    memory: predicted bytes by MEMORY_KINDS, (N,) each.
    groups: see `calibration.similarity`.
    """

    batch: LayoutBatch
    prior: Prior
    memory: Mapping[str, FloatColumn]
    size: JobSize
    groups: tuple[likeness.Group, ...]

    def __len__(self) -> int:
        return len(self.batch)

    @classmethod
    def build(
        cls, batch: LayoutBatch, prior: Prior, memory: Mapping[str, FloatColumn], size: JobSize
    ) -> "Candidates":
        """Builds them from columns in any order."""
        order = np.argsort(prior.log_seconds, kind="stable")
        rows = batch.take(order)
        return cls(
            batch=rows,
            prior=prior.take(order),
            memory={kind: column[order] for kind, column in memory.items()},
            size=size,
            groups=likeness.groups(rows, size.global_batch_size),
        )

    def find(self, layout: Layout) -> int | None:
        """The row of this layout; None if it is not a candidate."""
        both = LayoutBatch.concatenate([self.batch, LayoutBatch.from_layouts([layout])])
        alike = [column[:-1] == column[-1] for _, column in both.columns()]
        rows = np.flatnonzero(np.all(alike, axis=0))
        return int(rows[0]) if len(rows) else None

    def memory_residual(self, row: int, measured: Measured) -> float | None:
        """Log of measured over predicted memory, of the first kind with both numbers.

        None if there is no such kind.
        """
        for kind in MEMORY_KINDS:
            value = getattr(measured, kind)
            if value is not None and value > 0 and kind in self.memory:
                return float(np.log(value / self.memory[kind][row]))
        return None


def enumerate_candidates(
    pricer: Pricer,
    space: Space,
    *,
    most: int = MOST,
    slack: float = SLACK,
    include: Sequence[Layout] = (),
) -> Candidates:
    """Finds and prices the `most` fastest legal layouts within `slack` of the best that fits.

    The first SIMULATED of them are simulated. Cells are priced in the order of their lower bound on
    time until the bound passes `slack` times the best, or MOST_PRICED layouts are priced.
    include: legal layouts that must be candidates (measured ones, the current layout).
    Raises InfeasibleError when no layout of the space may fit.
    """
    parts = list(_parts(pricer, space, slack))
    if include:
        parts.append(_Part.of(pricer, LayoutBatch.from_layouts(include), keep_all=True))
    if not sum(len(part.batch) for part in parts):
        raise InfeasibleError(
            "no layout is likely enough to fit for a probe to be spent on it",
            remedy="use more GPUs or a smaller job",
        )
    joined = _Part.joined(parts)
    best = np.argsort(joined.step_seconds, kind="stable")
    within = joined.step_seconds[best] <= slack * joined.fastest
    chosen = best[within][:most]
    wanted = np.arange(len(joined.batch) - len(include), len(joined.batch))
    rows = joined.take(np.concatenate([chosen, np.setdiff1d(wanted, chosen)])).without_twins()
    size = JobSize(
        usable_bytes=float(pricer.cluster.usable_memory_bytes),
        num_gpus=pricer.cluster.num_gpus,
        global_batch_size=pricer.training.global_batch_size,
    )
    return Candidates.build(rows.batch, _prior(pricer, rows), rows.memory, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(Table):
    batch: LayoutBatch
    step_seconds: FloatColumn
    oom: FloatColumn
    memory: Mapping[str, FloatColumn]

    @classmethod
    def of(cls, pricer: Pricer, batch: LayoutBatch, *, keep_all: bool = False) -> "_Part":
        prices = pricer.price(batch)
        oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        part = cls(
            batch=batch,
            step_seconds=prices.step_seconds,
            oom=oom,
            memory={kind: getattr(prices, kind) for kind in MEMORY_KINDS},
        )
        return part if keep_all else part.take(np.flatnonzero(part.oom <= RISKIEST))

    def without_twins(self) -> "_Part":
        """Removes duplicates; the first place of each layout counts."""
        table = np.stack(
            [np.asarray(column, dtype=np.float64) for _, column in self.batch.columns()], axis=1
        )
        _, first = np.unique(table, axis=0, return_index=True)
        return self.take(np.sort(first))

    @property
    def fastest(self) -> float:
        """Step seconds of the best that fits, or of the best at all."""
        fits = self.oom <= OOM_LIMIT
        return float(self.step_seconds[fits].min() if fits.any() else self.step_seconds.min())


def _parts(pricer: Pricer, space: Space, slack: float) -> Iterator[_Part]:
    """Yields what may fit of the cells that can matter, about CHUNK layouts at once.

    Cells with the lowest time bound come first.
    """
    if not len(space.cells):
        return
    seconds, device = pricer.lower_bounds(space.cells.take(slice(None)))
    possible = oom_probability(pricer.profile, pricer.cluster, np.maximum(device, 1.0)) <= RISKIEST
    order = np.argsort(np.where(possible, seconds, np.inf), kind="stable")[: int(possible.sum())]
    ends = np.cumsum(space.cell_sizes[order])
    start, priced, best = 0, 0, np.inf
    while start < len(order) and priced < MOST_PRICED and seconds[order[start]] <= slack * best:
        stop = max(start + 1, int(np.searchsorted(ends, priced + CHUNK, side="right")))
        part = _Part.of(pricer, space.expand(order[start:stop]))
        fits = part.oom <= OOM_LIMIT
        best = min(best, float(part.step_seconds[fits].min())) if fits.any() else best
        yield part
        start, priced = stop, int(ends[stop - 1])


def _prior(pricer: Pricer, part: _Part) -> Prior:
    """The calibration's prior. The SIMULATED fastest are simulated.

    The screen is within 1 to 2% of the simulation (`benchmarks/screening.py`).
    """
    seconds = part.step_seconds.copy()
    rows = np.argsort(seconds, kind="stable")[:SIMULATED]
    batch = part.batch.take(rows)
    simulated = refine(pricer, batch, pricer.price(batch)).step_seconds
    seconds[rows] = np.where(np.isfinite(simulated), simulated, seconds[rows])
    chunks = [
        part.batch.take(slice(start, start + CHUNK)) for start in range(0, len(seconds), CHUNK)
    ]
    spread = TimeSpread.joined(
        [time_spread(pricer, chunk, pricer.price(chunk)) for chunk in chunks]
    )
    return Prior(
        log_seconds=np.log(seconds),
        sd=spread.own_sd,
        factor=spread.loadings.T,
        oom_probability=part.oom,
        memory_sd=memory_deviation(pricer.profile, part.memory["device_bytes"]),
    )
