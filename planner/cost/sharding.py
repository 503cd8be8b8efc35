"""Parameters on one rank, and what gathering, scattering and reducing them costs, per unit of the model.

Letters: U distinct layouts by KEY; (K + 2, U): the model's distinct layers, embedding, head (as in `cost.layers`).
"""

from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.collectives import collective_seconds
from planner.cost.profile import Profile
from planner.cost.topology import Fabric
from planner.specs.model import ModelSpec
from planner.work import axes
from planner.work.precision import column

KEY = (
    "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "zero_stage", "precision", "float8_all_gather", "param_dtype",
    "reduce_dtype", "master_dtype", "cpu_offload",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShards:
    """Parameters of one unit on one rank, and the seconds of its data-parallel collectives. All (K + 2, U).

    local: elements after TP, EP (what compute needs gathered).  shard: elements that a rank keeps under full sharding.
    gather_seconds: all-gather of the unit's parameters over the sharding group.  scatter_seconds: reduce-scatter of its
    gradients there.  replicate_seconds: all-reduce of gradient shards over dp_replicate (HSDP), or of all gradients (DDP).
    """

    local: FloatColumn
    shard: FloatColumn
    gather_seconds: FloatColumn
    scatter_seconds: FloatColumn
    replicate_seconds: FloatColumn


def unit_parameters(model: ModelSpec, batch: LayoutBatch) -> tuple[FloatColumn, FloatColumn]:
    """(parameters outside routed experts, in routed experts) of every unit on one rank, (K + 2, U) each.

    TP divides matrices; norms and biases are counted with them (they are below 0.1%).
    """
    dense, expert = [], []
    tp, ep, etp = batch.tp.astype(np.float64), batch.ep.astype(np.float64), batch.etp.astype(np.float64)
    for kind, _ in model.distinct_layers():
        routed = model.num_experts * model.expert_parameters() if kind.moe else 0
        dense.append((model.layer_parameters(kind) - routed) / tp)
        expert.append(routed / (ep * etp))
    # A tied head shares the token table on one rank; across pipeline stages the last one holds a copy.
    tied_copy = np.where((batch.pp > 1) & model.tie_word_embeddings, model.vocab_size * model.hidden_size, 0)
    for whole in (model.embedding_parameters(), model.head_parameters() + model.hidden_size + tied_copy):
        dense.append(whole / tp)
        expert.append(np.zeros_like(tp))
    return np.array(dense), np.array(expert)


def kept_shards(batch: LayoutBatch, dense: FloatColumn, expert: FloatColumn, rank_order: tuple[str, ...]) -> FloatColumn:
    """Parameters of every unit that one rank keeps under sharding, (K + 2, U)."""
    sharding = batch.zero_stage > 0
    degrees = [np.where(sharding, axes.group(name, batch, rank_order)[0], 1.0) for name in ("fsdp", "efsdp")]
    return dense / degrees[0] + expert / degrees[1]


def offload_seconds(batch: LayoutBatch, shards: UnitShards, pcie_bandwidth: float) -> UnitShards:
    """The same shards where FSDP keeps them in host memory: each gather first copies the shard to the device, each scatter copies its
    gradient back, both over PCIe on the gather's and the scatter's stream. Source: FSDP2 CPUOffloadPolicy.
    """
    copied = np.where(batch.cpu_offload, shards.shard * np.where(batch.master_dtype == 0, 2.0, 4.0) / pcie_bandwidth, 0.0)
    return replace(shards, gather_seconds=shards.gather_seconds + copied, scatter_seconds=shards.scatter_seconds + copied)


def unit_shards(batch: LayoutBatch, model: ModelSpec, fabric: Fabric, profile: Profile, rank_order: tuple[str, ...]) -> UnitShards:
    """Shards and data-parallel communication of every unit at the U layouts of `batch`.

    ZeRO 1 to 3 and FSDP shard over dp_shard x cp, then all-reduce shards over dp_replicate (HSDP); ZeRO 0 all-reduces
    whole gradients over all data-parallel ranks. Experts have the groups that remain beside EP.
    """
    dense, expert = unit_parameters(model, batch)
    seconds = _Seconds(fabric, profile)
    parts = []
    for parameters, names in ((dense, ("fsdp", "ddp", "replicate")), (expert, ("efsdp", "eddp", "replicate"))):
        parts.append(_sharded(batch, parameters, [axes.group(name, batch, rank_order) for name in names], seconds))
    shard, gather, scatter, replicate = (a + b for a, b in zip(*parts, strict=True))
    return UnitShards(local=dense + expert, shard=shard, gather_seconds=gather, scatter_seconds=scatter, replicate_seconds=replicate)


def _sharded(
    batch: LayoutBatch, parameters: FloatColumn, groups: list[tuple[FloatColumn, FloatColumn]], seconds: "_Seconds"
) -> tuple[FloatColumn, FloatColumn, FloatColumn, FloatColumn]:
    """(shard, gather, scatter, replicate) of parameters (K + 2, U); groups: sharding ranks, all data-parallel ranks, replicas."""
    sharding = batch.zero_stage > 0
    (shard_degree, shard_stride), (whole_degree, whole_stride), (_, replica_stride) = groups
    degree = np.where(sharding, shard_degree, 1.0)
    replicas = np.where(sharding, batch.dp_replicate, whole_degree)
    wire = np.where(batch.float8_all_gather, column("wire_bytes", batch.precision), np.where(batch.param_dtype == 0, 2.0, 4.0))
    reduced = parameters * np.where(batch.reduce_dtype == 0, 2.0, 4.0)
    gather = seconds("all-gather", parameters * wire, degree, shard_stride)
    scatter = seconds("reduce-scatter", reduced, degree, shard_stride)
    replicate = seconds("all-reduce", reduced / degree, replicas, np.where(sharding, replica_stride, whole_stride))
    return parameters / degree, gather, scatter, replicate


@dataclass(frozen=True, slots=True)
class _Seconds:
    fabric: Fabric
    profile: Profile

    def __call__(self, operation: str, payload: FloatColumn, degree: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Seconds (K + 2, U) for payloads (K + 2, U); an empty unit costs nothing."""
        rows = [
            np.where(
                row > 0,
                collective_seconds(
                    operation,
                    row,
                    degree,
                    stride,
                    self.fabric,
                    base_seconds=self.profile.collective_seconds,
                    nvls_gain=self.profile.nvls_gain,
                ),
                0.0,
            )
            for row in payload
        ]
        return np.array(rows)
