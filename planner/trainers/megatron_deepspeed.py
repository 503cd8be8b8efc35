"""Megatron-DeepSpeed, as BLOOM was trained with; and what it shares with InternEvo."""

from dataclasses import replace

from planner.specs.layout import COMMON
from planner.trainers.attention import FLASH_ATTN
from planner.trainers.base import lacks_mixers
from planner.trainers.megatron import AC_KINDS, MEGATRON
from planner.trainers.strategies import MEGATRON as MEGATRON_FRAMEWORK
from planner.trainers.transports import MEGATRON_ROWS, ONE_STAGE, Transport, TransportRow

_SENDS = Transport(
    receive="needed",
    waits="all",
    stream="pair",
    splits=True,
    source="DeepSpeed runtime/pipe/engine.py (is_pipe_partitioned), schedule.py TrainSchedule, "
    "p2p.py: blocking sends, even ranks first",
)

# Megatron-LM's layers before Megatron Core, on flash-attn; users run the repository.
EARLY_MEGATRON = replace(
    MEGATRON,
    history=(),
    default_release="",
    changes=(),
    distributions={},
    offered=(),
    lacks=lacks_mixers,
    optimizers=(),
    ac_kinds=AC_KINDS,
    fuses_cross_entropy=False,
    replicates_kv_heads=False,
    sp_with_experts=False,
    # DeepSpeed engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism; InternEvo
    # internlm/core/parallel/comm/zero.py
    zero_2_under_pp=False,
    # DeepSpeed pipe/module.py partition_layers; partition_uniform of InternEvo's pipeline
    split="uneven",
    attention=FLASH_ATTN,
    attention_kernels=frozenset({"flash2", "unfused"}),
    fused_sums=False,
    tf32=False,  # torch.nn.functional.linear, in 16 bits
    placeholders_since="",
)
MEGATRON_DEEPSPEED = replace(
    EARLY_MEGATRON,
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    vendors={"nvidia": "", "amd": "ROCm/Megatron-DeepSpeed"},
    ac="full",
    layout_defaults={**COMMON, "sequence_parallel": False},
    precisions=frozenset({"bf16", "fp16", "float8-delayed"}),
    # DeepSpeed runtime/zero/offload_config.py: `ratio` is of ZeRO-3 alone
    offloads_partly=False,
    offloads_activations=False,
    # deepspeed moe/layer.py: enable_expert_tensor_parallelism, on or off
    etp_one_or_tp=True,
    ep_over_replicas=False,
    framework=replace(
        MEGATRON_FRAMEWORK,
        # deepspeed/runtime/pipe/engine.py (pipe_buffers); cut over TP ranks, which is not counted
        keeps_stage_outputs=True,
        transports=(TransportRow(schedules=ONE_STAGE, transport=_SENDS), *MEGATRON_ROWS),
    ),
    # bigscience-workshop/Megatron-DeepSpeed megatron/mpu/layers.py (F.linear, all-reduces block)
    tp_overlaps=(),
    # deepspeed/runtime/bf16_optimizer.py (update_hp_grads), pipe/engine.py (_exec_backward_pass)
    gradients_apart=True,
    # judgement: BLOOM's trials (bigscience chronicles-prequel.md) took up to 25% more or less than
    # predicted by nvidia-smi, as their optimizer changed from day to day
    memory_extra_sd=0.10,
    source="Megatron-DeepSpeed arguments (Transformer Engine of that time), BLOOM training "
    "chronicles; github.com/deepspeedai/Megatron-DeepSpeed",
)
