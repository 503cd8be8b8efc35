"""A layout as TorchTitan's dotted settings, and back. `line` is "0.2" or "0.3".

Sources: torchtitan 0.2.2 config/job_config.py,
    distributed/{parallel_dims,pipeline_parallel,activation_checkpoint}.py,
    models/llama3/infra/parallelize.py, components/quantization/{float8,mx}.py; 0.3.0
    config/configs.py, trainer.py.
"""

import math
from collections.abc import Mapping

from planner.export.base import Draft, Settings, train_steps
from planner.schedules import SCHEDULES, schedules_of
from planner.specs.layout import parse_ac
from planner.trainers.registry import TRAINERS
from planner.trainers.titan_models import even_split, module_names, uniform_layers_per_stage
from planner.units import counted

P, T, AC = "parallelism.", "training.", "activation_checkpoint."
RESHARD, SCHEDULE, ROTATE = (
    P + "fsdp_reshard_after_forward",
    P + "pipeline_parallel_schedule",
    P + "context_parallel_rotate_method",
)
MODULES, LAYERS = P + "module_fqns_per_model_part", P + "pipeline_parallel_layers_per_stage"
COMPONENTS, IN_BACKWARD = "compile.components", "optimizer.early_step_in_backward"
HEAD = {"0.2": "output", "0.3": "lm_head"}
# Field of the layout -> its setting, where both lines have it with the same values.
SAME_KEYS: Mapping[str, str] = {
    "dp_replicate": P + "data_parallel_replicate_degree",
    "dp_shard": P + "data_parallel_shard_degree",
    "cp": P + "context_parallel_degree", "tp": P + "tensor_parallel_degree",
    "pp": P + "pipeline_parallel_degree",
    "ep": P + "expert_parallel_degree", "param_dtype": T + "mixed_precision_param",
    "reduce_dtype": T + "mixed_precision_reduce",
    "master_dtype": T + "dtype", "compile": "compile.enable",
    "cpu_offload": T + "enable_cpu_offload",
}  # fmt: skip
ASYNC_TP = {
    "0.2": P + "enable_async_tensor_parallel",
    "0.3": "compile.enable_async_tensor_parallel",
}
CHECKPOINT_MODES = {"sync": "disabled", "async": "async", "async-pinned": "async_with_pinned_mem"}
STEP = T + "steps"


def layout_settings(draft: Draft, line: str) -> Settings:
    """Every field of the layout that this line has a setting for; the others become gaps."""
    layout = draft.layout
    settings: Settings = {key: getattr(layout, name) for name, key in SAME_KEYS.items()}
    settings["compile.components"] = ["model", "loss"]
    settings[ASYNC_TP[line]] = layout.async_tp
    settings[P + "fsdp_reshard_after_forward"] = _reshard(draft)
    settings.update(_pipeline(draft, line))
    settings.update(_batch(draft))
    if line == "0.2":
        settings.update(_only_02(draft))
    else:
        settings.update(_only_03(draft))
    return settings


def _reshard(draft: Draft) -> str:
    layout = draft.layout
    sharded = layout.dp_shard * layout.cp > 1
    if layout.zero_stage == 1 or (layout.zero_stage == 0 and sharded):
        rule = (
            "is not what FSDP2 does where dp_shard x cp > 1: it shards gradients and parameters too"
        )
        remedy = "use zero_stage 2 or 3, or dp_replicate in place of dp_shard"
        draft.gap("zero_stage", layout.zero_stage, rule, remedy, blocking=sharded)
        return "default"
    if layout.zero_stage == 0:
        return "default"
    if layout.zero_stage == 2:
        return "never"
    return "default" if layout.pp == 1 and sharded else "always"


def read_reshard(policy: object, pp: int, sharded: bool) -> int:
    """The zero_stage that a policy stands for.

    sharded: whether parameters are sharded at all (dp_shard x cp > 1).
    """
    if policy == "default":
        return (3 if pp == 1 else 2) if sharded else 0
    return 3 if policy == "always" else 2


def _pipeline(draft: Draft, line: str) -> Settings:
    layout, layers = draft.layout, draft.model.num_hidden_layers
    settings: Settings = {}
    if layout.pp_schedule in schedules_of("torch"):
        settings[P + "pipeline_parallel_schedule"] = layout.pp_schedule
    else:
        rule, remedy = (
            "is a schedule of a Megatron fork",
            "use InterleavedZeroBubble or ZBVZeroBubble",
        )
        draft.gap("pp_schedule", layout.pp_schedule, rule, remedy, blocking=layout.pp > 1)
    if layout.pp == 1:
        return settings
    settings[P + "pipeline_parallel_microbatch_size"] = layout.micro_batch_size
    stages = layout.pp * layout.virtual_stages
    split = draft.layer_split
    if split is not None:
        settings[P + "module_fqns_per_model_part"] = module_names(split, HEAD[line])
    elif layout.layers_per_stage is None and layout.virtual_stages != _default_stages(
        layout.pp_schedule
    ):
        settings.update(_virtual_stages(draft, layers, stages, line))
    return settings


