"""A layout as TorchTitan's dotted settings. `line` is "0.2" or "0.3"; `titan_read` is the way back.

Sources: torchtitan 0.2.2 config/job_config.py,
    distributed/{parallel_dims,pipeline_parallel,activation_checkpoint}.py,
    models/llama3/infra/parallelize.py, components/quantization/{float8,mx}.py; 0.3.0
    config/configs.py, trainer.py.
"""

import math
from collections.abc import Mapping

from planner.columns import LayoutBatch
from planner.export.base import Draft, Settings, train_steps
from planner.rules.base import Context
from planner.rules.cuda_graphs import CUDA_GRAPH_RULES, FULL, captured
from planner.schedules import SCHEDULES, schedules_of
from planner.specs.layout import parse_ac
from planner.trainers.titan_models import (
    even_split,
    find_flavor,
    module_names,
    uniform_layers_per_stage,
)
from planner.trainers.titan_settings import AC, P, T
from planner.units import counted

RESHARD, SCHEDULE = P + "fsdp_reshard_after_forward", P + "pipeline_parallel_schedule"
ROTATE = P + "context_parallel_rotate_method"
MODULES, LAYERS = P + "module_fqns_per_model_part", P + "pipeline_parallel_layers_per_stage"
DISPATCHER, GRAPHS_OFF = P + "expert_parallel_comm_backend", T + "disable_cuda_graphs"
COMPONENTS, IN_BACKWARD = "compile.components", "optimizer.early_step_in_backward"
MICRO, ETP = P + "pipeline_parallel_microbatch_size", P + "expert_tensor_parallel_degree"
HEAD = {"0.2": "output", "0.3": "lm_head"}
# Field of the layout -> its setting, where both lines have it with the same values.
SAME_KEYS: Mapping[str, str] = {
    "dp_replicate": P + "data_parallel_replicate_degree",
    "dp_shard": P + "data_parallel_shard_degree", "cp": P + "context_parallel_degree",
    "tp": P + "tensor_parallel_degree", "pp": P + "pipeline_parallel_degree",
    "ep": P + "expert_parallel_degree", "param_dtype": T + "mixed_precision_param",
    "reduce_dtype": T + "mixed_precision_reduce", "master_dtype": T + "dtype",
    "compile": "compile.enable", "cpu_offload": T + "enable_cpu_offload",
}  # fmt: skip
ASYNC_TP = {
    "0.2": P + "enable_async_tensor_parallel",
    "0.3": "compile.enable_async_tensor_parallel",
}
# Dispatcher of routed tokens -> TorchTitan's name of it.
DISPATCHERS = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
CHECKPOINT_MODES = {"sync": "disabled", "async": "async", "async-pinned": "async_with_pinned_mem"}
STEP = T + "steps"
AC_COMMAND, BUDGET = "activation-checkpoint:", "--activation-checkpoint.memory-budget"
# Kind of recomputation -> TorchTitan's mode; 0.3 has no setting for every n-th layer.
AC_MODES = {
    "none": "none", "full": "full", "selective-op": "selective", "selective-layer": "selective",
    "memory-budget": "memory_budget",
}  # fmt: skip


def layout_settings(draft: Draft, line: str) -> Settings:
    """Every field of the layout that this line has a setting for; the others become gaps."""
    layout = draft.layout
    settings: Settings = {key: getattr(layout, name) for name, key in SAME_KEYS.items()}
    if layout.optimizer_offload_fraction != 1.0:
        rule = "is Megatron-LM's; TorchTitan moves all shards to the host or none"
        draft.gap("optimizer_offload_fraction", rule, "use 1", blocking=layout.cpu_offload)
    return {
        **settings,
        **_compiled(layout.compile, draft.training.fused_cross_entropy),
        ASYNC_TP[line]: layout.async_tp,
        RESHARD: _reshard(draft),
        **_pipeline(draft, line),
        **_batch(draft),
        **(_only_02(draft) if line == "0.2" else _only_03(draft)),
    }


def _reshard(draft: Draft) -> str:
    layout = draft.layout
    sharded = layout.dp_shard * layout.cp > 1
    if layout.zero_stage == 1 or (layout.zero_stage == 0 and sharded):
        rule = (
            "is not what FSDP2 does where dp_shard x cp > 1: it shards gradients and parameters too"
        )
        remedy = "use zero_stage 2 or 3, or dp_replicate in place of dp_shard"
        draft.gap("zero_stage", rule, remedy, blocking=sharded)
        return "default"
    if layout.zero_stage == 0:
        return "default"
    if layout.zero_stage == 2:
        return "never"
    return "default" if layout.pp == 1 and sharded else "always"


