"""Memory of pipeline ranks at their worst moment. Letters: R ranks looked at, N layouts; every array is (R, N).

Three moments compete: the loss (all activations of the step's deepest point and the logits), the first backward of a layer
(activations, the layer's recomputed tensors, its unsharded parameters and gradients), and the optimizer step (all gradients).
"""

from dataclasses import dataclass, fields

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.specs.trainers import TrainerRules
from planner.specs.training import TrainingSpec

# Bytes a parameter of optimizer state beside the parameter, for fp32 masters. Source: torch.optim; Shazeer and Stern 2018; Jordan 2024.
OPTIMIZER_STATE_BYTES = {"adamw": 8.0, "adamw-bf16-states": 4.0, "muon": 4.2, "adafactor": 0.1, "sgd": 4.0}
SCALES_WITH_MASTER = ("adamw", "sgd", "muon")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShapes:
    """What memory depends on, (R, N): sums over the units that a rank holds, unless said otherwise.

    local, shard: parameters after TP and EP; kept under full sharding.  largest_local: of the largest unit, head_local: of the head.
    gathered, largest_gathered: of `local` and of the largest unit as elements of the compute dtype, as wide as they are gathered.
    copies_bytes: quantised copies of weights that stay from step to step, less the parameters that they replace (Megatron's style).
    saved_bytes: activations of one microbatch.  transient_bytes: largest recomputed layer.  in_flight: microbatches held.
    held_bytes: on top of those of the microbatches held, where weight gradients run apart from the input's.
    boundary_bytes: stage inputs kept for one microbatch.  logits_bytes: at the loss, 0 without the head.
    """

    local: FloatColumn
    shard: FloatColumn
    largest_local: FloatColumn
    head_local: FloatColumn
    gathered: FloatColumn
    largest_gathered: FloatColumn
    copies_bytes: FloatColumn
    saved_bytes: FloatColumn
    transient_bytes: FloatColumn
    in_flight: FloatColumn
    held_bytes: FloatColumn
    boundary_bytes: FloatColumn
    logits_bytes: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes at the worst moment, (R, N); the parts sum to `allocated`."""

    parameters: FloatColumn
    gradients: FloatColumn
    optimizer: FloatColumn
    activations: FloatColumn
    logits: FloatColumn
    buffers: FloatColumn
    workspace: FloatColumn
    allocated: FloatColumn


def rank_memory(
    shapes: RankShapes,
    batch: LayoutBatch,
    num_microbatches: FloatColumn,
    training: TrainingSpec,
    rules: TrainerRules,
    workspace_bytes: float,
) -> RankMemory:
    """Parts of the worst moment of every rank.

    Sources: Rajbhandari 2020 (ZeRO), FSDP2 (torch/distributed/fsdp/_fully_shard: unsharded accumulated gradients keep
    reduce_dtype; parameters of the next unit are prefetched), Megatron-LM distributed optimizer.
    """
    states = _persistent(shapes, batch, num_microbatches, training, rules)
    compute = np.where(batch.param_dtype == 0, 2.0, 4.0)
    reduce = np.where(batch.reduce_dtype == 0, 2.0, 4.0)
    activations = shapes.in_flight * (shapes.saved_bytes + shapes.boundary_bytes) + shapes.held_bytes
    parameters, accumulated, gradients, optimizer, gathers = states
    gathered = np.where(gathers, compute, 0.0)
    backward_buffers = shapes.largest_gathered * 2.0 * gathered + shapes.largest_local * np.where(gathers, compute + 1.5 * reduce, 0.0)
    zero = np.zeros_like(activations)
    moments = [
        (accumulated, activations, shapes.logits_bytes, (shapes.head_local + shapes.largest_gathered) * gathered),
        (accumulated, activations + shapes.transient_bytes, zero, backward_buffers),
        (gradients, zero, zero, zero),
    ]
    totals = [parts[0] + parts[1] + parts[2] + parts[3] for parts in moments]
    peak = np.maximum(np.maximum(totals[0], totals[1]), totals[2])
    at_loss, at_backward = totals[0] == peak, totals[1] == peak
    picked = [np.where(at_loss, loss, np.where(at_backward, backward, update)) for loss, backward, update in zip(*moments, strict=True)]
    workspace = np.full_like(activations, workspace_bytes)
    return RankMemory(
        parameters=parameters, gradients=picked[0], optimizer=optimizer, activations=picked[1], logits=picked[2], buffers=picked[3],
        workspace=workspace, allocated=parameters + optimizer + peak + workspace,
    )  # fmt: skip


def _persistent(
    shapes: RankShapes, batch: LayoutBatch, num_microbatches: FloatColumn, training: TrainingSpec, rules: TrainerRules
) -> tuple[FloatColumn, FloatColumn, FloatColumn, FloatColumn, FloatColumn]:
    """(parameters, gradients kept between microbatches, all gradients of a step, optimizer, whether units are gathered)."""
    compute = np.where(batch.param_dtype == 0, 2.0, 4.0)
    reduce = np.where(batch.reduce_dtype == 0, 2.0, 4.0)
    master = np.where(batch.master_dtype == 0, 2.0, 4.0)
    on_device = np.where(batch.cpu_offload, 0.0, 1.0)
    state = OPTIMIZER_STATE_BYTES[training.optimizer] * np.where(training.optimizer in SCALES_WITH_MASTER, master / 4.0, 1.0)
    accumulates = num_microbatches > 1
    stage = batch.zero_stage
    if rules.fsdp_style:
        piped = batch.pp > 1
        stays = (piped & (stage < 3)) | (stage == 2)
        parameters = shapes.shard * master * on_device + np.where(stays, shapes.gathered * compute, 0.0)
        sharded_gradients = shapes.shard * master * on_device
        unsharded = np.where(piped & accumulates, shapes.local * reduce, 0.0)
        accumulated = np.where(accumulates & ~piped, sharded_gradients, unsharded)
        gradients = np.where(batch.optimizer_in_backward, shapes.largest_local * compute, np.maximum(sharded_gradients, unsharded))
        accumulated = np.where(batch.optimizer_in_backward, 0.0, accumulated)
        return parameters, accumulated, gradients, shapes.shard * state * on_device, ~stays
    gradient = reduce if rules.gradient_dtype == "float32" else np.full_like(reduce, 2.0)
    held = np.where(stage == 3, shapes.shard, shapes.local)
    parameters = held * compute + shapes.copies_bytes * held / np.maximum(shapes.local, 1.0)
    gradients = np.where(stage >= 2, shapes.shard, shapes.local) * gradient
    optimizer = np.where(stage >= 1, shapes.shard, shapes.local) * (state + master) * on_device
    return parameters, gradients, gradients, optimizer, stage == 3


def rows(memory: RankMemory) -> dict[str, FloatColumn]:
    """The parts by name, for those who gather or print them."""
    return {f.name: getattr(memory, f.name) for f in fields(memory)}
