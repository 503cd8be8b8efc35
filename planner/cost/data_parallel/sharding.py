"""Parameters of each unit on one rank, and what it costs to gather, scatter and reduce them.

Letters: U layouts that differ in KEY. (K + 2, U): the model's distinct layers, then the embedding,
then the head (as in `cost.layer.unit_costs`).
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, LayoutBatch, in_order
from planner.columns.table import Table
from planner.cost.data_parallel import muon, optimizer_step
from planner.cost.data_parallel.unit_elements import (
    kept_shards,
    quantised_shares,
    unit_parameters,
    wire_bytes,
)
from planner.cost.layer.quantisation import gathers_low, stored_low
from planner.cost.prepared_job import PreparedJob
from planner.precision import column
from planner.work import axes
from planner.work.quantised import quantised_model

KEY = (
    "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "zero_stage", "precision",
    "float8_all_gather", "param_dtype",
    "reduce_dtype", "master_dtype", "cpu_offload", "optimizer_offload_fraction",
)  # fmt: skip
# Bytes per element. An fp32 shard is scaled, clamped and cast operation by operation (21 bytes),
# less FSDP's cast to 16 bits (6), which is priced nowhere. Its own scale takes abs and max of it
# (4 + 4 + 4). Source: torchao float8/fsdp_utils.py, float8_training_tensor.py.
SHARD_CAST_BYTES, SHARD_AMAX_BYTES, SCALE_BYTES = 15.0, 12.0, 4.0
HOST_ADD_MOVES = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShards(Table):
    """Parameters of one unit on one rank, and seconds of its data-parallel communication.

    All are (K + 2, U) but step_seconds, which is (U,).

    Elements:
    local: after TP and EP, which compute needs gathered.
    shard: of those, the ones that a rank keeps under full sharding; the busiest rank, where ranks
        own whole matrices.
    padding: of buffers, where they hold as much for each owner as for the busiest.
    together: of `local`, the most whose gradients are reduced at once. Under EP a layer's experts
        are sharded separately.
    gathered: `local` as elements of the compute dtype when gathered.
    distinct: one weight of every shape, the shapes of experts once; layers only.
    copies_bytes: quantised copies of `local` that stay, less what they replace.

    Seconds:
    gather_seconds: all-gather of the unit's parameters over the sharding group.
    scatter_seconds: reduce-scatter of its gradients there.
    replicate_seconds: all-reduce of gradient shards over dp_replicate (HSDP), or of all gradients
        (DDP).
    gather_copy_seconds, scatter_copy_seconds: on the stream that computes, copies out of the buffer
        of a gather, and of gradients into that of a reduction.
    upload_seconds, download_seconds: copies over PCIe of the shard and of its gradient, where FSDP
        keeps both on the host.
    accumulate_seconds: adding the gradient there.
    update_seconds: the optimizer's update, including the exchange that makes matrices whole for it.
    sum_seconds: adding a microbatch's gradients to those of earlier ones.
    step_seconds: small all-reduces that a step waits for.
    """

    local: FloatColumn
    shard: FloatColumn
    padding: FloatColumn
    together: FloatColumn
    gathered: FloatColumn
    copies_bytes: FloatColumn
    distinct: FloatColumn
    gather_seconds: FloatColumn
    scatter_seconds: FloatColumn
    replicate_seconds: FloatColumn
    gather_copy_seconds: FloatColumn
    scatter_copy_seconds: FloatColumn
    upload_seconds: FloatColumn
    download_seconds: FloatColumn
    accumulate_seconds: FloatColumn
    update_seconds: FloatColumn
    sum_seconds: FloatColumn
    step_seconds: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCall:
    """A collective of data parallelism, for the parameters of every unit, (K + 2, U) unless said.

    part: whose seconds of `UnitShards` it is among: "gather", "scatter" or "replicate".
    payload: bytes of one, 0 where there is none.
    seconds: of one.
    times: how many are asked for where a unit is gathered or reduced once.
    group: its ranks.
    """

    part: str
    operation: str
    payload: FloatColumn
    group: axes.Group
    seconds: FloatColumn
    times: FloatColumn | float = 1.0


def unit_shards(job: PreparedJob, batch: LayoutBatch) -> UnitShards:
    """Shards and data-parallel communication of every unit at the U layouts of `batch`.

    ZeRO 1 to 3 and FSDP shard over dp_shard x cp, then all-reduce shards over dp_replicate (HSDP).
    ZeRO 0 all-reduces whole gradients over all data-parallel ranks. Experts have the groups that
    remain besides EP.
    """
    dense, expert = unit_parameters(job.model, batch)
    quantised = quantised_shares(job.model, batch, job.recipes)
    wires = wire_bytes(job, batch, quantised)
    calls = shard_calls(job, batch)
    gather, scatter, replicate = (
        in_order([call.times * call.seconds for call in calls if call.part == part])
        for part in ("gather", "scatter", "replicate")
    )
    shares = muon.owner_shares(job, batch)
    shard = kept_shards(batch, dense * shares[0], expert * shares[1], job.cluster.rank_order)
    pads = job.rules.muon.pads_owners
    low = dense * quantised[0] + expert * quantised[1]
    copies = optimizer_step.copy_bytes(job, batch, stored_low(batch, job.recipes))
    fsdp = job.group("fsdp", batch)
    layers = dense[:-2] + expert[:-2] * batch.ep / max(job.model.num_experts, 1)
    return UnitShards(
        local=dense + expert,
        shard=shard,
        padding=pads * (dense * (shares[0] - 1.0) + expert * (shares[1] - 1.0)),
        together=np.where(batch.ep > 1, np.maximum(dense, expert), dense + expert),
        gathered=(dense * wires[0] + expert * wires[1]) / batch.param_bytes,
        distinct=np.concatenate([layers, np.zeros_like(dense[-2:])]),
        copies_bytes=low * (copies if job.rules.sharding.keeps_copies else 0.0),
        gather_seconds=gather + _casts_of_shards(job, batch, (dense, quantised[0]), fsdp[0]),
        scatter_seconds=scatter,
        replicate_seconds=replicate,
        **_buffer_copies(job, batch, (dense, expert), wires),
        **_offload(job, batch, shard),
        update_seconds=optimizer_step.update_seconds(job, batch, shard, low)
        + muon.update_seconds(job, batch, shard),
        sum_seconds=job.device.moved_seconds(
            (dense + expert) * optimizer_step.sum_bytes(job, batch)
        ),
        step_seconds=optimizer_step.small_reductions(job, batch),
    )


def shard_calls(job: PreparedJob, batch: LayoutBatch) -> list[ShardCall]:
    """The collectives that gather parameters and reduce gradients; see `unit_shards`."""
    dense, expert = unit_parameters(job.model, batch)
    quantised = quantised_shares(job.model, batch, job.recipes)
    found: list[ShardCall] = []
    if job.rules.muon.pads_owners:
        shares = muon.owner_shares(job, batch)
        dense, expert = dense * shares[0], expert * shares[1]
    for parameters, wire, names in zip(
        (dense, expert),
        wire_bytes(job, batch, quantised),
        (("fsdp", "ddp"), ("efsdp", "eddp")),
        strict=True,
    ):
        groups = [job.group(name, batch) for name in (*names, "replicate")]
        gather, scatter, replicate = _sharded(job, batch, parameters, wire, groups)
        if job.training.optimizer == "muon" and job.rules.muon.reduces_whole:
            scatter = _call(job, "scatter", "all-reduce", scatter.payload, scatter.group)
        if job.rules.whole_owners:
            gather, scatter = _by_owners(job, batch, parameters, wire, groups[0])
        found += [gather, scatter, replicate]
    return [*found, *_scales_of_shards(job, batch, quantised[0])]


def _casts_of_shards(
    job: PreparedJob,
    batch: LayoutBatch,
    dense: tuple[FloatColumn, FloatColumn],
    degree: FloatColumn,
) -> FloatColumn:
    """Seconds that FSDP takes to quantise each unit's shards before it gathers them, (K + 2, U).

    dense: parameters outside of routed experts, and the share of them that GEMMs read quantised.
    Source: torchao float8/fsdp_utils.py fsdp_pre_all_gather; its operations are not compiled.
    """
    parameters, quantised = dense
    low = gathers_low(batch, job.recipes)
    if not (job.rules.sharding.casts_shards and low.any()):
        return np.zeros_like(parameters)
    own = low & (column("gather_amax", batch.precision, job.recipes) > 0)
    shard = parameters / np.where(batch.zero_stage > 0, degree, 1.0) * quantised
    moved = shard * (np.where(low, SHARD_CAST_BYTES, 0.0) + np.where(own, SHARD_AMAX_BYTES, 0.0))
    return np.asarray(moved / job.device.memory_rate)


def _scales_of_shards(
    job: PreparedJob, batch: LayoutBatch, quantised: FloatColumn
) -> list[ShardCall]:
    """All-reduces of the scale of each weight that is gathered quantised.

    There are none where the scales of all weights are made together after the optimizer's step.
    """
    low = gathers_low(batch, job.recipes)
    if not (job.rules.sharding.casts_shards and low.any()):
        return []
    own = low & (column("gather_amax", batch.precision, job.recipes) > 0)
    weights = quantised_model(job.model, job.recipes).weights[:, batch.precision]
    counts = np.vstack([weights, np.zeros((2, len(batch)))])
    payload = np.where((quantised > 0) & own, SCALE_BYTES, 0.0)
    return [_call(job, "gather", "all-reduce", payload, job.group("fsdp", batch), counts)]


def _buffer_copies(
    job: PreparedJob,
    batch: LayoutBatch,
    parameters: tuple[FloatColumn, FloatColumn],
    wires: tuple[FloatColumn, FloatColumn],
) -> dict[str, FloatColumn]:
    """Seconds of copies between a unit's tensors and the buffers of its collectives, (K + 2, U).

    A gather's buffer is read and written once more. Gradients are read in the compute dtype and
    written in that of the reduction. Experts that are cut along their second dimension, because
    more ranks share them than there are experts, take one more pass in each direction.
    parameters, wires: (outside routed experts, inside); elements, and bytes of a gathered one.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (foreach_all_gather_copy_out,
    foreach_reduce); torchtitan models/llama4/infra/parallelize.py (_experts_shard_placement_fn).
    """
    gathered, reduced = np.zeros_like(parameters[0]), np.zeros_like(parameters[0])
    if job.rules.sharding.copies_buffers:
        for count, wire, axis in zip(parameters, wires, ("fsdp", "efsdp"), strict=True):
            degree, _ = job.group(axis, batch)
            sharded = count * ((batch.zero_stage > 0) & (degree > 1))
            again = (axis == "efsdp") & (degree * batch.ep > job.model.num_experts)
            second = 2.0 * batch.param_bytes * again
            gathered = gathered + sharded * (2.0 * wire + second)
            reduced = reduced + sharded * (batch.param_bytes + batch.reduce_bytes + second)
    return {
        "gather_copy_seconds": job.device.moved_seconds(gathered),
        "scatter_copy_seconds": job.device.moved_seconds(reduced),
    }


def _offload(job: PreparedJob, batch: LayoutBatch, shard: FloatColumn) -> dict[str, FloatColumn]:
    """Seconds of copies and additions where FSDP keeps shards on the host; 0 elsewhere.

    Each shard is copied to the device, its gradient back, and this is added to the earlier ones.
    Source: torch/distributed/fsdp/_fully_shard (CPUOffloadPolicy): _fsdp_param.py
    all_gather_inputs, _fsdp_collectives.py foreach_reduce.
    """
    hosted = batch.cpu_offload & job.rules.sharding.offloads_shards
    wide = np.where(hosted, shard * batch.master_bytes, 0.0)
    copied = wide / job.cluster.pcie_bandwidth_bytes_per_second
    added = HOST_ADD_MOVES * wide / optimizer_step.HOST_STREAM_BYTES_PER_SECOND
    return {"upload_seconds": copied, "download_seconds": copied, "accumulate_seconds": added}


def _sharded(
    job: PreparedJob,
    batch: LayoutBatch,
    parameters: FloatColumn,
    wire: FloatColumn,
    groups: list[axes.Group],
) -> tuple[ShardCall, ShardCall, ShardCall]:
    """The gather, the scatter and the replica all-reduce of parameters.

    groups: (degree, stride) of sharding ranks, of all data-parallel ranks, of replicas.
    """
    sharding = batch.zero_stage > 0
    (shard_degree, shard_stride), (whole_degree, whole_stride), (_, replica_stride) = groups
    degree = np.where(sharding, shard_degree, 1.0)
    replicas = np.where(sharding, batch.dp_replicate, whole_degree)
    reduced = parameters * batch.reduce_bytes
    apart = np.where(sharding, replica_stride, whole_stride)
    return (
        _call(job, "gather", "all-gather", parameters * wire, (degree, shard_stride)),
        _call(job, "scatter", "reduce-scatter", reduced, (degree, shard_stride)),
        _call(job, "replicate", "all-reduce", reduced / degree, (replicas, apart)),
    )


def _by_owners(
    job: PreparedJob,
    batch: LayoutBatch,
    parameters: FloatColumn,
    wire: FloatColumn,
    group: axes.Group,
) -> tuple[ShardCall, ShardCall]:
    """The gather and the scatter where every rank owns whole parameters.

    Each rank broadcasts its part in turn, and gradients are reduced to it. Each unit has its share
    of them by its parameters, since owners' parts are not cut at units.
    Source: InternEvo solver/optimizer/hybrid_zero_optim.py (_broadcast_params, and reduce_tensor to
    a single dst_rank).
    """
    degree, stride = group[0] * np.where(batch.zero_stage > 0, 1.0, 0.0), group[1]
    layers = [float(count) for _, count in job.model.distinct_layers()]
    counts = np.array([*layers, 1.0, 1.0])[:, None]
    reduced = parameters * batch.reduce_bytes
    out = []
    for part, operation, payload in (
        ("gather", "broadcast", parameters * wire),
        ("scatter", "reduce", reduced),
    ):
        whole = (counts * payload).sum(axis=0) / batch.pp
        owned = np.broadcast_to(whole / np.maximum(degree, 1.0), payload.shape)
        times = degree * payload / np.maximum(whole, 1e-30)
        out.append(_call(job, part, operation, owned, (degree, stride), times))
    return out[0], out[1]


def _call(
    job: PreparedJob,
    part: str,
    operation: str,
    payload: FloatColumn,
    group: axes.Group,
    times: FloatColumn | float = 1.0,
) -> ShardCall:
    seconds = job.collective_seconds(operation, payload, group)
    return ShardCall(
        part=part, operation=operation, payload=payload, group=group, seconds=seconds, times=times
    )
