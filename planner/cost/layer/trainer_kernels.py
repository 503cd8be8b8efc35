"""Which kernels a run's software has: what they fuse, and what eager ones save."""

import numpy as np

from planner.columns import BoolColumn, IntColumn, LayoutBatch
from planner.precision import PRECISIONS
from planner.rules.cuda_graphs import FULL
from planner.specs.gpu import GpuSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.trainers.registry import training_release
from planner.trainers.release import torch_release
from planner.work.pieces import Code

FUSED_NORM_SINCE = (2, 8)


def trainer_code(training: TrainingSpec, rules: TrainerRules) -> Code:
    released = rules.at(training_release(training))
    return Code(
        composite_norm=composite_norm(training, rules),
        repeats_kv=repeats_kv(training, rules),
        scores_first=rules.framework.scores_first,
        chunks_loss=chunks_loss(training, rules),
        expert_path=rules.framework.expert_path,
        compiles_exchange=released.compiles_exchange,
        scores_inside=released.scores_inside,
        drops_residual=rules.drops_residual,
        own_mixers=rules.fused_kernels,
    )


def chunks_loss(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether head and loss run on chunks of the tokens.

    Where the job does not say, the trainer's release does.
    """
    return rules.chunked_loss if training.chunked_loss is None else training.chunked_loss


def fuses_cross_entropy(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether the gradient of the loss overwrites its logits, which then have no copy in fp32.

    Source: Transformer Engine common/triton/cross_entropy.py (cross_entropy_kernel writes the
    gradient to the logits), pytorch/triton/cross_entropy.py.
    """
    given = training.fused_cross_entropy
    return rules.fused_cross_entropy if given is None else given and rules.fuses_cross_entropy


def compiled_loss(fused: BoolColumn, training: TrainingSpec, rules: TrainerRules) -> BoolColumn:
    """Layouts whose loss torch.compile compiles, (U,): as the model, unless the job says otherwise.

    fused (U,): layouts whose model runs fused kernels.
    """
    month, given = training_release(training).named.month, training.fused_cross_entropy
    if len("2025") < len(month) <= len("2025-01") and month <= rules.eager_loss_until:
        return np.zeros_like(fused)
    return fused if given is None or not rules.compiles_loss else np.full_like(fused, given)


def composite_norm(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether eager RMSNorm runs as a chain of kernels that saves fp32 copies.

    It does in torch before 2.8 (aten::_fused_rms_norm is later). Where torch's release is not
    given, the trainer's release or the date of its commit decides (`composite_norm_until`).
    """
    if rules.fused_kernels:
        return False
    if training.torch_version is None:
        month = training_release(training).named.month
        fused_before = len(month) > len("2024") and month < rules.composite_norm_since
        return not fused_before and training_release(training).not_after(
            *rules.composite_norm_until
        )
    return torch_release(training.torch_version) < FUSED_NORM_SINCE


def repeats_kv(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether keys and values are copied to all query heads.

    The trainer's release decides, or the date of its commit (`repeats_kv_until`).
    """
    return training_release(training).not_after(*rules.repeats_kv_until)


def fused_kernels(batch: LayoutBatch, rules: TrainerRules) -> BoolColumn:
    """Whether memory-bound operations run fused: by torch.compile or by the trainer's kernels."""
    return np.asarray(batch.compile | rules.fused_kernels)


def one_kernel_experts(
    batch: LayoutBatch, graphs: IntColumn, model: ModelSpec, released: TrainerRules, gpu: GpuSpec
) -> BoolColumn:
    """Layouts whose experts run as cuDNN's grouped MLP, (N,): product, SwiGLU and quantising.

    The kernel of the first product applies the activation and writes the second's quantised input;
    in the backward, that of the second's input gradient does so for the first. No pass of its own
    reads or writes what lies between them.
    graphs (N,): see `rules.cuda_graphs.captured`. released: the trainer in the job's release.
    Holds for whole experts (Megatron-LM core 0.18 transformer/moe/experts.py,
    _is_fused_impl_supported) in MXFP8 on Blackwell, in graphs of a whole step (Megatron-Bridge 0.5
    scripts/performance/utils/overrides.py, cutedsl_fused_grouped_mlp).
    """
    able = released.fuses_experts and gpu.family == "blackwell" and model.mlp == "swiglu"
    mxfp8 = batch.precision == PRECISIONS.names.index("mxfp8")
    return np.asarray(able & (graphs == FULL) & mxfp8 & (batch.etp == 1))
