"""The time and memory of every layout of a batch: here the parts of the cost model come together.

`estimate` prices a batch of one with every rank and then simulates its schedule. A search prices
hundreds of thousands of layouts with the deciding ranks only. The parts, in the order in which they
are made: `prepared_job`, `cost_inputs`, then `step_seconds` and `rank_shapes`. A search asks
`lower_bounds` first.
Letters: N layouts, R pipeline ranks priced.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost import lower_bounds as bounds
from planner.cost.chunks import keep_freed_pages, slices
from planner.cost.cost_inputs import CostInputs, unit_fields
from planner.cost.machine.device import Device
from planner.cost.machine.knobs import Calibration, kernels_at, profile_at
from planner.cost.machine.profile import KernelProfile, Profile
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.machine.stacks import stack_name, unit_names
from planner.cost.memory.peak import PeakMemory, expandable_segments, rank_memory
from planner.cost.memory.rank_bytes import rank_shapes
from planner.cost.memory.reserved import dispatch_buffer_bytes, reserved_bytes
from planner.cost.network.topology import Fabric
from planner.cost.prepared_job import PreparedJob
from planner.cost.stage_seconds import StageSeconds
from planner.cost.step_seconds import step_seconds
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import NO_OVERLAP, TrainingSpec
from planner.trainers.registry import TRAINERS, training_release

# the month of torch 2.1, which has expandable segments
TORCH_2_1 = "2023-10"
WHOLE = 0.05  # of a layer: what rounding and fragments may hide; judgement


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Columns of N steps, their time alone.

    parts: seconds (N,) by PARTS, of the busiest rank; they sum to step_seconds.
    own_factor (N,): that of `PreparedJob`; `stage_seconds` are before it.
    """

    step_seconds: FloatColumn
    parts: dict[str, FloatColumn]
    stage_seconds: StageSeconds
    own_factor: FloatColumn

    @cached_property
    def rank(self) -> IntColumn:
        """Pipeline ranks priced, (R, N)."""
        return self.stage_seconds.inputs.rank

    @cached_property
    def rank_units(self) -> FloatColumn:
        """Units that each of them holds, (R, K + 2, N)."""
        return self.stage_seconds.inputs.units


