"""InternEvo."""

from dataclasses import replace

from planner.specs.layout import COMMON
from planner.trainers.attention import FLASH_ATTN
from planner.trainers.base import lacks_mixers
from planner.trainers.megatron import AC_KINDS, MEGATRON
from planner.trainers.tp_overlap import DEFERRED

INTERNEVO = replace(
    MEGATRON,
    name="internevo",
    title="InternEvo",
    vendors={"nvidia": ""},  # doc/en/install.md
    history=(),
    default_release="",
    changes=(),
    distributions={},
    offered=(),
    lacks=lacks_mixers,
    optimizers=(),
    layout_defaults={**COMMON, "reduce_dtype": "bfloat16"},
    precisions=frozenset({"bf16", "fp16"}),  # its fp8 was never merged (pull request 369)
    ac_kinds=AC_KINDS,
    fuses_cross_entropy=False,
    replicates_kv_heads=False,
    sp_with_experts=False,
    # internlm/core/parallel/comm/zero.py; partition_uniform of its pipeline
    zero_2_under_pp=False,
    split="uneven",
    searched_ac=("none", "full"),
    # internlm/core/scheduler/pipeline_scheduler.py (output_objs)
    framework=replace(MEGATRON.framework, keeps_stage_outputs=True),
    tp_overlaps=(
        replace(
            DEFERRED,
            source="InternEvo internlm/model/modules/linear.py SPFusedDenseFunc: only "
            "grad_input_hook runs beside compute (async_op=True); output_hook and "
            "grad_output_hook block",
        ),
    ),
    whole_owners=True,
    attention=FLASH_ATTN,
    attention_kernels=frozenset({"flash2", "unfused"}),
    gradient_dtype="bfloat16",
    fused_sums=False,
    drops_residual=False,
    tf32=False,  # torch.nn.functional.linear, in 16 bits
    placeholders_since="",
    memory_extra_sd=0.05,  # judgement
    source="InternEvo configs/7B_sft.py",
)