def _pipeline(draft: Draft, line: str) -> Settings:
    layout, layers = draft.layout, draft.model.num_hidden_layers
    settings: Settings = {}
    if layout.pp_schedule in schedules_of("torch"):
        settings[SCHEDULE] = layout.pp_schedule
    else:
        remedy, blocking = "use InterleavedZeroBubble or ZBVZeroBubble", layout.pp > 1
        draft.gap("pp_schedule", "is a schedule of a Megatron fork", remedy, blocking=blocking)
    if layout.pp == 1:
        return settings
    settings[MICRO] = layout.micro_batch_size
    stages = layout.pp * layout.virtual_stages
    split = draft.layer_split
    if split is not None:
        settings[MODULES] = module_names(split, HEAD[line])
    elif layout.layers_per_stage is None and layout.virtual_stages != default_stages(
        layout.pp_schedule
    ):
        settings.update(_virtual_stages(draft, layers, stages, line))
    return settings


def default_stages(schedule: str) -> int:
    """Stages per rank where no setting says how many."""
    return 1 if SCHEDULES[schedule].single_stage else 2


def _virtual_stages(draft: Draft, layers: int, stages: int, line: str) -> Settings:
    uniform = uniform_layers_per_stage(layers, stages)
    if uniform is not None:
        return {LAYERS: uniform}
    split = even_split(layers, stages)
    if split is None:  # some would be empty
        return {}
    rule = (
        f"is written out: no pipeline_parallel_layers_per_stage makes {counted(stages, 'stage')} "
        f"of {counted(layers, 'layer')}"
    )
    draft.inert("layers_per_stage", rule)
    return {MODULES: module_names(split, HEAD[line])}


def _batch(draft: Draft) -> Settings:
    layout, training = draft.layout, draft.training
    return {
        T + "local_batch_size": layout.micro_batch_size * (draft.passes if layout.pp > 1 else 1),
        T + "global_batch_size": training.global_batch_size,
        T + "seq_len": training.seq_len,
        STEP: train_steps(training),
        T + "max_norm": math.inf if training.max_grad_norm is None else training.max_grad_norm,
    }


def _dispatcher(draft: Draft) -> str:
    """TorchTitan's name of the layout's dispatcher; "standard" where it sends nothing."""
    value, usual = draft.layout.moe_dispatcher, DISPATCHERS["alltoall"]
    if value != "alltoall" and (draft.layout.ep == 1 or not draft.model.is_moe):
        draft.inert("moe_dispatcher", "means nothing without expert parallelism")
        return usual
    return DISPATCHERS.get(value, usual)


def _only_02(draft: Draft) -> Settings:
    layout = draft.layout
    if layout.tp == 1 and layout.sequence_parallel:
        draft.inert("sequence_parallel", "means nothing without tensor parallelism")
    backend = _dispatcher(draft)
    settings: Settings = {
        **({DISPATCHER: backend} if draft.version != "0.2.0" else {}),
        ETP: layout.etp,
        P + "disable_loss_parallel": draft.training.vocab_parallel_loss is False,
        IN_BACKWARD: layout.optimizer_in_backward,
    }
    if layout.cp_method == "ulysses":
        remedy = "use allgather or alltoall"
        draft.gap("cp_method", "is not in TorchTitan", remedy, blocking=layout.cp > 1)
    else:
        settings[ROTATE] = layout.cp_method
    kind, number = parse_ac(layout.ac)
    settings[AC + "mode"] = mode = AC_MODES.get(kind, "none")
    if mode == "selective":
        layers = "op" if kind == "selective-op" else str(int(number))
        settings[AC + "selective_ac_option"] = layers
    if mode == "memory_budget":
        settings[AC + "memory_budget"] = number
    return settings


def _compiled(model: bool, loss: bool | None) -> Settings:
    """Settings of torch.compile; `loss` of `training.fused_cross_entropy`."""
    loss = model if loss is None else loss
    parts = [name for name, one in (("model", model), ("loss", loss)) if one]
    return {SAME_KEYS["compile"]: model or loss, COMPONENTS: parts or ["model", "loss"]}


