"""InternEvo."""

from dataclasses import replace

from planner.specs.layout import COMMON
from planner.trainers.megatron_deepspeed import EARLY_MEGATRON
from planner.trainers.tp_overlap import DEFERRED

INTERNEVO = replace(
    EARLY_MEGATRON,
    name="internevo",
    title="InternEvo",
    vendors={"nvidia": ""},  # doc/en/install.md
    layout_defaults={**COMMON, "reduce_dtype": "bfloat16"},
    precisions=frozenset({"bf16", "fp16"}),  # its fp8 was never merged (pull request 369)
    searched_ac=("none", "full"),
    # internlm/core/scheduler/pipeline_scheduler.py (output_objs)
    framework=replace(EARLY_MEGATRON.framework, keeps_stage_outputs=True),
    tp_overlaps=(
        replace(
            DEFERRED,
            source="InternEvo internlm/model/modules/linear.py SPFusedDenseFunc: only "
            "grad_input_hook runs beside compute (async_op=True); output_hook and "
            "grad_output_hook block",
        ),
    ),
    whole_owners=True,
    gradient_dtype="bfloat16",
    drops_residual=False,
    memory_extra_sd=0.05,  # judgement
    source="InternEvo configs/7B_sft.py",
)
