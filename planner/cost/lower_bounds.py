"""Lower bounds of time and memory, by which a search leaves out layouts that cannot win.

Letters: N layouts, U distinct rows, K + 2 units (layers by kind, embedding, head).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np

from planner.columns import (
    BoolColumn,
    FloatColumn,
    IntColumn,
    LayoutBatch,
    groups,
    in_order,
    one_number,
)
from planner.columns.table import Table
from planner.cost import chunks
from planner.cost.cost_inputs import distinct_rows, open_columns, shards_at, units_at
from planner.cost.data_parallel import sharding, unit_elements
from planner.cost.data_parallel.optimizer_step import copy_bytes
from planner.cost.data_parallel.overlap import exposed_data_parallel
from planner.cost.layer import forward_backward_overlap as pairs
from planner.cost.layer.quantisation import may_store_low
from planner.cost.layer.unit_costs import UnitCosts
from planner.cost.loads import Loads, at_rows, sums
from planner.cost.memory import host_activations
from planner.cost.memory.peak import RankShapes, Widths, rank_memory
from planner.cost.pipeline.schedule_columns import by_schedule, critical_pairs, num_microbatches
from planner.cost.prepared_job import PreparedJob
from planner.cost.stage_seconds import adding_up
from planner.cost.stragglers import straggler_share
from planner.precision import TWO_BYTES, column
from planner.schedules import SCHEDULES, Schedule
from planner.specs.layout import CP_METHODS, MOE_DISPATCHERS, WITHOUT_EP
from planner.work.axes import ALLGATHER, ALLTOALL, ANY
from planner.work.checkpointing import BLOCK, FULL

SPLIT_HIDES = 0.5  # of the bubble, at most: `search.variations.splits`
_LEAST = ("saved_bytes", "transient_bytes", "logits_bytes", "boundary_bytes")
_WITHOUT_EP = tuple(map(MOE_DISPATCHERS.index, WITHOUT_EP))
# bytes of which a bound counts none
_NOTHING = RankShapes(**dict.fromkeys((one.name for one in fields(RankShapes)), np.zeros(())))
_MOST = ("exposed_forward", "exposed_backward")  # overlapped pairs hide no more than that


@dataclass(frozen=True, slots=True)
class Idle(Table):
    """Time that schedules of N cells hide and leave idle at the least, (N,).

    overlaps: whether one of them overlaps pairs of microbatches.
    microbatches: how many microbatches' seconds a rank waits in a step with the best of them.
    """

    overlaps: BoolColumn
    microbatches: FloatColumn

    @classmethod
    def of_any(cls, batch: LayoutBatch) -> "Idle":
        """Bounds for cells whose schedules are not known."""
        return cls(batch.pp > 1, np.zeros(len(batch)))

    @classmethod
    def of(
        cls, job: PreparedJob, cells: LayoutBatch, schedules: Iterable[tuple[int, IntColumn]]
    ) -> "Idle":
        """Bounds for cells with these schedules: (code, most stages a rank, 0 for none, (N,))."""
        overlaps, least = np.zeros(len(cells), dtype=np.bool_), np.full(len(cells), np.inf)
        m = num_microbatches(cells, job.training).astype(np.int64)
        for code, stages in schedules:
            rows = np.flatnonzero((stages > 0) & (cells.pp > 1))
            schedule = SCHEDULES.of_code(code)
            pp, virtual, count = cells.pp[rows], stages[rows], m[rows]
            paired = schedule.pairs_on_critical_path(pp, virtual, count) > 0
            overlaps[rows] |= paired
            one, none = np.ones(len(rows)), np.zeros(len(rows))
            idle = none if schedule.splits_backward else np.min(
                [
                    schedule.bubble_seconds(pp, virtual, count, *seconds)
                    for seconds in ((one, none, none), (none, one, none), (none, none, one))
                ],
                axis=0,
            )  # fmt: skip
            least[rows] = np.minimum(least[rows], np.where(paired, 0.0, idle))
        return cls(overlaps, np.where(np.isfinite(least), least, 0.0))


def lower_bounds(
    job: PreparedJob, batch: LayoutBatch, idle: Idle | None = None
) -> tuple[FloatColumn, FloatColumn]:
    """Lower bounds (step seconds, device bytes), (N,) each.

    They hold for every schedule, ZeRO stage and split of the layouts. Async TP, every CP method and
    gathers in low precision are tried, since they only save.
    Time: a step takes at least as long as its busiest rank computes (exposed TP, CP, EP included),
        with waits for stragglers in proportion, and the busiest rank takes at least the mean. It
        takes no less than its data-parallel communication either. Then comes the optimizer.
        Bubble and fixed costs are not negative.
    Memory: the worst rank holds at least the mean of fully sharded states, of gradients that
        accumulate, and of activations of (pp + 1) / 2 microbatches (the mean of 1F1B, which no
        schedule undercuts), less one layer for uneven splits. Buffers are left out, and in a
        pipeline logits and recomputation too.
    """
    unit, each = _least_units(job, batch)
    return each.of_cells(idle), _least_bytes(job, batch, unit, each.at)


def device_and_compute_bounds(
    job: PreparedJob, batch: LayoutBatch, idle: Idle
) -> tuple[FloatColumn, FloatColumn]:
    """(device bytes of `lower_bounds`, seconds of `compute_lower_bounds`), (N,) each."""
    unit, each = _least_units(job, batch)
    return _least_bytes(job, batch, unit, each.at), each.with_bubble(idle)


def cell_device_bounds(
    job: PreparedJob, batch: LayoutBatch, most_bytes: float
) -> tuple[FloatColumn, FloatColumn]:
    """(the device bytes of `lower_bounds` (N,), room (Z, N)).

    Room is how many microbatches a mean rank has room for in flight, at the most, in each of the Z
    stages in which the trainer shards; -inf where nothing fits. Bytes are the largest of sums that
    grow evenly with microbatches in flight, so what one more adds, each further one adds at the
    least.
    most_bytes: how much of a device may be used.
    """
    unit, each = _least_units(job, batch)
    device = _least_bytes(job, batch, unit, each.at)
    near = np.flatnonzero(device <= most_bytes)  # less sharding holds no less
    room = np.full((len(job.rules.sharding.stages), len(batch)), -np.inf)
    part, at_unit = batch.take(near), each.at[near]
    held = _in_flight(job, part)
    either = np.stack([held, held + 1.0])
    for place, stage in enumerate(job.rules.sharding.stages):
        fewest, more = _device_bytes(job, _sharded(part, stage), unit, at_unit, either)
        further = np.maximum(0.0, most_bytes - more) / np.maximum(more - fewest, 1.0)
        room[place, near] = np.where(fewest <= most_bytes, held + 1.0 + further, -np.inf)
    return device, room


def least_in_flight(job: PreparedJob, batch: LayoutBatch) -> FloatColumn:
    """Microbatches in flight on a mean rank of exactly these layouts, (N,), as `room` counts them.

    One less where all are in flight at the first backward, when there is no gradient.
    """
    count = num_microbatches(batch, job.training)
    columns = (batch.pp_schedule, batch.pp, batch.virtual_stages, count)
    first, inverse = groups.unique_rows(columns)
    rows, m = batch.take(first), count[first]

    def mean(schedule: Schedule, at: IntColumn) -> FloatColumn:
        pp, v, microbatches = rows.pp[at], rows.virtual_stages[at], m[at].astype(np.int64)
        rank = np.arange(pp.max(initial=1))[:, None]
        held = schedule.in_flight(np.minimum(rank, pp - 1), pp, v, microbatches)
        held = np.where(rank < pp, held, 0.0)
        all_at_once = (held.max(axis=0) >= m[at]) | (m[at] <= 2.0 * pp)
        return np.asarray(held.sum(axis=0) / pp - all_at_once)

    return np.maximum(by_schedule(rows, mean, 1.0), 0.0)[inverse]


def time_lower_bounds(
    job: PreparedJob, batch: LayoutBatch, idle: Idle | None = None
) -> FloatColumn:
    """The step seconds of `lower_bounds`, (N,)."""
    return _least_seconds(job, batch).of_cells(idle)


def compute_lower_bounds(job: PreparedJob, batch: LayoutBatch, idle: Idle) -> FloatColumn:
    """Seconds of `time_lower_bounds` that neither network nor optimizer takes, (N,)."""
    return _least_seconds(job, batch).with_bubble(idle)


def step_lower_bounds(
    job: PreparedJob, batch: LayoutBatch, limit_seconds: float = np.inf
) -> tuple[FloatColumn, FloatColumn]:
    """(lower bounds of the step of exactly these layouts, what a mean rank computes in it), (N,).

    They hold for the layouts' own options under any split of the layers. The busiest rank takes at
    least the mean of compute, data-parallel waits (which are convex in what a rank holds) and
    optimizer. Idle seconds count as far as no split hides them, where weight gradients are not
    computed separately and no pairs overlap.
    limit_seconds: of layouts that compute longer, that is the bound.
    """
    unit, each = _own_units(job, batch)
    paired = critical_pairs(batch, num_microbatches(batch, job.training)) > 0
    compute = each.mean(paired)
    near = np.flatnonzero(compute <= limit_seconds)
    bound, part = compute.copy(), batch.take(near)
    more = _beyond_compute(job, part, unit, each.at[near], paired[near])
    bound[near] += job.own_factor[part.precision] * more
    return bound, compute


def _beyond_compute(
    job: PreparedJob, batch: LayoutBatch, unit: UnitCosts, inverse: IntColumn, paired: BoolColumn
) -> FloatColumn:
    """Seconds of a step of exactly these layouts beyond what a mean rank computes, (N,)."""
    m = num_microbatches(batch, job.training)
    rows, at_shard = groups.distinct(batch, sharding.KEY)
    shards = shards_at(job, rows)
    units = np.asarray(job.unit_counts[:, None] / batch.pp)
    mean = Loads(
        batch=batch,
        m=m,
        units=units,
        at_unit=inverse,
        at_shard=at_shard,
        spared=np.zeros(len(batch)),
    )
    added = adding_up(shards, at_shard, m)
    forward, input_grad, weight_grad = (
        at_rows(seconds, inverse) for seconds in (unit.forward, unit.input_grad, unit.weight_grad)
    )
    exposed = exposed_data_parallel(
        mean,
        (forward, input_grad + weight_grad + added),
        shards,
        job.training,
        job.rules,
        job.profile.dp_hidden,
    )
    outside = exposed.fsdp + exposed.dp + exposed.copies
    outside = outside + sums(units, m * added + at_rows(shards.update_seconds, at_shard))
    f, i, w = (sums(units, s) for s in (forward, input_grad, weight_grad + added))

    def idle(schedule: Schedule, at: IntColumn) -> FloatColumn:
        if schedule.splits_backward:
            return np.zeros(len(at))
        pp, v, count = batch.pp[at], batch.virtual_stages[at], m[at].astype(np.int64)
        return np.asarray(schedule.bubble_seconds(pp, v, count, f[at], i[at], w[at]))

    bubble = np.where(paired, 0.0, by_schedule(batch, idle, 0.0))
    return np.asarray(outside + shards.step_seconds[at_shard] + (1.0 - SPLIT_HIDES) * bubble)


def layout_lower_bounds(
    job: PreparedJob, batch: LayoutBatch, overlaps: BoolColumn | None = None
) -> FloatColumn:
    """Compute seconds of a mean rank in a step of exactly these layouts, (N,).

    overlaps (N,): whether they may overlap pairs, which hides communication; unless given, what
        their own schedules do.
    """
    if overlaps is None:
        overlaps = critical_pairs(batch, num_microbatches(batch, job.training)) > 0
    return _own_units(job, batch)[1].mean(overlaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """Seconds of one microbatch on all units of N layouts, at U distinct rows.

    at (N,): each layout's row.
    seconds (U,): at the least. hidden (U,): of them, what overlapped pairs hide at the most.
    """

    job: PreparedJob
    batch: LayoutBatch
    at: IntColumn
    seconds: FloatColumn
    hidden: FloatColumn

    def mean(self, overlaps: BoolColumn) -> FloatColumn:
        """Compute seconds of a mean rank in a step, (N,), less all that overlapped pairs can hide.

        Waits for stragglers are in proportion to it.

        overlaps (N,): layouts whose schedules overlap pairs.
        """
        job, batch, at = self.job, self.batch, self.at
        late = straggler_share(job.cluster.num_gpus, job.profile.straggler_delay)
        m = num_microbatches(batch, job.training)
        mean = m * self.seconds[at] / batch.pp
        mean = mean - np.where(overlaps, m * self.hidden[at] / batch.pp, 0.0)
        return np.asarray(job.own_factor[batch.precision] * (1.0 + late) * mean)

    def with_bubble(self, idle: Idle, least: FloatColumn | float = 0.0) -> FloatColumn:
        """The mean, and a step's wait with the best of the cells' schedules, (N,).

        least (N,): seconds that the mean takes in any case.
        """
        batch = self.batch
        each = (1.0 - SPLIT_HIDES) * idle.microbatches * self.seconds[self.at] / batch.pp
        bubble = self.job.own_factor[batch.precision] * each
        return np.asarray(np.maximum(self.mean(idle.overlaps), least) + bubble)

    def of_cells(self, idle: Idle | None) -> FloatColumn:
        """A step of the fastest of each cell's options, at least, (N,)."""
        idle = Idle.of_any(self.batch) if idle is None else idle
        network, update = _least_data_parallel(self.job, self.batch)
        factor = self.job.own_factor[self.batch.precision]
        alone = np.where(idle.overlaps, 0.0, network)  # what pairs hide may be waited for there
        return self.with_bubble(idle, factor * alone) + factor * update


