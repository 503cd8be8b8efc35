"""Plain FSDP: the model's own code under torch, or as llm-foundry (Composer) runs it."""

from dataclasses import replace
from functools import lru_cache

from planner.precision import TWO_BYTES, Recipe, torchao
from planner.specs.layout import AC_KINDS, COMMON
from planner.trainers.attention import SDPA
from planner.trainers.base import NEVER, Change, lacks_nothing
from planner.trainers.release import LLM_FOUNDRY, Release, Releases
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


# flash_attn/losses/cross_entropy.py (inplace_backward): the gradient takes the place of the logits
IN_PLACE = {"loss_bytes": 4.0, "fused_loss_bytes": 4.0, "loss_leftover_bytes": 0.0}

FSDP = replace(
    TORCHTITAN,
    name="fsdp",
    title="plain FSDP",
    # pytorch.org/get-started: CUDA and ROCm builds; the model's code is the user's own
    vendors={"nvidia": "", "amd": ""},
    history=(),
    default_release="",
    changes=(
        # loss_fn: fused_crossentropy
        Change(Releases(distribution=LLM_FOUNDRY), IN_PLACE),
        # judgement: who names flash-attn as a part of the stack takes its loss too
        Change(Releases(library="flash-attn"), IN_PLACE),
    ),
    # mixed_precision: PURE
    distributions={LLM_FOUNDRY: {"reduce_dtype": "bfloat16"}},
    chunks_loss=True,
    offered=(None,),
    own_code=True,
    export_format="accelerate",
    lacks=lacks_nothing,
    optimizers=(),
    attention=SDPA,
    attention_kernels=frozenset({"flash2", "flash3", "cudnn", "unfused"}),
    ac="none",
    layout_defaults=COMMON,
    vocab_parallel_loss=False,
    expandable_segments=False,
    precisions=TORCHTITAN.precisions | {"fp16", "float8-delayed", "float8-blockwise"},
    ac_kinds=frozenset(AC_KINDS) - {"uniform", "modules"},
    cp_methods=frozenset({"allgather", "alltoall", "ulysses"}),
    seq_divisor_always=False,
    # torch's parallelize_module cuts experts over the mesh that cuts the rest, or not at all
    etp_one_or_tp=True,
    searched_ac=("none", "selective-op", "full"),
    # what torch and torchao do to a model as it is: MX formats and all other axes need its code
    searched_precisions=("float8-tensorwise", "float8-rowwise"),
    by_request=frozenset(
        {"tp", "cp", "pp", "ep", "etp", "float8_all_gather", "optimizer_in_backward", "cpu_offload"}
    ),
    turns_recomputation=False,
    compiles_loss=False,
    recipes_in=_recipes,
    repeats_kv_until=NEVER,  # flash-attn and SDPA take grouped heads without copies
    drops_residual=True,  # models of their own, transformers' among them
    # a model's own loss: fp32 logits, their log-softmax and its gradient; nobody compiles it
    fused_loss_bytes=12.0,
    # fully_shard, or an auto-wrap policy, for the layers and then for the model
    ends_in_root=True,
    # judgement: llm-foundry and others share torch's mechanisms, not torchtitan's models
    memory_extra_sd=0.02,
    source="torch/distributed/fsdp/_fully_shard (root: reshard_after_forward=None is False); "
    "transformers loss/loss_utils.py (logits.float()); llm-foundry configs and "
    "composer/distributed/mosaic_fsdp.py",
)