def _default_stages(schedule: str) -> int:
    """Stages per rank where no setting says how many."""
    return 1 if SCHEDULES[schedule].single_stage else 2


def _virtual_stages(draft: Draft, layers: int, stages: int, line: str) -> Settings:
    uniform = uniform_layers_per_stage(layers, stages)
    if uniform is not None:
        return {P + "pipeline_parallel_layers_per_stage": uniform}
    split = even_split(layers, stages)
    if split is None:
        rule = (
            f"makes {counted(stages, 'stage')} of {counted(layers, 'layer')}, the embedding and "
            "the head: some would be empty"
        )
        draft.gap("virtual_stages", draft.layout.virtual_stages, rule, "use fewer stages")
        return {}
    rule = (
        f"is written out: no pipeline_parallel_layers_per_stage makes {counted(stages, 'stage')} "
        f"of {counted(layers, 'layer')}"
    )
    draft.gap("layers_per_stage", None, rule, "nothing to do", blocking=False)
    return {P + "module_fqns_per_model_part": module_names(split, HEAD[line])}


def _batch(draft: Draft) -> Settings:
    layout, training = draft.layout, draft.training
    microbatches = (
        max(1, layout.num_microbatches(training.global_batch_size)) if layout.pp > 1 else 1
    )
    return {
        T + "local_batch_size": layout.micro_batch_size * microbatches,
        T + "global_batch_size": training.global_batch_size,
        T + "seq_len": training.seq_len,
        STEP: train_steps(training),
        T + "max_norm": math.inf if training.max_grad_norm is None else training.max_grad_norm,
    }


def _only_02(draft: Draft) -> Settings:
    layout = draft.layout
    if layout.tp > 1 and not layout.sequence_parallel:
        rule = "cannot be switched off: TorchTitan 0.2 always uses it with TP"
        draft.gap("sequence_parallel", False, rule, "set it to true, or export for 0.3")
    if layout.tp == 1 and layout.sequence_parallel:
        draft.inert("sequence_parallel", "means nothing without tensor parallelism")
    settings: Settings = {
        P + "expert_tensor_parallel_degree": layout.etp,
        P + "disable_loss_parallel": draft.training.vocab_parallel_loss is False,
        "optimizer.early_step_in_backward": layout.optimizer_in_backward,
    }
    if layout.cp_method == "ulysses":
        draft.gap(
            "cp_method",
            "ulysses",
            "is not in TorchTitan",
            "use allgather or alltoall",
            blocking=layout.cp > 1,
        )
    else:
        settings[P + "context_parallel_rotate_method"] = layout.cp_method
    kind, number = parse_ac(layout.ac)
    modes: dict[str, Settings] = {
        "none": {"activation_checkpoint.mode": "none"},
        "full": {"activation_checkpoint.mode": "full"},
        "selective-op": {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        },
        "selective-layer": {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": str(int(number)),
        },
        "memory-budget": {
            "activation_checkpoint.mode": "memory_budget",
            "activation_checkpoint.memory_budget": number,
        },
    }
    if kind not in modes:
        draft.gap("ac", layout.ac, "is Megatron's; TorchTitan has no such mode", "use selective-op")
    return {**settings, **modes.get(kind, modes["none"])}


def _only_03(draft: Draft) -> Settings:
    layout = draft.layout
    if layout.etp != 1:
        rule, remedy = (
            "has no setting in TorchTitan 0.3: experts are never split over TP",
            "use etp 1, or export for 0.2",
        )
        draft.gap("etp", layout.etp, rule, remedy, blocking=layout.ep > 1)
    if layout.cp_method != "allgather":
        rule = "has no setting in TorchTitan 0.3: its context parallelism gathers keys and values"
        draft.gap(
            "cp_method",
            layout.cp_method,
            rule,
            "use allgather, or export for 0.2",
            blocking=layout.cp > 1,
        )
    if layout.optimizer_in_backward:
        draft.gap(
            "optimizer_in_backward",
            True,
            "is gone from TorchTitan 0.3",
            "set it to false, or export for 0.2",
        )
    if draft.training.vocab_parallel_loss is False and layout.tp > 1:
        draft.gap(
            "training.vocab_parallel_loss",
            False,
            "has no setting in TorchTitan 0.3",
            "leave it out",
            blocking=False,
        )
    if parse_ac(layout.ac)[0] in ("selective-layer", "selective-attention"):
        draft.gap(
            "ac",
            layout.ac,
            "has no setting in TorchTitan 0.3",
            "use selective-op, full or memory-budget-X",
        )
    return {
        P + "enable_sequence_parallel": layout.sequence_parallel,
        T + "disable_cuda_graphs": True,
    }