def _least_data_parallel(job: PreparedJob, batch: LayoutBatch) -> tuple[FloatColumn, FloatColumn]:
    """(seconds of a mean rank's network in a step, of its optimizer), (N,), at the least.

    Every ZeRO stage is tried that shards where the layout's does, and gathers in both widths.
    """
    alike, at = groups.distinct(batch, sharding.KEY)
    low = alike.float8_all_gather
    widths = (False, True) if low.any() else (True,)
    tried = list(product(job.rules.sharding.stages, widths))
    options = alike.take(np.tile(np.arange(len(alike)), len(tried)))
    options = replace(
        options,
        zero_stage=np.concatenate([_sharded(alike, stage).zero_stage for stage, _ in tried]),
        float8_all_gather=np.concatenate([low & (not wide) for _, wide in tried]),
    )
    rows, at_row = groups.distinct(options, sharding.KEY)
    shards = shards_at(job, rows)
    own = _of_all_units(job, shards.update_seconds) / rows.pp + shards.step_seconds
    each, once, update = (
        part[at_row].reshape(len(tried), -1)
        for part in (*(part / rows.pp for part in _network(job, rows, shards)), own)
    )
    m, network = num_microbatches(batch, job.training), np.full(len(batch), np.inf)
    for of_option in range(len(tried)):
        network = np.minimum(network, m * each[of_option, at] + once[of_option, at])
    return network, update.min(axis=0)[at]


