"""The end of a step: gradient norm and clipping, the optimizer's update, new scales of weights.

The update runs on the device, on the host, or in shares on both.
Letters: N layouts, U layouts that differ in `sharding.KEY`. (K + 2, U): the model's distinct
layers, then the embedding, then the head.
"""

from collections.abc import Mapping

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch
from planner.cost.layer.quantisation import TRANSPOSING, gathers_low, stored_low
from planner.cost.memory.peak import SCALES_WITH_MASTER
from planner.cost.prepared_job import PreparedJob
from planner.precision import TWO_BYTES, column
from planner.specs.training import OPTIMIZER_STATE_BYTES, VOCABULARY_STATE_BYTES
from planner.units import GIGA
from planner.work.quantised import quantised_model

# Share of a host's memory bandwidth that one GPU's optimizer gets, torch AdamW on a two-socket
# server with 8 GPUs; judgement.
HOST_STREAM_BYTES_PER_SECOND = 40 * GIGA
# Bytes moved per parameter in fp32, besides reading gradient, parameter and states and writing the
# last two. Zero where the update is one fused kernel. Adafactor and Muon run operation by
# operation. Counted from torch/optim/_adafactor.py (norms of parameter, gradient rows and columns
# and update, the outer product, its division, clamp and root, decay) and _muon.py (momentum,
# Nesterov, cast, decay).
UNFUSED_BYTES: Mapping[str, float] = {
    "adamw": 0.0, "adamw-bf16-states": 0.0, "muon": 28.0, "adafactor": 64.0, "sgd": 0.0,
}  # fmt: skip
NORM_READS, CLIP_MOVES = 1.0, 2.0
SCALAR_BYTES = 4.0
# Of one layer in Megatron-LM core 0.16 optimizer/qk_clip.py and transformer/attention.py (clip_qk):
# the exchange, two comparisons, and two numbers that the host reads. That weights are scaled, in
# the steps in which they are, and each row's largest score are below a thousandth of a layer.
CLIP_LAUNCHES = 5.0


def update_seconds(
    job: PreparedJob, batch: LayoutBatch, owned: FloatColumn, quantised: FloatColumn
) -> FloatColumn:
    """Seconds that the update of each unit takes, (K + 2, U), without Newton-Schulz.

    owned: parameters that a rank updates.
    quantised: parameters of the rank, unsharded, that GEMMs read quantised.
    The host updates its share s of the parameters (`host_share`), the device the others at the
    same time; nothing else hides an update on the host.

        copies down + max(host's update of s, device's update of 1 - s) + copies up

    `cost.data_parallel.overlap` decides how much of FSDP's copies over PCIe is hidden. Megatron
    copies gradients down before its update and parameters up after it, each on the stream that
    computes unless --overlap-cpu-optimizer-d2h-h2d is given. It moves whole tensors to the host
    until they are a share of at least s: one tensor's shard more, at most.
    Source: FSDP2 CPUOffloadPolicy; Megatron-LM core/optimizer/cpu_offloading/
    hybrid_optimizer.py (step: the device's kernels are queued before the host steps;
    _get_sub_optimizer_param_groups).
    """
    moved = owned * bytes_per_parameter(job, batch)
    more = VOCABULARY_STATE_BYTES.get(job.training.optimizer, 0.0)
    moved[-2:] += owned[-2:] * 2.0 * more * batch.master_bytes / 4.0
    share = batch.host_share
    copied = (
        0.0
        if job.rules.sharding.offloads_shards
        else share * owned * 8.0 / job.cluster.pcie_bandwidth_bytes_per_second
    )
    on_host = share * moved / HOST_STREAM_BYTES_PER_SECOND
    on_device = job.device.moved_seconds((1.0 - share) * moved)
    update = np.maximum(on_host, on_device) + copied
    update[:-2] += job.device.moved_seconds(
        _requantised_bytes(job, batch, owned[:-2], quantised[:-2])
    )
    return update


def bytes_per_parameter(job: PreparedJob, batch: LayoutBatch) -> FloatColumn:
    """Memory traffic of clipping and updating one parameter, (N,).

    Step: gradient, parameter and states are read, the last two written. Megatron writes the
        16-bit parameter too, where it has masters.
    Clipping: gradients are read for the norm, then read and written to scale them.
    Source: torch fused AdamW (7 streams of 4 bytes in fp32), torch.nn.utils.clip_grad_norm_,
        Megatron distrib_optimizer.py.
    """
    master = batch.master_bytes
    scaled = job.training.optimizer in SCALES_WITH_MASTER
    scale = master / 4.0 if scaled else np.ones_like(master)
    float32 = job.rules.gradient_dtype == "float32"
    wide = batch.reduce_bytes if float32 else np.full_like(master, 2.0)
    gradient = master if job.rules.sharding.gradients_in_master_dtype else wide
    states = OPTIMIZER_STATE_BYTES[job.training.optimizer] * scale
    copies = job.rules.sharding.keeps_copies
    copy = np.where(master > batch.param_bytes, batch.param_bytes, 0.0) if copies else 0.0
    clipping = (
        (NORM_READS + CLIP_MOVES) * gradient if job.training.max_grad_norm is not None else 0.0
    )
    return np.asarray(
        gradient
        + 2.0 * master
        + 2.0 * states
        + copy
        + clipping
        + UNFUSED_BYTES[job.training.optimizer] * master / 4.0
    )


