"""A job whose layout is open, with all that a price reads of it looked up once."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.columns.memo import Memo, TableT
from planner.columns.table import Table
from planner.cost.layer.context import CostContext
from planner.cost.layer.quantisation import Quantisation
from planner.cost.layer.trainer_kernels import fused_kernels, one_kernel_experts
from planner.cost.machine.device import Device
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.profile import Profile
from planner.cost.network.collectives import collective_seconds
from planner.cost.network.topology import Fabric
from planner.precision import Recipe
from planner.rules import cuda_graphs
from planner.rules.base import Context
from planner.rules.experts import overlaps_exchange
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.work.axes import Group, group, local_sizes
from planner.work.quantised import quantised_model


@dataclass(slots=True)
class KnownJob:
    """Memory of priced parts of a job. One thread's: a price may not use it beside another.

    memos: its rows by their kind of table.
    open_columns, unit_key: see `cost_inputs`; None until somebody asked.
    most_device_bytes: see `search.fit`; likewise.
    """

    memos: dict[type[Table], Memo[Any]] = field(default_factory=dict)
    open_columns: tuple[str, ...] | None = None
    unit_key: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    most_device_bytes: float | None = None

    def memo(self, kind: type[TableT]) -> Memo[TableT]:
        return self.memos.setdefault(kind, Memo(kind))

    def forget(self) -> None:
        self.memos.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """Everything but the layouts: specs, profile, device, fabric, recipes.

    recipes: how each precision computes under this trainer's release.
    own_factor: factor on the step's seconds that one's own runs of this stack showed, by precision
        code; 1 without any.
    known: rows already computed; a changed copy (`dataclasses.replace`) starts without.
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
    own_factor: FloatColumn
    known: KnownJob = field(default_factory=KnownJob, init=False, compare=False, repr=False)

    @property
    def unit_counts(self) -> FloatColumn:
        """How many of each unit the model has, (K + 2,): distinct layers, embedding, head."""
        return np.array([count for _, count in self.model.distinct_layers()] + [1.0, 1.0])

    @property
    def rules_context(self) -> Context:
        return Context(model=self.model, cluster=self.cluster, training=self.training)

    def context(self, rows: LayoutBatch) -> CostContext:
        fused, quantised = (
            fused_kernels(rows, self.rules),
            quantised_model(self.model, self.recipes),
        )
        quantisation = Quantisation.build(rows, quantised, fused, self.device)
        graphs = cuda_graphs.captured(rows, self.rules_context)
        released = self.rules_context.released
        return CostContext(
            batch=rows,
            sizes=local_sizes(rows, self.model, self.training, self.rules),
            device=self.device,
            fabric=self.fabric,
            rules=self.rules,
            training=self.training,
            rank_order=self.cluster.rank_order,
            fused=fused,
            quantisation=quantisation,
            experts=Quantisation.of_experts(rows, quantised, fused, self.device)
            if self.model.is_moe
            else quantisation,
            graphs=graphs,
            overlaps_exchange=overlaps_exchange(rows, self.rules_context),
            one_kernel=one_kernel_experts(rows, graphs, self.model, released, self.cluster.gpu),
        )

    def group(self, axis: str, rows: LayoutBatch) -> Group:
        """(degree, stride) of the groups of an axis; see `axes.group`."""
        return group(axis, rows, self.cluster.rank_order)

    def collective_seconds(self, operation: str, payload: FloatColumn, of: Group) -> FloatColumn:
        """Seconds of one collective over these groups, (..., U) as the payload; 0 of nothing."""
        seconds = collective_seconds(
            operation,
            payload,
            *of,
            self.fabric,
            base_seconds=self.profile.collective_seconds,
            nvls_gain=self.profile.nvls_gain,
        )
        return np.where(payload > 0, seconds, 0.0)