def _network(
    job: PreparedJob, rows: LayoutBatch, shards: sharding.UnitShards
) -> tuple[FloatColumn, FloatColumn]:
    """Seconds on the network of all units, (each microbatch, once a step), (U,) each.

    As `overlap.exposed_data_parallel` counts them.
    """
    gather = _of_all_units(job, shards.gather_seconds)
    reduction = _of_all_units(job, shards.scatter_seconds + shards.replicate_seconds)
    if not job.rules.sharding.reduces_by_unit:
        return np.zeros(len(rows)), gather + reduction
    piped, zero3 = rows.pp > 1, rows.zero_stage == 3
    again = np.where(zero3, gather - np.where(piped, 0.0, shards.gather_seconds[-1]), 0.0)
    every = np.where(piped & ~zero3, 0.0, gather + again)
    return every + np.where(piped, 0.0, reduction), (
        np.where(piped & ~zero3, gather, 0.0) + np.where(piped, reduction, 0.0)
    )


def _own_units(job: PreparedJob, batch: LayoutBatch) -> tuple[UnitCosts, _Microbatch]:
    """The units with the layouts' own options."""
    rows, at = distinct_rows(job, batch)
    unit = units_at(job, rows)
    hidden = _of_all_units(job, pairs.most_saved(unit, job.profile))
    seconds = _of_all_units(job, unit.total)
    return unit, _Microbatch(job=job, batch=batch, at=at, seconds=seconds, hidden=hidden)


