"""Every layout of a batch priced in time and memory: the one composer of the cost model, written for columns.

Letters: N layouts, R pipeline ranks looked at, K + 2 units (layers by kind, embedding, head). `estimate` prices a batch of
one with every rank and then simulates its schedule; a search prices hundreds of thousands with the deciding ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from planner.catalog.calibrations import shipped_calibration
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost import keyed, layers, pairs, sharding, stages
from planner.cost.calibration import Calibration, kernels_at
from planner.cost.compute import Device
from planner.cost.memory import RankMemory, RankShapes, Widths, layer_moments, rank_memory
from planner.cost.overlap import Exposed, HostCopies, UnitColumns, exposed_data_parallel
from planner.cost.profile import KernelProfile, Profile
from planner.cost.quantisation import Quantisation
from planner.cost.reserved import reserved_bytes
from planner.cost.sends import Sends, transport_of
from planner.cost.site import AXES, Site
from planner.cost.topology import Fabric
from planner.cost.update import Update
from planner.schedules import SCHEDULES, Schedule
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import CP_METHODS
from planner.specs.layout import SCHEDULES as SCHEDULE_NAMES
from planner.specs.model import ModelSpec
from planner.specs.trainers import TRAINERS, TrainerRules
from planner.specs.training import TrainingSpec
from planner.work.axes import local_sizes
from planner.work.precision import TWO_BYTES, Recipe, column, recipes_for
from planner.work.quantised import quantised_model

CHUNK = 20480  # so that what a batch holds at once stays below what glibc keeps, see `_keep_freed_pages`
CACHED_ROWS = 8192
LARGE_BLOCK_BYTES = 31 << 20  # just below the largest block that glibc learns from
PARTS = ("compute", "recompute", "tp", "cp", "ep", "pp", "fsdp", "dp", "bubble", "optimizer", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricer:
    """Everything but the layouts: model, cluster, training and the profile, prepared once.

    recipes: how each precision computes under this trainer's release.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    rules: TrainerRules
    calibration: Calibration
    profile: Profile
    device: Device
    fabric: Fabric
    recipes: tuple[Recipe, ...]

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        calibration: Calibration | None = None,
        *,
        profile: Profile | None = None,
        kernels: KernelProfile | None = None,
    ) -> "Pricer":
        """A pricer for one job under a calibration (the shipped one unless given); profile and kernels replace what it says of them."""
        _keep_freed_pages()
        calibration = calibration or shipped_calibration()
        trainer, gpu = training.trainer, cluster.gpu
        profile = profile or calibration.profile(trainer, gpu.family)
        kernels = kernels or kernels_at(gpu, calibration.shift(trainer, gpu.family))
        return cls(
            model=model,
            cluster=cluster,
            training=training,
            rules=TRAINERS[training.trainer],
            calibration=calibration,
            profile=profile,
            device=Device.build(cluster, kernels, profile),
            fabric=Fabric.build(cluster, profile.intra_node, profile.inter_node),
            recipes=recipes_for(TRAINERS[training.trainer], training.trainer_version),
        )

    @property
    def update(self) -> Update:
        """How a step ends."""
        return Update(
            model=self.model, cluster=self.cluster, training=self.training, rules=self.rules, device=self.device, recipes=self.recipes
        )

    def price(self, batch: LayoutBatch, *, every_rank: bool = False) -> "Prices":
        """Time and memory of N layouts. every_rank: look at all pipeline ranks instead of the deciding ones."""
        return _price(self, batch, every_rank)

    def floors(self, batch: LayoutBatch) -> tuple[FloatColumn, FloatColumn]:
        """Lower bounds (step seconds, device bytes), (N,) each, that hold for every schedule, ZeRO stage and split of the layouts.

        Async TP, every CP method and narrow gathers are tried, since they only save.
        Time: a step takes at least as long as its busiest rank computes (exposed TP, CP, EP included), and the busiest at
        least the mean; bubble, data-parallel waits, optimizer and fixed costs are not negative.
        Memory: the worst rank holds at least the mean: fully sharded states, gradients that accumulate, and activations of
        (pp + 1) / 2 microbatches, the mean of 1F1B, which no schedule undercuts; less one layer for uneven splits.
        Buffers, and without a single rank logits and recomputation, are left out.
        """
        m = num_microbatches(batch, self.training)
        unit, inverse, least = self._least_units(batch)
        device = [
            _device_floor(self, batch.take(part), self.unit_counts, m[part], unit, inverse[part])
            for part in (slice(start, start + CHUNK) for start in range(0, len(batch), CHUNK))
        ]
        return self._mean_seconds(batch, unit, inverse, least), np.concatenate([np.zeros(0), *device])

    def time_floors(self, batch: LayoutBatch) -> FloatColumn:
        """The first of `floors` alone, (N,)."""
        return self._mean_seconds(batch, *self._least_units(batch))

    def layout_floors(self, batch: LayoutBatch) -> FloatColumn:
        """Lower bounds of the step seconds of these very layouts, (N,): with their own switches, and pairs only where they overlap any."""
        rows, inverse = keyed.distinct(batch, layers.key(self.cluster.rank_order, self.model, self.recipes))
        unit = _units(self, rows)
        count = num_microbatches(batch, self.training)
        paired = by_schedule(
            batch, lambda s, at: s.pairs_on_critical_path(batch.pp[at], batch.virtual_stages[at], count[at].astype(np.int64)), 0.0
        )
        return self._mean_seconds(batch, unit, inverse, self.unit_counts @ unit.total, overlaps=paired > 0)

    def _mean_seconds(
        self, batch: LayoutBatch, unit: "_Units", inverse: IntColumn, least: FloatColumn, overlaps: BoolColumn | None = None
    ) -> FloatColumn:
        """What a mean rank computes in a step, (N,), less all that overlapped pairs of a pipeline can hide.

        overlaps (N,): which layouts' schedules overlap pairs; any that has a pipeline unless given.
        """
        overlaps = batch.pp > 1 if overlaps is None else overlaps
        hidden = np.where(overlaps, (self.unit_counts @ pairs.most_saved(unit.costs, self.profile))[inverse], 0.0)
        return np.asarray(num_microbatches(batch, self.training) * (least[inverse] - hidden) / batch.pp)

    @property
    def unit_counts(self) -> FloatColumn:
        """How many of each unit the model has, (K + 2,): its distinct layers, the embedding, the head."""
        return np.array([count for _, count in self.model.distinct_layers()] + [1.0, 1.0])

    def _least_units(self, batch: LayoutBatch) -> "tuple[_Units, IntColumn, FloatColumn]":
        """(units at U distinct rows with the least bytes, row of each layout (N,), least seconds of all units together (U,))."""
        narrow = batch.float8_all_gather | (column("wire_bytes", batch.precision, self.recipes) < TWO_BYTES)
        batch = replace(batch, async_tp=batch.async_tp | ((batch.tp > 1) & self.rules.fsdp_style), float8_all_gather=narrow)
        rows, inverse = keyed.distinct(batch, layers.key(self.cluster.rank_order, self.model, self.recipes))
        first, *others = sorted(self.rules.cp_methods)
        unit = _units(self, replace(rows, cp_method=np.full(len(rows), CP_METHODS.index(first))))
        least = self.unit_counts @ unit.total
        split = np.flatnonzero(rows.cp > 1)
        kept = {name: getattr(unit.costs, name).copy() for name in ("saved_bytes", "transient_bytes", "logits_bytes")}
        for method in others if len(split) else ():
            tried = _units(self, replace(rows.take(split), cp_method=np.full(len(split), CP_METHODS.index(method))))
            least[split] = np.minimum(least[split], self.unit_counts @ tried.total)
            for name, column_bytes in kept.items():
                column_bytes[..., split] = np.minimum(column_bytes[..., split], getattr(tried.costs, name))
        return _Units(replace(unit.costs, **kept), unit.forward, unit.input_grad), inverse, least


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Columns of N prices.

    parts: seconds (N,) by PARTS, of the busiest rank; they sum to step_seconds.  rank_* (R, N): per pipeline rank.
    least_device_bytes: what device_bytes shrinks to under pressure.
    busiest (N,): row of R that is busiest.  flops (N,): matmul and attention work of one rank's mean share, recompute apart.
    """

    step_seconds: FloatColumn
    parts: dict[str, FloatColumn]
    peak_allocated_bytes: FloatColumn
    peak_reserved_bytes: FloatColumn
    device_bytes: FloatColumn
    least_device_bytes: FloatColumn
    memory: RankMemory
    rank_reserved_bytes: FloatColumn
    rank: IntColumn
    stage_seconds: "StageSeconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One microbatch on each unit (K + 2, N): what the simulator needs to time any stage.

    sends: of the same N layouts.  costs, at: costs of the units at distinct rows, and each layout's row, for what few layouts need.
    """

    forward: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn
    saved_bytes: FloatColumn
    costs: layers.UnitCosts
    at: IntColumn
    forward_flops: FloatColumn
    recompute_flops: FloatColumn
    sends: Sends
    outside: FloatColumn
    busy: FloatColumn


