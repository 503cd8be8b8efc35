"""Terms that a search never changes: sequence length, global batch, optimizer, trainer, release."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from planner.specs.model import ModelSpec
from planner.specs.validation import Value
from planner.units import parse_count, parse_tokens

Optimizer = Literal["adamw", "adamw-bf16-states", "muon", "adafactor", "sgd"]
# How Muon orthogonalises a matrix that TP cuts (Megatron-LM's --muon-tp-mode): each rank its own
# shard, each rank the whole matrix, or all ranks together.
MuonTpMode = Literal["blockwise", "duplicated", "distributed"]
# Bytes of optimizer state per parameter, besides the parameter, for fp32 masters. Source:
# torch.optim; Shazeer and Stern 2018; Jordan 2024; Megatron-LM core/optimizer/muon.py.
OPTIMIZER_STATE_BYTES = {
    "adamw": 8.0, "adamw-bf16-states": 4.0, "muon": 4.0, "adafactor": 0.1, "sgd": 4.0,
}  # fmt: skip
# besides, of embedding and head, which Muon leaves to AdamW
VOCABULARY_STATE_BYTES = {"muon": 4.0}
AttentionKernel = Literal["flash", "flash2", "flash3", "cudnn", "unfused"]
CudaGraphs = Literal["none", "partial", "full"]
CUDA_GRAPHS: tuple[CudaGraphs, ...] = get_args(CudaGraphs)
MAX_SEQ_LEN = 2**27
MAX_BATCH = 2**31

PositiveCount = Annotated[int, Field(strict=True, gt=0)]


class Overlap(Value, extra="forbid"):
    """Which communication may run under compute; False means that the run switched it off.

    dp: gathers and reductions of parameters and gradients.
    tp: exchanges of tensor parallelism, where the trainer hides any.
    pp: sends between pipeline stages.
    ep: the exchange of experts runs under another microbatch's compute (Megatron-LM's
        --overlap-moe-expert-parallel-comm), which trainers leave off by default; None: as NVIDIA's
        recipe does with the same dispatcher, wherever the layout allows it.
    """

    dp: Annotated[bool, Field(strict=True)] = True
    tp: Annotated[bool, Field(strict=True)] = True
    pp: Annotated[bool, Field(strict=True)] = True
    ep: Annotated[bool, Field(strict=True)] | None = None


NO_OVERLAP = Overlap(dp=False, tp=False, pp=False, ep=False)


class Checkpointing(Value, extra="forbid"):
    """Distributed checkpoints: one save every `interval_steps` steps.

    interval_steps: steps from one save to the next.
    mode: `sync` waits for storage, `async` for the copy to the host; `async-pinned` copies under
        the next forward and backward.
    """

    interval_steps: PositiveCount
    mode: Literal["sync", "async", "async-pinned"] = "async"


class TrainingSpec(Value, extra="forbid"):
    """The contract's `training` mapping.

    seq_len: tokens; "8k" is 8,192 and "1M" 1,048,576.
    global_batch_size: sequences per step.
    trainer: the software whose rules, defaults and efficiency apply: torchtitan, megatron,
        megatron-bridge, megatron-deepspeed, fsdp or internevo.
    trainer_version: its release, a date or a commit; an unknown number counts as the newest before.
    torch_version: the release of torch.
    attention_kernel: `flash` is the generation that the trainer's release brings.
    cuda_graphs: `partial` captures layers, `full` the whole step; None: as the trainer's release
        does, and under Megatron-Bridge as its recipe does with the same dispatcher.
    chunked_loss: the loss runs on chunks of the tokens, so that whole logits never exist; None: as
        the trainer's release does.
    fused_cross_entropy: the gradient of the loss overwrites its 16-bit logits (Transformer Engine's
        kernel; in TorchTitan, whether torch.compile compiles the loss); None: as the trainer does,
        which in TorchTitan is as it does the model.
    optimizer: what states it keeps; `adamw-bf16-states` keeps both moments in 16 bits.
    muon_tp_mode: how Muon orthogonalises a matrix that TP cuts: `blockwise` each rank its shard,
        `duplicated` each the whole matrix, `distributed` all together; None: as the trainer's
        release does.
    qk_clip: weights of queries and keys are scaled after a step in which a head's largest score is
        too large (Kimi K2's MuonClip); it costs an exchange of the largest scores of each layer.
    max_grad_norm: norm that gradients are clipped to; null: no clipping.
    total_tokens: tokens of the whole run, for time and cost ("15T" works too).
    checkpoint: how often the run saves, and how; unless given, the interval of most goodput.
    vocab_parallel_loss: the loss is computed on logits cut over TP ranks; None: as the trainer
        does.
    moe_imbalance: load of the busiest expert rank over the mean (1 = balanced); None: the model
        predicts it.
    moe_capacity_factor: each expert takes so many times its mean share of a rank's rows: further
        ones are dropped, missing ones padded, so that all sizes are known before routing
        (Megatron-LM's --moe-expert-capacity-factor with --moe-pad-expert-input-to-capacity); None:
        no token is dropped.
    expandable_segments: torch's allocator setting; None: as the trainer sets it.
    overlap: communication that the run has switched off.
    """

    seq_len: Annotated[int, BeforeValidator(parse_tokens), Field(strict=True, gt=0, le=MAX_SEQ_LEN)]
    global_batch_size: Annotated[int, Field(strict=True, gt=0, le=MAX_BATCH)]
    trainer: str = "torchtitan"
    trainer_version: str | None = None
    torch_version: str | None = None
    attention_kernel: AttentionKernel = "flash"
    cuda_graphs: CudaGraphs | None = None
    chunked_loss: Annotated[bool, Field(strict=True)] | None = None
    fused_cross_entropy: Annotated[bool, Field(strict=True)] | None = None
    optimizer: Optimizer = "adamw"
    muon_tp_mode: MuonTpMode | None = None
    qk_clip: Annotated[bool, Field(strict=True)] = False
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    total_tokens: (
        Annotated[float, BeforeValidator(parse_count), Field(gt=0, allow_inf_nan=False)] | None
    ) = None
    checkpoint: Checkpointing | None = None
    vocab_parallel_loss: Annotated[bool, Field(strict=True)] | None = None
    moe_imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    moe_capacity_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    expandable_segments: Annotated[bool, Field(strict=True)] | None = None
    overlap: Overlap = Overlap()


def mean_state_bytes(optimizer: Optimizer, model: ModelSpec) -> float:
    """Bytes of optimizer state per parameter, the mean over a model, for fp32 masters."""
    vocabulary = model.parameters.embedding() + model.parameters.head()
    return (
        OPTIMIZER_STATE_BYTES[optimizer]
        + VOCABULARY_STATE_BYTES.get(optimizer, 0.0) * vocabulary / model.total_parameters()
    )