def _least_units(job: PreparedJob, batch: LayoutBatch) -> tuple[UnitCosts, _Microbatch]:
    """The units with the best of what the layouts' options allow, in bytes as in seconds."""
    rows, at = _optimistic_rows(job, batch)
    unit, seconds, hidden = _least_at(job, rows)
    return unit, _Microbatch(job=job, batch=batch, at=at, seconds=seconds, hidden=hidden)


def _least_seconds(job: PreparedJob, batch: LayoutBatch) -> _Microbatch:
    """The seconds of `_least_units`, in parts whose columns stay in fast memory."""
    rows, at = _optimistic_rows(job, batch)
    seconds, hidden = np.empty((2, len(rows)))
    for part in chunks.slices(len(rows), chunks.CACHED_ROWS):
        _, seconds[part], hidden[part] = _least_at(job, rows.take(part))
    return _Microbatch(job=job, batch=batch, at=at, seconds=seconds, hidden=hidden)


def _optimistic_rows(job: PreparedJob, batch: LayoutBatch) -> tuple[LayoutBatch, IntColumn]:
    """`distinct_rows` of the layouts with every option on that can only save time or memory.

    These are async TP, gathers in low precision, and stages for an overlapped exchange.
    """
    narrow = batch.float8_all_gather | (
        column("wire_bytes", batch.precision, job.recipes) < TWO_BYTES
    )
    staged = replace(
        batch,
        async_tp=batch.async_tp | (batch.tp > 1),
        float8_all_gather=narrow,
        virtual_stages=np.maximum(batch.virtual_stages, np.where(batch.pp > 1, 2, 1)),
    )
    return distinct_rows(job, staged)