@dataclass(frozen=True, slots=True)
class _Units:
    """`layers.UnitCosts` at U rows, with sums that every price needs, (K + 2, U)."""

    costs: layers.UnitCosts
    forward: FloatColumn
    input_grad: FloatColumn

    @property
    def total(self) -> FloatColumn:
        return self.forward + self.input_grad + self.costs.weight_grad_seconds


def num_microbatches(batch: LayoutBatch, training: TrainingSpec) -> FloatColumn:
    """Microbatches (or accumulation steps) of one step, (N,), at least one."""
    return np.maximum(1.0, training.global_batch_size / (batch.micro_batch_size * batch.dp_replicate * batch.dp_shard).astype(np.float64))


def _keep_freed_pages() -> None:
    """Lets columns of later batches reuse the pages of earlier ones.

    glibc hands blocks above a threshold back to the system when they are freed, and each page of the next one faults again: a third of a
    batch's seconds. Freeing one large block, which nobody touched, raises the threshold to its size. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    np.empty(LARGE_BLOCK_BYTES, dtype=np.uint8)


def _unit_columns(pricer: Pricer, batch: LayoutBatch) -> tuple[_Units, IntColumn]:
    rows, inverse = keyed.distinct(batch, layers.key(pricer.cluster.rank_order, pricer.model, pricer.recipes))
    return _units(pricer, rows), inverse


def _units(pricer: Pricer, rows: LayoutBatch) -> _Units:
    """Costs of the units at U rows, some thousand rows at a time, so that the columns of one operation stay in the cache."""
    slices = [rows.take(slice(start, start + CACHED_ROWS)) for start in range(0, len(rows), CACHED_ROWS)]
    parts = [layers.unit_costs(site_of(pricer, part), pricer.model) for part in slices]
    costs = parts[0] if len(parts) == 1 else layers.UnitCosts.concatenate(parts)
    forward = costs.forward_seconds + costs.exposed_forward.sum(axis=0)
    input_grad = costs.input_grad_seconds + costs.recompute_seconds + costs.exposed_backward.sum(axis=0)
    return _Units(costs, forward, input_grad)


def site_of(pricer: Pricer, rows: LayoutBatch) -> Site:
    """What the costs of a layer's operations depend on at these rows."""
    fused, quantised = layers.fused_kernels(rows, pricer.rules), quantised_model(pricer.model, pricer.recipes)
    quantisation = Quantisation.build(rows, quantised, fused, pricer.device)
    return Site(
        batch=rows,
        sizes=local_sizes(rows, pricer.model, pricer.training, pricer.rules),
        device=pricer.device,
        fabric=pricer.fabric,
        rules=pricer.rules,
        training=pricer.training,
        rank_order=pricer.cluster.rank_order,
        fused=fused,
        quantisation=quantisation,
        experts=Quantisation.of_experts(rows, quantised, fused, pricer.device) if pricer.model.is_moe else quantisation,
    )