def sum_bytes(job: PreparedJob, batch: LayoutBatch) -> FloatColumn:
    """Memory traffic of accumulating one parameter's gradient over microbatches, (N,).

    The gradient is read, and the sum read and written.
    FSDP adds shards after its reduction, which counts for nothing; under PP it adds whole
    gradients, in the dtype of the reduction.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py
        (accumulate_unsharded_grad_if_needed), torch AccumulateGrad.
    """
    fresh = batch.param_bytes
    if job.rules.fused_sums:
        return np.zeros_like(fresh)
    if job.rules.sharding.reduces_by_unit:
        kept = np.where(batch.zero_stage > 0, batch.reduce_bytes, batch.master_bytes)
        return np.where((batch.zero_stage > 0) & (batch.pp == 1), 0.0, fresh + 2.0 * kept)
    return fresh + 2.0 * (4.0 if job.rules.gradient_dtype == "float32" else 2.0)


def copy_bytes(job: PreparedJob, batch: LayoutBatch, replaced: BoolColumn) -> FloatColumn:
    """Bytes of one weight's quantised copies that stay from step to step, (N,).

    Less the parameter, where they replace it: `replaced` (N,).
    """
    codes, recipes = batch.precision, job.recipes
    copies = (
        column("weight_copies", codes, recipes)
        if job.device.gpu.kernel_family in TRANSPOSING
        else 1.0
    )
    return np.asarray(
        column("weight_copy_bytes", codes, recipes) * copies - np.where(replaced, TWO_BYTES, 0.0)
    )


def _requantised_bytes(
    job: PreparedJob, batch: LayoutBatch, owned_layers: FloatColumn, local_layers: FloatColumn
) -> FloatColumn:
    """Bytes moved once a step to quantise weights or to find their scales, (K, U).

    The scales are found for weights that will be gathered quantised.
    """
    codes, recipes = batch.precision, job.recipes
    turned = float(job.device.gpu.kernel_family in TRANSPOSING)
    each = sum(column(f"{name}.weight", codes, recipes) for name in ("scale", "cast"))
    each = each + turned * column("transposed.weight", codes, recipes)
    own = np.where(stored_low(batch, recipes), owned_layers, local_layers)
    once = own * np.where(
        (column("weight_once", codes, recipes) > 0) & (batch.param_dtype == 0), each, 0.0
    )
    scaled = gathers_low(batch, recipes) & (column("gather_amax", codes, recipes) == 0)
    return np.asarray(once + owned_layers * np.where(scaled, batch.master_bytes, 0.0))


def small_reductions(job: PreparedJob, batch: LayoutBatch) -> FloatColumn:
    """Seconds a step of all-reduces of a few bytes, (U,).

    They reduce the gradient norm, and scales of weights or of a whole step (delayed scaling). Each
    runs once on every axis over which the numbers differ, and everything waits for it. `qk_clip`
    reduces each layer's largest scores, one a head, over data-parallel and context ranks.
    Source: torch DTensor full_tensor of a partial norm, one all-reduce per mesh dimension; torchao
    precompute_float8_dynamic_scale_for_fsdp (one all-reduce for all weights); Transformer Engine
    reduce_and_update_fp8_tensors (forward and backward amax).
    """
    recipes, codes = job.recipes, batch.precision
    delayed = column("step_amax", codes, recipes) > 1.0
    scales = np.where(
        delayed | gathers_low(batch, recipes), column("step_amax", codes, recipes), 0.0
    ) * (batch.param_dtype == 0)
    norm = 1.0 if job.training.max_grad_norm is not None else 0.0
    weights = float(quantised_model(job.model, recipes).weights.max()) * job.model.num_hidden_layers
    payload = np.full(len(batch), SCALAR_BYTES * max(weights, 1.0))
    clipped = job.training.qk_clip * job.model.num_attention_layers / batch.pp
    total = clipped * CLIP_LAUNCHES * job.profile.launch_seconds
    for axis, count in (
        ("fsdp", norm + scales),
        ("ddp", clipped),
        ("tp", norm + scales),
        ("pp", np.full(len(batch), norm)),
    ):
        group = job.group(axis, batch)
        total = total + count * job.collective_seconds("all-reduce", payload, group)
    return total