def _least_at(job: PreparedJob, rows: LayoutBatch) -> tuple[UnitCosts, FloatColumn, FloatColumn]:
    """(units at U rows, seconds of all units, what pairs hide of them), the best of all methods."""
    first, *others = product(_cp_methods(job), _dispatchers(job))
    unit = units_at(job, _with_methods(job, rows, *first))
    least = _of_all_units(job, unit.total)
    kept = {name: getattr(unit, name).copy() for name in (*_LEAST, *_MOST)}
    for split, tried_rows in _others(job, rows, first, others):
        tried = units_at(job, tried_rows)
        least[split] = np.minimum(least[split], _of_all_units(job, tried.total))
        for name, found in kept.items():
            better = np.minimum if name in _LEAST else np.maximum
            found[..., split] = better(found[..., split], getattr(tried, name))
    blocks = np.flatnonzero(rows.ac_kind == BLOCK)
    if len(blocks):  # their time is that of no recomputation, their memory that of full
        full = units_at(job, rows.take(blocks), FULL)
        for name in _LEAST:
            kept[name][..., blocks] = np.minimum(kept[name][..., blocks], getattr(full, name))
    unit = replace(unit, **kept)
    return unit, least, _of_all_units(job, pairs.shares_of_wires(unit, job.profile))


