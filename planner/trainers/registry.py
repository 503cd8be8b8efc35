"""The trainers: what each assumes when a layout leaves a field unset, and what each can run at all.

A default is the trainer's own documented default; `planner-cli catalog defaults` prints this table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.errors import Fault, SpecError
from planner.schedules import SCHEDULES, Runtime, schedules_of
from planner.specs.layout import AC_KINDS, Layout, check_layout_values
from planner.trainers.release import named

LAST_TORCH_1 = 13
NEVER = ("0", "")  # no release, no month


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRules:
    """One trainer. Sets hold the values of a layout's field that it can run.

    fsdp_style: parameters live sharded in `master_dtype` and are gathered in `param_dtype` for
        compute (FSDP2); otherwise a full copy in `param_dtype` stays on every rank and only
        optimizer (1), gradients (2) are sharded.
    runtime: whose pipeline runtime it uses.
    whole_owners: where the optimizer's state is sharded, a rank owns whole parameters: gradients
        are reduced to one owner after the other, and parameters broadcast by one after the other
        before the next step begins; otherwise every tensor is split.
    ep_over_replicas: expert parallelism may span dp_replicate (Megatron), not only the sharding
        ranks (TorchTitan).
    fused_kernels: norms, activations and rotary run as fused kernels without torch.compile
        (Transformer Engine, flash-attn).
    early_stop: recomputation is torch's non-reentrant checkpoint, which stops early; Megatron's own
        runs the whole layer again.
    repeats_kv_until: last release and month in which keys and values were copied to all query heads
        (repeat_kv) before attention.
    composite_norm_until: last release and month of the trainer that ran on a torch whose RMSNorm is
        a chain of kernels (before 2.8); before the month composite_norm_since its configurations
        named a fused kernel.
    expert_alignment: rows added to each expert's tokens so that the grouped matmul is aligned
        (TOKEN_GROUP_ALIGN_SIZE_M).
    gradient_dtype: dtype in which gradients stay between microbatches.  fused_sums: the product
        that makes a weight's gradient adds it to them; otherwise a kernel of its own does.
    loss_bytes, fused_loss_bytes: bytes a logit needs at the peak of the loss, eager and with fused
        kernels. Eager: fp32 log-softmax, its incoming and its outgoing gradient (aten::log_softmax,
        nll_loss backward); flash-attn's loss works in place.
    sharded_loss_bytes: the same where TP shards the vocabulary under FSDP: DTensor's loss_parallel
        runs eagerly even under torch.compile, and its backward holds log-softmax, one gradient, the
        exponential and their sum (distributed/tensor/parallel/loss.py).
    eager_loss_until: last month in which torch.compile left the loss alone.  loss_leftover_bytes:
        bytes a logit of what the loss reads and frees before its backward asks for more than that
        at once, so that it stays cached; a pipeline holds it until then.
    placeholders_since: first month in which Transformer Engine's products, which add to the fp32
        gradient, return an empty 16-bit one, kept for every shape of weight (get_dummy_wgrad in
        pytorch/module/base.py); "" where nothing does.
    gradients_apart: gradients come in the compute dtype for the whole stage and are then added to
        those in fp32, so that both are there (DeepSpeed's BF16_Optimizer); otherwise a product adds
        to the fp32 gradient itself.
    vocab_parallel_loss, expandable_segments: default of the training field of that name.
    """

    name: str
    zero_stage: int
    zero_stage_under_pp: int
    ac: str
    layout_defaults: Mapping[str, object]
    zero_stages: frozenset[int]
    runtime: Runtime
    precisions: frozenset[str]
    ac_kinds: frozenset[str]
    cp_methods: frozenset[str]
    fsdp_style: bool
    whole_owners: bool
    ep_over_replicas: bool
    fused_kernels: bool
    early_stop: bool
    repeats_kv_until: tuple[str, str]
    composite_norm_until: tuple[str, str]
    composite_norm_since: str
    expert_alignment: int
    gradient_dtype: str
    fused_sums: bool
    loss_bytes: float
    fused_loss_bytes: float
    sharded_loss_bytes: float
    eager_loss_until: str
    loss_leftover_bytes: float
    placeholders_since: str
    gradients_apart: bool
    vocab_parallel_loss: bool
    expandable_segments: bool
    source: str

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules it can run, in the order in which a search tries them."""
        return schedules_of(self.runtime)


_COMMON: Mapping[str, object] = {
    "etp": 1,
    "sequence_parallel": True,
    "async_tp": False,
    "cp_method": "allgather",
    "pp_schedule": "1F1B",
    "virtual_stages": 1,
    "layers_per_stage": None,
    "micro_batch_size": 1,
    "precision": "bf16",
    "float8_all_gather": False,
    "param_dtype": "bfloat16",
    "reduce_dtype": "float32",
    "master_dtype": "float32",
    "compile": False,
    "optimizer_in_backward": False,
    "cpu_offload": False,
}

_TORCHTITAN = TrainerRules(
    name="torchtitan",
    zero_stage=3,
    zero_stage_under_pp=2,
    ac="selective-op",
    layout_defaults=_COMMON,
    zero_stages=frozenset({0, 2, 3}),
    runtime="torch",
    precisions=frozenset({"bf16", "float8-tensorwise", "float8-rowwise", "mxfp8"}),
    ac_kinds=frozenset(AC_KINDS) - {"selective-attention"},
    cp_methods=frozenset({"allgather", "alltoall"}),
    fsdp_style=True,
    whole_owners=False,
    ep_over_replicas=False,
    fused_kernels=False,
    early_stop=True,
    # 0.2.2 of February 2026 passes enable_gqa (models/llama3/model/model.py)
    repeats_kv_until=("0.2.1", "2025-12"),
    # 0.1.0 of June 2025 asks for torch nightlies of that month
    composite_norm_until=("0.1.0", "2025-06"),
    # norm_type fused_rmsnorm, a Triton kernel, since pull request 181; the month is a judgement
    composite_norm_since="2024-09",
    expert_alignment=8,
    gradient_dtype="float32",
    fused_sums=False,
    loss_bytes=12.0,
    fused_loss_bytes=8.0,
    sharded_loss_bytes=16.0,
    # train.py until then: "compiling loss function causes CUDA errors, turning off for now"
    eager_loss_until="2025-02",
    loss_leftover_bytes=2.0,
    placeholders_since="",
    gradients_apart=False,
    vocab_parallel_loss=True,
    expandable_segments=True,
    source="torchtitan 0.2.2 torchtitan/config/job_config.py and "
    "torchtitan/distributed/parallel_dims.py",
)

_FSDP = replace(
    _TORCHTITAN,
    name="fsdp",
    ac="none",
    layout_defaults={**_COMMON, "reduce_dtype": "bfloat16"},
    precisions=frozenset(
        {
            "bf16",
            "fp16",
            "float8-tensorwise",
            "float8-rowwise",
            "float8-delayed",
            "float8-blockwise",
            "mxfp8",
        }
    ),
    ac_kinds=frozenset(AC_KINDS),
    cp_methods=frozenset({"allgather", "alltoall", "ulysses"}),
    repeats_kv_until=NEVER,  # flash-attn and SDPA read grouped heads as they are
    loss_bytes=4.0,
    fused_loss_bytes=4.0,
    loss_leftover_bytes=0.0,
    vocab_parallel_loss=False,
    expandable_segments=False,
    source="llm-foundry FSDP defaults (mixed_precision PURE: bf16 reduce; loss_fn "
    "fused_crossentropy)",
)

_MEGATRON = TrainerRules(
    name="megatron",
    zero_stage=1,
    zero_stage_under_pp=1,
    ac="none",
    layout_defaults=_COMMON,
    zero_stages=frozenset({0, 1, 2, 3}),
    runtime="megatron",
    precisions=frozenset(
        {
            "bf16",
            "fp16",
            "float8-tensorwise",
            "float8-delayed",
            "float8-blockwise",
            "mxfp8",
            "nvfp4",
        }
    ),
    ac_kinds=frozenset({"none", "full", "selective-attention", "selective-layer"}),
    cp_methods=frozenset({"allgather", "alltoall", "ulysses"}),
    fsdp_style=False,
    whole_owners=False,
    ep_over_replicas=True,
    fused_kernels=True,
    early_stop=False,
    repeats_kv_until=NEVER,
    composite_norm_until=NEVER,
    composite_norm_since="",
    expert_alignment=0,
    gradient_dtype="float32",
    fused_sums=True,  # --no-gradient-accumulation-fusion is off by default
    # 16-bit logits or their gradient, and the softmax in place of their fp32 copy
    # (tensor_parallel/cross_entropy.py)
    loss_bytes=6.0,
    fused_loss_bytes=6.0,
    sharded_loss_bytes=6.0,
    eager_loss_until="",
    loss_leftover_bytes=0.0,
    placeholders_since="2023-12",
    gradients_apart=False,
    vocab_parallel_loss=True,
    expandable_segments=False,
    source="Megatron-LM core 0.14 megatron/training/arguments.py",
)

_MEGATRON_DEEPSPEED = replace(
    _MEGATRON,
    name="megatron-deepspeed",
    ac="full",
    layout_defaults={**_COMMON, "sequence_parallel": False},
    precisions=frozenset({"bf16", "fp16", "float8-delayed"}),
    ep_over_replicas=False,
    placeholders_since="",
    # deepspeed/runtime/bf16_optimizer.py (update_hp_grads), pipe/engine.py (_exec_backward_pass)
    gradients_apart=True,
    fused_sums=False,
    source="Megatron-DeepSpeed arguments (Transformer Engine of that time), BLOOM "
    "training chronicles",
)

_INTERNEVO = replace(
    _MEGATRON,
    name="internevo",
    precisions=frozenset({"bf16", "fp16"}),
    layout_defaults={**_COMMON, "reduce_dtype": "bfloat16"},
    whole_owners=True,
    gradient_dtype="bfloat16",
    fused_sums=False,
    placeholders_since="",
    source="InternEvo configs/7B_sft.py; its fp8 was never merged (pull request 369)",
)

TRAINERS: Mapping[str, TrainerRules] = {
    rules.name: rules for rules in (_TORCHTITAN, _MEGATRON, _MEGATRON_DEEPSPEED, _FSDP, _INTERNEVO)
}

# Distributions of a trainer that ship other defaults (`planner.trainers.release`).
VERSION_DEFAULTS: Mapping[tuple[str, str], Mapping[str, object]] = {
    # NeMo performance recipes: grad_reduce_in_fp32=False, grad_sync_dtype bf16
    ("megatron", "NeMo"): {"reduce_dtype": "bfloat16"}
}


def check_torch_release(version: str) -> None:
    """Raises ValueError "rule; remedy" unless the text starts with a release of torch, such as
    2.11.0 or 2.11.0a0+nv26.01.
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version.strip())
    if (
        numbers is None
        or int(numbers[1]) not in (1, 2)
        or (int(numbers[1]) == 1 and int(numbers[2]) > LAST_TORCH_1)
    ):
        raise ValueError(
            f"is no release of torch; use 1.0 to 1.{LAST_TORCH_1} or 2.x, for example 2.11.0"
        )


def version_defaults(trainer: str, trainer_version: str | None) -> Mapping[str, object]:
    """Layout defaults that a distribution of the trainer changes; empty for the trainer itself."""
    return VERSION_DEFAULTS.get((trainer, named(trainer_version).distribution), {})


def resolve_layout(
    values: object,
    *,
    trainer: str,
    num_gpus: int,
    trainer_version: str | None = None,
    field: str = "layout",
) -> Layout:
    """A fully set layout from what a person typed, filled from the trainer's defaults.

    Unset degrees are 1, unset `dp_shard` is what is left of num_gpus. A product that differs from
    num_gpus is not an
    error here: it is a violation, so that an estimate can answer it. Raises SpecError for malformed
        values.
    """
    given = check_layout_values(values, field)
    rules = TRAINERS[trainer]
    layout: dict[str, object] = {
        **rules.layout_defaults,
        **version_defaults(trainer, trainer_version),
    }
    layout.update(dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1))
    layout.update(given)
    held = 1
    for axis in ("dp_replicate", "cp", "tp", "pp"):
        held *= _integer(layout[axis])
    layout.setdefault("dp_shard", max(1, num_gpus // held))
    sharding_ranks = _integer(layout["dp_shard"]) * _integer(layout["cp"])
    stage = rules.zero_stage_under_pp if _integer(layout["pp"]) > 1 else rules.zero_stage
    layout.setdefault("zero_stage", 0 if rules.fsdp_style and sharding_ranks == 1 else stage)
    layout.setdefault("ac", rules.ac)
    if "sequence_parallel" not in given and layout["tp"] == 1:
        layout["sequence_parallel"] = False
    if (
        "virtual_stages" not in given
        and _integer(layout["pp"]) > 1
        and not SCHEDULES[str(layout["pp_schedule"])].single_stage
    ):
        layout["virtual_stages"] = 2
    return Layout.model_validate(layout)


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise SpecError(Fault("layout", value, "must be an integer", "give a whole number"))
    return value