def _only_03(draft: Draft) -> Settings:
    layout = draft.layout
    if layout.etp != 1:
        rule = "has no setting in TorchTitan 0.3: experts are never split over TP"
        draft.gap("etp", rule, "use etp 1, or export for 0.2", blocking=layout.ep > 1)
    if layout.cp_method != "allgather":
        rule = "has no setting in TorchTitan 0.3: its context parallelism gathers keys and values"
        draft.gap("cp_method", rule, "use allgather, or export for 0.2", blocking=layout.cp > 1)
    if draft.training.vocab_parallel_loss is False and layout.tp > 1:
        rule = "has no setting in TorchTitan 0.3"
        draft.gap("training.vocab_parallel_loss", rule, "leave it out", blocking=False)
    if draft.training.cuda_graphs == "full":
        _check_graphs(draft)
    return {
        P + "enable_sequence_parallel": layout.sequence_parallel,
        GRAPHS_OFF: not captures_03(draft),
    }


def captures_03(draft: Draft) -> bool:
    """Whether 0.3 captures forward and backward in a CUDA graph: where it can, if the job lets it.

    HybridEP is captured where the job asks for that: it then needs buffers for the worst case.
    """
    layout, training = draft.layout, draft.training
    sends = draft.model.is_moe and layout.ep > 1
    if (sends and training.cuda_graphs is None) or training.attention_kernel == "flash3":
        return False
    shipped = find_flavor(draft.model, "0.3")
    sized = shipped is not None and shipped.module == "deepseek_v3"
    can = captured(LayoutBatch.from_layouts([layout]), _as_written(draft))[0] == FULL
    return bool(can) and (sized or not sends)


def _as_written(draft: Draft) -> Context:
    """The job under the release that is written."""
    training = draft.training.model_copy(
        update={"trainer": "torchtitan", "trainer_version": draft.version}
    )
    return Context(model=draft.model, cluster=draft.cluster, training=training)


def _check_graphs(draft: Draft) -> None:
    """Gaps where the job asks for a graph of the whole step that the release does not capture."""
    field, remedy = "training.cuda_graphs", "leave cuda_graphs out"
    context, batch = _as_written(draft), LayoutBatch.from_layouts([draft.layout])
    for one in CUDA_GRAPH_RULES:
        if one.applies(context) and one.broken(batch, context).any():
            words, _ = one.words(draft.layout, context)
            draft.gap(field, f"is refused: {words}", remedy)
    if not captures_03(draft) and captured(batch, context)[0] == FULL:
        rule = "is not possible with varlen attention, or with this model's dispatcher"
        draft.gap(field, rule, remedy)


def backends_03(draft: Draft) -> dict[str, object]:
    """Arguments of 0.3's `model_registry` for how experts communicate and attention computes.

    HybridEP waits for the host unless its buffers are given a size; 1.0 is the worst case, in which
    no token is dropped (models/common/token_dispatcher.py).
    """
    arguments: dict[str, object] = {}
    backend = _dispatcher(draft)
    if backend != DISPATCHERS["alltoall"]:
        arguments["moe_comm_backend"] = backend
    if backend == "hybridep" and captures_03(draft):
        arguments["non_blocking_capacity_factor"] = 1.0
    if draft.training.attention_kernel == "flash3":
        arguments["attn_backend"] = "varlen"
    return arguments


def training_settings(draft: Draft, line: str) -> Settings:
    """Optimizer and checkpoints."""
    training = draft.training
    settings: Settings = {"optimizer.implementation": "fused"}
    if line == "0.2":
        settings["optimizer.name"] = "AdamW"
    if training.optimizer == "adamw-bf16-states" and line == "0.3":
        settings["optimizer.implementation"] = "fused_opt_states_bf16"
    if training.attention_kernel == "flash3" and draft.layout.cp > 1:
        rule = "is TorchTitan 0.3's varlen attention, which excludes context parallelism"
        draft.gap("training.attention_kernel", rule, "use flash, or cp 1")
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
        rule, remedy = "cannot be switched off in TorchTitan", "leave overlap out"
        draft.gap("training.overlap", rule, remedy, blocking=False, shown=off)
    return settings


def ac_subcommand(ac: str) -> tuple[str, ...]:
    """TorchTitan 0.3's subcommand for a layout's `ac`.

    A mode that 0.3 does not have becomes `none`.
    """
    kind, number = parse_ac(ac)
    mode = "none" if kind == "selective-layer" else AC_MODES.get(kind, "none")
    return mode_words(mode, f"{number:g}")


def mode_words(mode: str, budget: object) -> tuple[str, ...]:
    """The subcommand of 0.3 for one of AC_MODES; budget: of the memory-budget mode."""
    words = (f"{AC_COMMAND}{mode.replace('_', '-')}",)
    return (*words, BUDGET, str(budget)) if mode == "memory_budget" else words