def by_schedule(batch: LayoutBatch, value: Callable[[Schedule, IntColumn], FloatColumn], alone: float) -> FloatColumn:
    """A column filled schedule by schedule: value(schedule, rows) where pp > 1, `alone` where there is no pipeline."""
    out = np.full(len(batch), alone)
    for code in np.unique(batch.pp_schedule):
        rows = np.flatnonzero((batch.pp_schedule == code) & (batch.pp > 1))
        if len(rows):
            out[rows] = value(SCHEDULES[SCHEDULE_NAMES[int(code)]], rows)
    return out


def _price(pricer: Pricer, batch: LayoutBatch, every_rank: bool) -> Prices:
    unit, at_unit = _unit_columns(pricer, batch)
    shard_rows, at_shard = keyed.distinct(batch, sharding.KEY)
    shards = sharding.unit_shards(shard_rows, pricer.update, pricer.fabric, pricer.profile, pricer.cluster.rank_order)
    pipe_rows, at_pipe = keyed.distinct(batch, stages.KEY)
    held = stages.rank_layers(pipe_rows, pricer.model, pricer.rules, every_rank=every_rank)
    units = held.units[:, :, at_pipe]
    rank = held.rank[:, at_pipe]
    m = num_microbatches(batch, pricer.training)
    time = _Time(pricer, batch, units, rank, held.mean_units[:, at_pipe], m, unit, at_unit, shards, at_shard)
    step, parts, stage_seconds = time.compose()
    shapes = _shapes(pricer, batch, units, rank, m, unit, at_unit, shards, at_shard)
    memory = rank_memory(shapes, batch, m, pricer.training, pricer.rules, pricer.profile.workspace_bytes)
    groups = sum((getattr(batch, axis) > 1).astype(np.float64) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"))
    outside = pricer.cluster.gpu.context_bytes + pricer.profile.communicator_bytes * groups
    room = pricer.cluster.usable_memory_bytes - outside
    shares = (_fragmentation(pricer), pricer.profile.fragmentation_floor)
    reserved, least = reserved_bytes(memory.allocated, memory.cached, memory.moving, room, shares)
    peak_reserved = reserved.max(axis=0)
    device = peak_reserved + outside
    return Prices(
        step_seconds=step,
        parts=parts,
        peak_allocated_bytes=memory.allocated.max(axis=0),
        peak_reserved_bytes=peak_reserved,
        device_bytes=device,
        least_device_bytes=least.max(axis=0) + outside,
        memory=memory,
        rank_reserved_bytes=reserved,
        rank=rank,
        stage_seconds=stage_seconds,
    )


def _device_floor(
    pricer: Pricer, batch: LayoutBatch, counts: FloatColumn, m: FloatColumn, unit: "_Units", at_unit: IntColumn
) -> FloatColumn:
    fullest = np.full(len(batch), 3 if pricer.rules.fsdp_style else 1)
    batch = replace(batch, zero_stage=np.where(batch.zero_stage == 0, 0, fullest))
    shard_rows, at_shard = keyed.distinct(batch, sharding.KEY)
    dense, expert = sharding.unit_parameters(pricer.model, shard_rows)
    local = (counts @ (dense + expert))[at_shard] / batch.pp
    shard = (counts @ sharding.kept_shards(shard_rows, dense, expert, pricer.cluster.rank_order))[at_shard] / batch.pp
    quantised = (counts @ sharding.quantised_elements(shard_rows, dense, expert, pricer.update))[at_shard] / batch.pp
    gathered = (counts @ sharding.gathered_elements(shard_rows, dense, expert, pricer.update))[at_shard] / batch.pp
    saved = (counts @ unit.costs.saved_bytes)[at_unit] / batch.pp
    alone = batch.pp == 1
    uneven = 1.0 - np.where(alone, 0.0, np.minimum(1.0, batch.pp / counts[:-2].sum()))
    zero = np.zeros(len(batch))
    shapes = RankShapes(
        local=local,
        shard=shard,
        largest_local=zero, head_local=zero, head_shard=zero, late_shard=zero, early_shard=zero, embedding_local=zero,
        embedding_whole=zero, received_bytes=zero,
        gathered=gathered, largest_gathered=zero, head_gathered=zero,
        copies_bytes=quantised * np.minimum(pricer.update.copy_bytes(batch), 0.0), distinct=zero,
        saved_bytes=saved * uneven,
        head_saved_bytes=unit.costs.saved_bytes[-1, at_unit],
        head_bytes=zero,
        last_layer_bytes=np.where(alone, unit.costs.transient_bytes[:-2].max(axis=0)[at_unit], 0.0),
        next_layer_bytes=zero, second_layer_bytes=zero,
        in_flight=np.minimum(m, (batch.pp + 1) / 2.0),
        held_bytes=zero,
        boundary_bytes=zero,
        stream_bytes=zero,
        logits_bytes=np.where(alone, unit.costs.logits_bytes[at_unit], 0.0), leftover_bytes=zero, working_bytes=zero,
    )
    memory = rank_memory(shapes, batch, m, pricer.training, pricer.rules, pricer.profile.workspace_bytes)
    return memory.allocated + pricer.cluster.gpu.context_bytes


def _fragmentation(pricer: Pricer) -> float:
    expandable = pricer.training.expandable_segments
    expandable = pricer.rules.expandable_segments if expandable is None else expandable
    return pricer.profile.fragmentation_expandable if expandable else pricer.profile.fragmentation


def _on_ranks(units: FloatColumn, field: FloatColumn) -> FloatColumn:
    """Sum over the units that each rank holds: (R, K + 2, N), (K + 2, N) -> (R, N)."""
    return np.asarray(np.einsum("rkn,kn->rn", units, field))


def _largest(holds: BoolColumn | None, field: FloatColumn) -> FloatColumn:
    """Largest over the layers a rank holds, 0 for those that it does not: (R, K, N) or None for all, (K, N) -> (R, N) or (N,).

    Unit by unit, because NumPy reduces a short middle axis slowly.
    """
    columns = [field[unit] if holds is None else np.where(holds[:, unit], field[unit], 0.0) for unit in range(len(field))]
    return reduce(np.maximum, columns)


def _in_flight(batch: LayoutBatch, rank: IntColumn, m: FloatColumn) -> FloatColumn:
    """Microbatches that a pipeline rank holds at its peak, (N,); one without a pipeline."""
    count = m.astype(np.int64)
    return by_schedule(batch, lambda s, rows: s.in_flight(rank[rows], batch.pp[rows], batch.virtual_stages[rows], count[rows]), 1.0)


def _shapes(
    pricer: Pricer,
    batch: LayoutBatch,
    units: FloatColumn,
    rank: IntColumn,
    m: FloatColumn,
    unit: _Units,
    at_unit: IntColumn,
    shards: sharding.UnitShards,
    at_shard: IntColumn,
) -> RankShapes:
    local, shard, gathered = (column[:, at_shard] for column in (shards.local, shards.shard, shards.gathered))
    saved, transient = unit.costs.saved_bytes[:, at_unit], unit.costs.transient_bytes[:, at_unit]
    holds = None if (units[:, :-2] > 0).all() else units[:, :-2] > 0
    head, held_local, narrow = units[:, -1], _on_ranks(units, local), bool((shards.gathered != shards.local).any())
    copies = np.zeros_like(held_local) if pricer.rules.fsdp_style else _on_ranks(units, shards.copies_bytes[:, at_shard])
    in_flight = np.array([_in_flight(batch, rank[r], m) for r in range(len(units))])
    boundary = np.where((batch.pp > 1) & (not pricer.rules.fsdp_style), unit.costs.boundary_bytes[at_unit] * batch.virtual_stages, 0.0)
    stream = np.broadcast_to(unit.costs.boundary_bytes[at_unit], in_flight.shape)
    widths = Widths.of(batch, m, pricer.rules)
    own = (unit.costs.done_bytes, unit.costs.next_bytes, unit.costs.second_bytes)
    moments = layer_moments(
        (transient[:-2], *(column[:-2, at_unit] for column in own)),
        (shards.together[:-2, at_shard], shard[:-2], gathered[:-2]),
        widths,
    )
    last, following, second = (_largest(holds, moment) for moment in moments)
    largest_shard = _largest(holds, shard[:-2])
    largest_gathered = _largest(holds, gathered[:-2])
    several = reduce(np.add, [units[:, kind] for kind in range(units.shape[1] - 2)]) > 2
    following = following - np.where(several, 0.0, widths.gathered * largest_gathered)
    head_gathered, tied = head * gathered[-1], head * units[:, -2] * pricer.model.tie_word_embeddings
    kept, all_saved = _on_ranks(units, shard), _on_ranks(units, saved)
    # The first layer gathers the embedding ahead, not a layer; one shard more waits and one layer's activations less.
    table = widths.gathered * (units[:, -2] * gathered[-2] - largest_gathered) - widths.stays * largest_gathered
    first = table + widths.master * largest_shard - _largest(holds, saved[:-2])
    second = np.where(several, second + np.maximum(first, 0.0), 0.0)
    return RankShapes(
        local=held_local,
        shard=kept,
        late_shard=np.minimum(head * shard[-1] + largest_shard, kept),
        early_shard=np.maximum(kept - units[:, -2] * shard[-2] - 2.0 * largest_shard, 0.0),
        largest_local=_largest(holds, local[:-2]) if narrow else largest_gathered,
        head_local=head * local[-1] if narrow else head_gathered,
        head_shard=head * shard[-1],
        embedding_local=units[:, -2] * local[-2],
        embedding_whole=units[:, -2] * local[-2] * (batch.tp if pricer.rules.fsdp_style else 1.0),
        received_bytes=_received_bytes(pricer, batch, units, m) * unit.costs.boundary_bytes[at_unit],
        gathered=_on_ranks(units, gathered) if narrow else held_local,
        largest_gathered=largest_gathered,
        head_gathered=head_gathered + tied * gathered[-2],
        copies_bytes=copies,
        distinct=np.zeros_like(held_local) if pricer.rules.fsdp_style else _largest(units > 0, shards.distinct[:, at_shard]),
        saved_bytes=all_saved,
        head_saved_bytes=head * saved[-1],
        head_bytes=head * transient[-1],
        last_layer_bytes=last, next_layer_bytes=following, second_layer_bytes=second,
        in_flight=in_flight,
        held_bytes=_held_bytes(batch, units, rank, m, unit.costs.held_bytes, at_unit, in_flight, all_saved, boundary),
        boundary_bytes=np.broadcast_to(boundary, in_flight.shape),
        stream_bytes=stream,
        logits_bytes=head * (unit.costs.logits_bytes[at_unit] + np.where(batch.pp > 1, unit.costs.leftover_bytes[at_unit], 0.0)),
        leftover_bytes=head * unit.costs.leftover_bytes[at_unit],
        working_bytes=_largest(holds, unit.costs.working_bytes[:-2, at_unit]),
    )


def _received_bytes(pricer: Pricer, batch: LayoutBatch, units: FloatColumn, m: FloatColumn) -> FloatColumn:
    """Activations that a rank has buffers for, (R, N): torch's pipelines allocate one for what every microbatch brings to each stage.

    Forward into all stages but the first, backward into all but the last. Elsewhere a microbatch's input is counted while it is held.
    Source: torch/distributed/pipelining/stage.py (_create_act_recv_info, _create_grad_recv_info).
    """
    ends = 2.0 * batch.virtual_stages - units[:, -2] - units[:, -1]
    return np.where((batch.pp > 1) & pricer.rules.fsdp_style, m * ends, 0.0)


def _held_bytes(
    batch: LayoutBatch,
    units: FloatColumn,
    rank: IntColumn,
    m: FloatColumn,
    unit_bytes: FloatColumn,
    at_unit: IntColumn,
    in_flight: FloatColumn,
    saved: FloatColumn,
    boundary: FloatColumn,
) -> FloatColumn:
    """Bytes, (R, N), that the fullest moment of a rank holds beyond its microbatches in flight: only where W runs apart from I."""
    extra = np.zeros_like(in_flight)
    for schedule, rows in _split_schedules(batch):
        pp, v, count = batch.pp[rows], batch.virtual_stages[rows], m[rows].astype(np.int64)
        whole_bytes = saved[:, rows] + boundary[rows]
        half_bytes = _on_ranks(_late(units[:, :, rows], v), unit_bytes[:, at_unit[rows]]) + boundary[rows]
        for r in range(len(units)):
            moments = schedule.moments(rank[r, rows], pp, v, count)
            fullest = np.max([whole * whole_bytes[r] + half * half_bytes[r] for whole, half in moments], axis=0)
            extra[r, rows] = fullest - in_flight[r, rows] * whole_bytes[r]
    return extra


def _late(units: FloatColumn, virtual_stages: IntColumn) -> FloatColumn:
    """Units of a rank as if each of its stages held the head: backward starts there, so that it is the stage whose W are late."""
    units = units.copy()
    units[:, -1] *= virtual_stages
    return units


def _split_schedules(batch: LayoutBatch) -> list[tuple[Schedule, IntColumn]]:
    """Schedules of the batch whose weight gradients run apart, each with its rows."""
    found = [(SCHEDULES[SCHEDULE_NAMES[int(code)]], code) for code in np.unique(batch.pp_schedule)]
    split = [(schedule, code) for schedule, code in found if schedule.splits_backward]
    rows = [(schedule, np.flatnonzero((batch.pp_schedule == code) & (batch.pp > 1))) for schedule, code in split]
    return [(schedule, at) for schedule, at in rows if len(at)]


@dataclass(frozen=True, slots=True)
class _Time:
    """Composition of one step's seconds from units, shards and schedule."""

    pricer: Pricer
    batch: LayoutBatch
    units: FloatColumn
    rank: IntColumn
    mean_units: FloatColumn
    m: FloatColumn
    unit: _Units
    at_unit: IntColumn
    shards: sharding.UnitShards
    at_shard: IntColumn

    def compose(self) -> tuple[FloatColumn, dict[str, FloatColumn], StageSeconds]:
        """(step seconds, parts, seconds of stages for the simulator)."""
        costs, at, batch, m = self.unit.costs, self.at_unit, self.batch, self.m
        forward, input_grad = self.unit.forward[:, at], self.unit.input_grad[:, at]
        alone = costs.weight_grad_seconds[:, at] + self.shards.sum_seconds[:, self.at_shard] * (m - 1.0) / m
        weight_grad = self._with_redone(alone)
        exposed = self._data_parallel(forward, input_grad + alone)
        slowed = self.pricer.profile.overlap_slowdown * exposed.hidden
        optimizer = self._optimizer_seconds()
        early = np.where(self.batch.optimizer_in_backward, self.pricer.profile.early_step_share, 0.0)
        optimizer = optimizer + early * m * _on_ranks(self.units, input_grad + alone)
        outside = exposed.fsdp + exposed.dp + slowed + optimizer
        per_microbatch = _on_ranks(self.units, forward + input_grad + weight_grad)
        busiest = np.argmax(m * per_microbatch + outside, axis=0)
        pick = (busiest, np.arange(len(batch)))
        sends = self._sends()
        here = self.units[busiest, :, np.arange(len(batch))].T
        own = self._overlapped_pairs(self.rank[pick])
        relief = self._relief(own > 0, here)
        bubble, send_waits = self._bubble(forward, input_grad, weight_grad, sends.mean_seconds(), own, relief)
        parts = {
            "recompute": m * (here * (costs.recompute_seconds[:, at] + weight_grad - alone)).sum(axis=0),
            "fsdp": exposed.fsdp[pick] + slowed[pick],
            "dp": exposed.dp[pick],
            "bubble": bubble,
            "pp": send_waits,
            "optimizer": optimizer[pick],
            "other": np.full(len(batch), self.pricer.profile.fixed_step_seconds),
        }
        for index, axis in enumerate(AXES):
            parts[axis] = m * (here * (costs.exposed_forward + costs.exposed_backward)[index][:, at]).sum(axis=0)
        parts["tp"], parts["ep"] = parts["tp"] - own * relief.tp, parts["ep"] - own * relief.ep
        busy = m * per_microbatch[pick] - own * relief.saved
        parts["compute"] = busy - parts["recompute"] - parts["tp"] - parts["cp"] - parts["ep"]
        step = busy + outside[pick] + bubble + send_waits + parts["other"]
        stage_seconds = StageSeconds(
            forward=forward,
            input_grad=input_grad,
            weight_grad=alone,
            saved_bytes=costs.saved_bytes[:, at],
            costs=costs,
            at=at,
            sends=sends,
            forward_flops=costs.forward_flops[:, at],
            recompute_flops=costs.recompute_flops[:, at],
            outside=outside[pick] + parts["other"],
            busy=busy,
        )
        return step, parts, stage_seconds

    def _data_parallel(self, forward: FloatColumn, backward: FloatColumn) -> Exposed:
        s, at = self.shards, self.at_shard
        seconds = UnitColumns(
            forward=forward,
            backward=backward,
            gather=s.gather_seconds[:, at],
            scatter=s.scatter_seconds[:, at],
            replicate=s.replicate_seconds[:, at],
            host=self._host_copies(),
        )
        return exposed_data_parallel(
            self.units, seconds, self.batch, self.m, self.pricer.training, self.pricer.rules, self.pricer.profile.dp_hidden
        )

    def _host_copies(self) -> HostCopies | None:
        s, at = self.shards, self.at_shard
        if not (self.pricer.rules.fsdp_style and self.batch.cpu_offload.any()):
            return None
        return HostCopies(upload=s.upload_seconds[:, at], download=s.download_seconds[:, at], accumulate=s.accumulate_seconds[:, at])

    def _sends(self) -> Sends:
        return Sends(
            batch=self.batch,
            payload_bytes=self.unit.costs.boundary_bytes[self.at_unit],
            fused=layers.fused_kernels(self.batch, self.pricer.rules),
            training=self.pricer.training,
            cluster=self.pricer.cluster,
            device=self.pricer.device,
            fabric=self.pricer.fabric,
        )

    def _with_redone(self, weight_grad: FloatColumn) -> FloatColumn:
        """Weight gradients with what they do again where they run apart from the input's, (K + 2, N)."""
        batch, result = self.batch, weight_grad
        for schedule, rows in _split_schedules(batch):
            result = weight_grad.copy() if result is weight_grad else result
            share = schedule.split_share(batch.pp[rows], batch.virtual_stages[rows], self.m[rows].astype(np.int64))
            result[:, rows] += share * self.unit.costs.redone_seconds[:, self.at_unit[rows]]
        return result

    def _relief(self, overlaps: BoolColumn, here: FloatColumn) -> pairs.Relief:
        """What a pair saves, (N,), 0 where there are none."""
        rows = np.flatnonzero(overlaps)
        columns = pairs.pair_columns(self.unit.costs, self.at_unit[rows], self.pricer.profile)
        return pairs.relief(columns, here[:, rows], self.batch.virtual_stages[rows]).spread(rows, len(overlaps))

    def _overlapped_pairs(self, rank: IntColumn) -> FloatColumn:
        batch, m = self.batch, self.m.astype(np.int64)
        return by_schedule(batch, lambda s, rows: s.overlapped_pairs(rank[rows], batch.pp[rows], batch.virtual_stages[rows], m[rows]), 0.0)

    def _bubble(
        self,
        forward: FloatColumn,
        input_grad: FloatColumn,
        weight_grad: FloatColumn,
        send: FloatColumn,
        own_pairs: FloatColumn,
        relief: pairs.Relief,
    ) -> tuple[FloatColumn, FloatColumn]:
        """(idle seconds, seconds waiting for sends), (N,). Pairs of other ranks on the longest chain shorten this rank's idle time."""
        f, i, w = ((self.mean_units * field).sum(axis=0) for field in (forward, input_grad, weight_grad))
        batch, m = self.batch, self.m.astype(np.int64)

        def bubble(schedule: Schedule, rows: IntColumn) -> FloatColumn:
            pp, v = batch.pp[rows], batch.virtual_stages[rows]
            foreign = schedule.pairs_on_critical_path(pp, v, m[rows]) - own_pairs[rows]
            idle = schedule.bubble_seconds(pp, v, m[rows], f[rows], i[rows], w[rows])
            return np.maximum(idle - foreign * relief.saved[rows], 0.0)

        def hops(schedule: Schedule, rows: IntColumn) -> FloatColumn:
            exposed = transport_of(self.pricer.training, schedule.name).exposed
            return schedule.sends_on_critical_path(batch.pp[rows], batch.virtual_stages[rows], m[rows], exposed)

        return by_schedule(batch, bubble, 0.0), by_schedule(batch, hops, 0.0) * send

    def _optimizer_seconds(self) -> FloatColumn:
        """Seconds a step of clipping, update, exchange and small reductions, (R, N)."""
        return _on_ranks(self.units, self.shards.update_seconds[:, self.at_shard]) + self.shards.step_seconds[self.at_shard]