def _others(
    job: PreparedJob, rows: LayoutBatch, first: tuple[int, int], others: Sequence[tuple[int, int]]
) -> Iterator[tuple[IntColumn, LayoutBatch]]:
    """(rows that differ under another CP method and dispatcher than the first, those rows so)."""
    for method, dispatcher in others:
        differs = (rows.cp > 1) | (method == first[0])
        differs &= (rows.ep > 1) | (dispatcher in _WITHOUT_EP) | (dispatcher == first[1])
        split = np.flatnonzero(differs)
        if len(split):
            yield split, _with_methods(job, rows.take(split), method, dispatcher)


def _of_all_units(job: PreparedJob, values: FloatColumn) -> FloatColumn:
    return in_order(job.unit_counts[:, None] * values)


def _in_flight(job: PreparedJob, batch: LayoutBatch) -> FloatColumn:
    """Microbatches in flight on a mean rank under any schedule, beside whole gradients, (N,).

    One less where all may be in flight at the first backward, when there is no gradient.
    """
    m = num_microbatches(batch, job.training)
    most = np.minimum(m, (batch.pp + 1) / 2.0)
    return np.where((batch.pp > 1) & (m <= 2.0 * batch.pp), np.maximum(most - 1.0, 0.0), most)


def _sharded(batch: LayoutBatch, stage: int) -> LayoutBatch:
    """The layouts with this ZeRO stage where they shard."""
    return replace(batch, zero_stage=np.where(batch.zero_stage == 0, 0, stage))


def _cp_methods(job: PreparedJob) -> list[int]:
    """Codes of the CP methods to try: two that differ in communication alone count as one."""
    codes = {CP_METHODS.index(name) for name in job.rules.cp_methods}
    alike = {ALLGATHER, ALLTOALL}
    return sorted(codes - alike | {ANY} if alike <= codes else codes)


def _dispatchers(job: PreparedJob) -> list[int]:
    """Codes of the dispatchers to try: any, where nothing but the exchange depends on it."""
    codes = {MOE_DISPATCHERS.index(name) for name in job.rules.moe_dispatchers}
    decides = "moe_dispatcher" in open_columns(job)
    return [ANY] if len(codes) > 1 and not decides else sorted(codes)


def _with_methods(
    job: PreparedJob, rows: LayoutBatch, cp_method: int, dispatcher: int
) -> LayoutBatch:
    """The rows with this CP method and dispatcher (codes, or ANY).

    Where no token leaves its rank, they keep theirs unless dispatchers differ even there.
    """
    without = dispatcher in _WITHOUT_EP
    if dispatcher == ANY:
        without = len(set(WITHOUT_EP) & job.rules.moe_dispatchers) > 1
    dispatchers = np.where((rows.ep > 1) | without, dispatcher, rows.moe_dispatcher)
    return replace(rows, cp_method=one_number(cp_method, len(rows)), moe_dispatcher=dispatchers)


def _least_bytes(
    job: PreparedJob, batch: LayoutBatch, unit: UnitCosts, at_unit: IntColumn
) -> FloatColumn:
    """Device bytes of `lower_bounds`, (N,): fully sharded."""
    sharded = _sharded(batch, job.rules.sharding.stages[0])
    return _device_bytes(job, sharded, unit, at_unit, _in_flight(job, batch))


