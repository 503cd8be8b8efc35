"""Plain FSDP2: the model's own code under torch."""

from dataclasses import replace
from functools import lru_cache

from planner.precision import TWO_BYTES, Recipe, torchao
from planner.specs.layout import AC_KINDS
from planner.trainers.attention import SDPA
from planner.trainers.base import COMMON, NEVER, lacks_nothing
from planner.trainers.release import Release
from planner.trainers.torchtitan import TORCHTITAN


def _recipes(release: Release) -> tuple[Recipe, ...]:
    return _of_torch(torchao())


@lru_cache(maxsize=8)
def _of_torch(recipes: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
    """Torchao's recipes without what TorchTitan adds.

    TorchTitan filters out small layers and reduces the scales of all weights in one all-reduce.
    """
    return tuple(
        replace(
            recipe,
            small=(),
            gather_amax=recipe.wire_bytes < TWO_BYTES,
            step_amax=0.0,
            weight_once=False,
            weight_copy_bytes=0.0,
        )
        for recipe in recipes
    )


FSDP = replace(
    TORCHTITAN,
    name="fsdp",
    title="plain FSDP",
    # pytorch.org/get-started: CUDA and ROCm builds; the model's code is the user's own
    vendors={"nvidia": "", "amd": ""},
    history=(),
    default_release="",
    changes=(),
    distributions={},
    chunks_loss=True,
    offered=(None,),
    own_code=True,
    lacks=lacks_nothing,
    optimizers=(),
    attention=SDPA,
    attention_kernels=frozenset({"flash2", "flash3", "cudnn", "unfused"}),
    ac="none",
    layout_defaults={**COMMON, "reduce_dtype": "bfloat16"},
    vocab_parallel_loss=False,
    expandable_segments=False,
    precisions=frozenset(
        {
            "bf16",
            "fp16",
            "float8-tensorwise",
            "float8-rowwise",
            "float8-rowwise-gw-hp",
            "float8-delayed",
            "float8-blockwise",
            "mxfp8",
        }
    ),
    ac_kinds=frozenset(AC_KINDS),
    cp_methods=frozenset({"allgather", "alltoall", "ulysses"}),
    seq_divisor_always=False,
    searched_ac=("none", "selective-op", "full"),
    recipes_in=_recipes,
    repeats_kv_until=NEVER,  # flash-attn and SDPA take grouped heads without copies
    loss_bytes=4.0,
    fused_loss_bytes=4.0,
    loss_leftover_bytes=0.0,
    # judgement: llm-foundry and others share torch's mechanisms, not torchtitan's models
    memory_extra_sd=0.02,
    source="llm-foundry FSDP defaults (mixed_precision PURE: bf16 reduce; loss_fn "
    "fused_crossentropy)",
)