def read_settings(settings: Mapping[str, object], line: str, num_layers: int) -> dict[str, object]:
    """Fields of the layout that these settings give; inverse of `layout_settings`.

    settings: those of a file, completed by `titan_defaults.DEFAULTS`, with dp_shard as a number.
    Precision is read elsewhere.
    """
    values: dict[str, object] = {name: settings[key] for name, key in SAME_KEYS.items()}
    tp, pp, cp, dp_shard = (
        _int(settings[SAME_KEYS[name]]) for name in ("tp", "pp", "cp", "dp_shard")
    )
    components = settings[COMPONENTS]
    values["compile"] = (
        bool(values["compile"]) and isinstance(components, list) and "model" in components
    )
    values["async_tp"] = settings[ASYNC_TP[line]]
    values["zero_stage"] = read_reshard(settings[RESHARD], pp, dp_shard * cp > 1)
    schedule = schedule_name(str(settings[SCHEDULE]))
    values["pp_schedule"] = schedule
    values["micro_batch_size"] = settings[
        (P + "pipeline_parallel_microbatch_size") if pp > 1 else (T + "local_batch_size")
    ]
    values.update(read_stages(settings, pp, schedule, num_layers))
    values.update(_read_ac(settings, line))
    if line == "0.3":
        rest = {"etp": 1, "cp_method": "allgather", "optimizer_in_backward": False}
        return {**values, **rest, "sequence_parallel": settings[P + "enable_sequence_parallel"]}
    return {
        **values,
        "etp": settings[P + "expert_tensor_parallel_degree"],
        "sequence_parallel": tp > 1,
        "cp_method": settings[ROTATE],
        "optimizer_in_backward": settings[IN_BACKWARD],
    }


def schedule_name(text: str) -> str:
    """The schedule's own spelling; TorchTitan takes a name in any case, as torch does."""
    return next((name for name in schedules_of("torch") if name.lower() == text.lower()), text)


def _read_ac(settings: Mapping[str, object], line: str) -> dict[str, object]:
    mode = settings[AC + "mode"]
    if mode == "memory_budget":
        return {"ac": f"memory-budget-{settings[AC + 'memory_budget']}"}
    if mode != "selective":
        return {"ac": mode}
    option = "op" if line == "0.3" else settings[AC + "selective_ac_option"]
    return {"ac": "selective-op" if option == "op" else f"selective-layer-{option}"}


def read_stages(
    settings: Mapping[str, object], pp: int, schedule: str, num_layers: int
) -> dict[str, object]:
    """virtual_stages and layers_per_stage that TorchTitan derives from its settings."""
    if pp == 1:
        return {"virtual_stages": 1, "layers_per_stage": None}
    parts, uniform = settings.get(MODULES), settings.get(LAYERS)
    if isinstance(parts, list):
        split = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
        return {"virtual_stages": max(1, len(parts) // pp), "layers_per_stage": split}
    first, last = (
        _int(settings[P + f"pipeline_parallel_{end}_stage_less_layers"])
        for end in ("first", "last")
    )
    stages = (
        pp * _default_stages(schedule)
        if uniform is None
        else -(-(num_layers + first + last) // _int(uniform))
    )
    own = None if (first, last) == (1, 1) else even_split(num_layers, stages, first, last)
    return {"virtual_stages": max(1, stages // pp), "layers_per_stage": own}


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def training_settings(draft: Draft, line: str) -> Settings:
    """Optimizer and checkpoints; what the job asks for and TorchTitan lacks becomes a gap."""
    training = draft.training
    settings: Settings = {"optimizer.implementation": "fused"}
    if line == "0.2":
        settings["optimizer.name"] = "AdamW"
    if training.optimizer == "adamw-bf16-states" and line == "0.3":
        settings["optimizer.implementation"] = "fused_opt_states_bf16"
    elif training.optimizer != "adamw":
        rule = f"is no setting of TorchTitan {line}"
        remedy = "use adamw, or adamw-bf16-states with an export for 0.3"
        draft.gap("training.optimizer", training.optimizer, rule, remedy)
    plain = training.model_copy(update={"attention_kernel": "flash"})
    brought = TRAINERS["torchtitan"].fused_attention(
        plain, draft.cluster.gpu, mla=draft.model.uses_mla
    )
    if training.attention_kernel not in ("flash", *brought):
        draft.gap(
            "training.attention_kernel",
            training.attention_kernel,
            f"is not how TorchTitan attends, which is {' or '.join(brought)} here",
            "use flash",
        )
    saved = training.checkpoint
    settings["checkpoint.enable"] = saved is not None
    if saved is not None:
        settings["checkpoint.interval"] = saved.interval_steps
        settings["checkpoint.async_mode"] = CHECKPOINT_MODES[saved.mode]
    if training.max_grad_norm is None:
        draft.notes.append(
            "max_norm = inf: nothing is clipped, but TorchTitan still computes the gradient norm."
        )
    off = [name for name in ("dp", "tp", "pp") if not getattr(training.overlap, name)]
    if off:
        draft.gap(
            "training.overlap",
            off,
            "cannot be switched off in TorchTitan",
            "leave overlap out",
            blocking=False,
        )
    return settings