def _device_bytes(
    job: PreparedJob,
    batch: LayoutBatch,
    unit: UnitCosts,
    at_unit: IntColumn,
    in_flight: FloatColumn,
) -> FloatColumn:
    """The least that a mean rank holds with so many microbatches in flight, (..., N) each."""
    parts = [
        _part_bytes(job, batch.take(part), unit, at_unit[part], in_flight[..., part])
        for part in chunks.slices(len(batch))
    ]
    return np.concatenate([in_flight[..., :0], *parts], axis=-1)


def _part_bytes(
    job: PreparedJob,
    batch: LayoutBatch,
    unit: UnitCosts,
    at_unit: IntColumn,
    in_flight: FloatColumn,
) -> FloatColumn:
    counts, m = job.unit_counts, num_microbatches(batch, job.training)
    shard_rows, at_shard = groups.distinct(batch, sharding.KEY)
    dense, expert = unit_elements.unit_parameters(job.model, shard_rows)
    local = _of_all_units(job, dense + expert)[at_shard] / batch.pp
    kept = unit_elements.kept_shards(shard_rows, dense, expert, job.cluster.rank_order)
    shard = _of_all_units(job, kept)[at_shard] / batch.pp
    elements = unit_elements.quantised_elements(job, shard_rows, dense, expert)
    quantised = _of_all_units(job, elements)[at_shard] / batch.pp
    elements = unit_elements.gathered_elements(job, shard_rows, dense, expert)
    gathered = _of_all_units(job, elements)[at_shard] / batch.pp
    running, stored = _running_layer(job, batch, m, unit, at_unit, elements[:, at_shard])
    saved = _of_all_units(job, unit.saved_bytes)[at_unit] / batch.pp
    gone = host_activations.away(batch, job.model.num_hidden_layers)
    if gone.any():
        of_layers = in_order(counts[:-2, None] * unit.saved_bytes[:-2])[at_unit] / batch.pp
        saved = saved - gone * of_layers
    alone = batch.pp == 1
    uneven = 1.0 - np.where(alone, 0.0, np.minimum(1.0, batch.pp / counts[:-2].sum()))
    low = may_store_low(batch, job.recipes)
    shapes = replace(
        _NOTHING,
        local=local,
        shard=np.broadcast_to(shard, in_flight.shape),
        received_bytes=stored,
        gathered=gathered,
        copies_bytes=quantised * np.minimum(copy_bytes(job, batch, low), 0.0),
        saved_bytes=saved * uneven,
        head_saved_bytes=unit.saved_bytes[-1, at_unit],
        last_layer_bytes=running,
        in_flight=in_flight,
        logits_bytes=np.where(alone, unit.logits_bytes[at_unit], 0.0),
    )
    memory = rank_memory(shapes, batch, m, job.training, job.rules, job.profile.workspace_bytes)
    return memory.allocated + job.cluster.gpu.context_bytes


def _running_layer(
    job: PreparedJob,
    batch: LayoutBatch,
    m: FloatColumn,
    costs: UnitCosts,
    at_unit: IntColumn,
    gathered: FloatColumn,
) -> tuple[FloatColumn, FloatColumn]:
    """(bytes of the layer that runs its backward, of receive buffers), on a mean rank, (N,) each.

    The ends of a pipeline may hold no layer. Each microbatch has a buffer for what every stage
    receives, where a trainer allocates them all.
    gathered (K + 2, N): elements of each unit that are gathered.
    """
    widths = Widths.of(batch, m, job.rules)
    layers = costs.transient_bytes[:-2][:, at_unit] + widths.gathered * gathered[:-2]
    holding = np.maximum(batch.pp - 2.0, 1.0) / batch.pp
    running = np.where(batch.pp == 1, layers.max(axis=0), holding * layers.min(axis=0))
    if not job.rules.framework.buffers_every_receive:
        return running, np.zeros(len(batch))
    received = m * (2.0 - 2.0 / batch.pp) * costs.boundary_bytes[at_unit]
    return running, np.where(batch.pp > 1, received, 0.0)