@dataclass(frozen=True, kw_only=True)
class Prices(StepTimes):
    """Columns of N prices.

    least_device_bytes: what device_bytes shrinks to under memory pressure.
    rank_reserved_bytes (R, N): what each of the ranks priced reserves.
    """

    peak_allocated_bytes: FloatColumn
    peak_reserved_bytes: FloatColumn
    device_bytes: FloatColumn
    least_device_bytes: FloatColumn
    memory: PeakMemory
    rank_reserved_bytes: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricer(PreparedJob):
    """Prices the layouts of one job.

    variants: pricers like this one, with other recipes or another profile, by what they are for.
    """

    variants: dict[Hashable, "Pricer"] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

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
        """A pricer for one job under a calibration, the shipped one unless given.

        profile, kernels: replace those of the calibration.
        """
        keep_freed_pages()
        if training_release(training).named.launches_block:  # no kernel runs beside another
            training = training.model_copy(update={"overlap": NO_OVERLAP})
        calibration = calibration or shipped_calibration()
        rules, gpu = TRAINERS[training.trainer], cluster.gpu
        trainer = rules.code_name
        profile = profile or calibration.profile(trainer, gpu, experts=model.is_moe)
        kernels = kernels or kernels_at(gpu, calibration.shift(trainer, gpu.family))
        attention = rules.fused_attention(training, gpu, model)
        stack = stack_name(trainer, gpu.name)
        units = unit_names(stack, model)
        return cls(
            model=model,
            cluster=cluster,
            training=training,
            rules=rules.at(training_release(training)),
            calibration=calibration,
            profile=profile,
            device=Device.build(cluster, kernels, profile, attention[0], tf32=rules.tf32),
            fabric=Fabric.build(cluster, profile.intra_node, profile.inter_node),
            recipes=rules.recipes(training.trainer_version),
            own_factor=np.exp(calibration.offsets(trainer, gpu.family, stack, units).mean),
        )

    def moved(self, shifts: FloatColumn) -> "Pricer":
        """The pricer with the knobs of its calibration at these shifts, (K,)."""
        return Pricer.build(
            self.model,
            self.cluster,
            self.training,
            self.calibration,
            profile=profile_at(self.rules.code_name, shifts),
            kernels=kernels_at(self.cluster.gpu, shifts),
        )

    def variant(self, key: Hashable, build: Callable[[], "Pricer"]) -> "Pricer":
        """The pricer known by this key; built once, so that it remembers what it priced."""
        if key not in self.variants:
            self.variants[key] = build()
        return self.variants[key]

    def price(self, batch: LayoutBatch, *, every_rank: bool = False) -> Prices:
        """Time and memory of N layouts.

        every_rank: price all pipeline ranks instead of the deciding ones.
        """
        inputs = CostInputs.of(self, batch, every_rank=every_rank)
        times = self._times(inputs)
        memory, outside, reserved, least = self._memory(inputs)
        peak_reserved = reserved.max(axis=0)
        return Prices(
            **vars(times),
            peak_allocated_bytes=memory.allocated.max(axis=0),
            peak_reserved_bytes=peak_reserved,
            device_bytes=peak_reserved + outside,
            least_device_bytes=least.max(axis=0) + outside,
            memory=memory,
            rank_reserved_bytes=reserved,
        )

    def times(self, batch: LayoutBatch, *, every_rank: bool = False) -> StepTimes:
        """Time of N layouts, that of `price`, without the work on their memory."""
        return self._times(CostInputs.of(self, batch, every_rank=every_rank))

    def _times(self, inputs: CostInputs) -> StepTimes:
        seconds, parts, stage_seconds = step_seconds(inputs)
        factor = self.own_factor[inputs.batch.precision]
        return StepTimes(
            step_seconds=factor * seconds,
            parts={name: factor * part for name, part in parts.items()},
            stage_seconds=stage_seconds,
            own_factor=factor,
        )

    def step_seconds(self, batch: LayoutBatch) -> FloatColumn:
        """The step of every layout, (N,), without the work on its memory."""
        return self.times(batch).step_seconds

    def least_device_bytes(self, batch: LayoutBatch) -> FloatColumn:
        """`Prices.least_device_bytes` of every layout, (N,), without the work on its time."""
        _, outside, _, least = self._memory(CostInputs.of(self, batch, every_rank=False))
        return np.asarray(least.max(axis=0) + outside)

    def step_seconds_on(self, machines: Sequence["Pricer"], batch: LayoutBatch) -> FloatColumn:
        """The step of every layout on each of V machines, (V, N).

        machines: pricers of this job, with other profiles and kernels.
        """
        found = np.empty((len(machines), len(batch)))
        for part in slices(len(batch)):
            inputs = CostInputs.of(self, batch.take(part), every_rank=False)
            for machine, seconds in zip(machines, found, strict=True):
                seconds[part] = machine._times(inputs.on(machine)).step_seconds
        return found

    def most_layers(self, batch: LayoutBatch, device_bytes: float) -> FloatColumn:
        """Layers of each kind that each pipeline rank has room for, (K, R, N), at the most.

        All of them count as layers of that kind. A rank's bytes are the largest of sums that grow
        evenly with its layers, so what one layer more adds is more than any layer less saves.
        device_bytes: how much of a device may be used.
        """
        inputs = CostInputs.of(self, batch, every_rank=True)
        _, outside, _, least = self._memory(inputs)
        kinds = len(self.unit_counts) - 2
        loads, found = inputs.loads, []
        layers = loads.of_ranks.units[:-2].sum(axis=0)[loads.at_rank]
        for kind in range(len(loads.of_ranks.units) - 2 - kinds, len(loads.of_ranks.units) - 2):
            units = loads.of_ranks.units.copy()
            units[kind] += 1.0
            one_more = replace(loads, of_ranks=replace(loads.of_ranks, units=units))
            _, _, _, more = self._memory(replace(inputs, loads=one_more))
            each = np.maximum(more - least, 1.0)
            found.append(layers + np.floor((device_bytes - outside - least) / each + WHOLE))
        there = np.arange(len(layers))[:, None] < batch.pp
        return np.where(there, np.maximum(np.array(found), 0.0), 0.0)

    def _memory(
        self, inputs: CostInputs
    ) -> tuple[PeakMemory, FloatColumn, FloatColumn, FloatColumn]:
        """(allocated, bytes outside of the allocator (N,), reserved, the least of it), (R, N)."""
        load, mean = inputs.loads.of_ranks, inputs.loads.of_means.batch
        memory = rank_memory(
            rank_shapes(inputs),
            load.batch,
            load.m,
            self.training,
            self.rules,
            self.profile.workspace_bytes,
            inputs.loads.at_rank,
        )
        groups = sum(
            (getattr(mean, axis) > 1).astype(np.float64)
            for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
        )
        outside = (
            self.cluster.gpu.context_bytes
            + self.profile.communicator_bytes * groups
            + dispatch_buffer_bytes(mean, self.model, self.cluster, self.training)
        )[inputs.loads.at_mean]
        room = self.cluster.usable_memory_bytes - outside
        shares = (self._fragmentation, self.profile.fragmentation_floor)
        reserved, least = reserved_bytes(
            memory.allocated + memory.pools, memory.cached, memory.moving, room, shares
        )
        return memory, outside, reserved, least

    # what `cost.lower_bounds` and `cost.cost_inputs` say of a job and layouts, as methods
    lower_bounds = bounds.lower_bounds
    device_and_compute_bounds = bounds.device_and_compute_bounds
    cell_device_bounds = bounds.cell_device_bounds
    compute_lower_bounds = bounds.compute_lower_bounds
    least_in_flight = bounds.least_in_flight
    time_lower_bounds = bounds.time_lower_bounds
    step_lower_bounds = bounds.step_lower_bounds
    layout_lower_bounds = bounds.layout_lower_bounds

    @property
    def unit_fields(self) -> tuple[str, ...]:
        return unit_fields(self)

    @property
    def _fragmentation(self) -> float:
        """The share of what comes and goes that is lost to fragments.

        It is larger in segments of a fixed size, unless the blocks that cannot be used again are
        counted one by one (`cost.memory.peak`). Before torch 2.1 both are taken; judgement, since
        programs of that time ran more unfused kernels.
        """
        release = training_release(self.training).named
        counted = self.rules.sharding.keeps_copies and release.not_before_month(TORCH_2_1)
        whole = counted or expandable_segments(self.training, self.rules)
        return self.profile.fragmentation_expandable if whole else self.profile.fragmentation
