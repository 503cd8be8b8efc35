"""Megatron-LM: arguments of its programs, the scripts that start them, and the way back.

Sources: Megatron-LM core 0.14 to 0.18 megatron/training/arguments.py;
    megatron/core/transformer/transformer_config.py (fp8, recompute, cp_comm_type),
    pipeline_parallel_layer_layout.py ("Ett|ttL"),
    distributed/distributed_data_parallel_config.py; the zero-bubble fork
    sail-sg/zero-bubble-pipeline-parallelism, README.
"""

from collections.abc import Mapping

from planner.cost.layer.trainer_kernels import fuses_cross_entropy
from planner.cost.pipeline.stages import stage_layers
from planner.export.base import Draft, Export, Settings, overlay_gaps, train_steps
from planner.export.commands import Launch, allocator, written_flags
from planner.export.megatron_graphs import environment, graph_settings
from planner.export.megatron_mixers import pattern
from planner.export.megatron_model import dispatcher_settings, model_settings
from planner.export.megatron_read import (
    FP4_RECIPES,
    FP8_RECIPES,
    SHARDING,
    exported_words,
    read_arguments,
)
from planner.export.megatron_settings import DEGREES
from planner.precision import PRECISIONS
from planner.schedules.depth_first import microbatches_per_round
from planner.specs.layout import Layout, modules_of, parse_ac
from planner.trainers.megatron import CP_TYPES
from planner.trainers.megatron_models import is_hybrid
from planner.trainers.muon import Muon
from planner.trainers.registry import TRAINERS, release_of, version_under
from planner.trainers.release import Release
from planner.units import counted

OLDEST = "0.14"  # whose arguments we write for it and for older ones
ROOT = "MEGATRON_PATH"
YOURS = (
    "Data, tokenizer and learning rate are not part of a layout: --mock-data and NullTokenizer "
    "stand for your own."
)
FORKS = {"amd": "ROCm/Megatron-LM"}
NEWER = "0.15"  # megatron/core/fp4_utils.py; --cpu-offloading-num-layers
ZERO_BUBBLE_PENDING = {"ZB-1p": 1, "ZB-2p": 2}
# What counts as a layer besides the layers themselves: nothing, the loss, or embedding and loss.
# Source: transformer_config.py, get_num_layers_to_build.
ENDS_COUNTED = (
    (), ("account_for_loss_in_pipeline_split",),
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)  # fmt: skip
# megatron/core/transformer/enums.py AttnBackend. `auto` leaves the choice to Transformer Engine,
# which the kernel that the release brings stands for; `flash` switches cuDNN off.
ATTENTION_BACKENDS = {
    "flash": "auto", "flash2": "flash", "flash3": "flash", "cudnn": "fused", "unfused": "unfused",
}  # fmt: skip
MUON = "muon", "dist_muon"
OPTIMIZERS: Mapping[str, Settings] = {
    "adamw": {"optimizer": "adam"},
    "sgd": {"optimizer": "sgd"},
    "adamw-bf16-states": {
        "optimizer": "adam", "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    },
}  # fmt: skip


def write(draft: Draft) -> Export:
    """The layout as arguments of Megatron-LM's pretrain_gpt.py, or pretrain_hybrid.py.

    The arguments are those of the release, from core 0.14 on. A note says so where a job names an
    older one, a date or a distribution.
    """
    vendor = draft.cluster.gpu.vendor
    release = release_of("megatron", draft.asked or version_under(draft.training, "megatron"))
    draft.version = OLDEST if release.before(OLDEST) else release.number
    if release.number != draft.version or not release.exact:
        draft.notes.append(
            f"Written for Megatron-LM core {draft.version}: check the arguments against your "
            f"{release.named.text}."
        )
    fork = FORKS.get(vendor)
    if fork is not None:
        draft.notes.append(
            f"On GPUs of {vendor} run it in the fork {fork}, with its Transformer Engine."
        )
    draft.check_common()
    draft.notes.append(YOURS)
    settings: Settings = {
        **_degrees(draft),
        **_pipeline(draft),
        **_sharding(draft),
        **_recompute(draft),
        **_training(draft),
        **_precision(draft, release),
        **_rest(draft, release),
        **model_settings(draft, release),
        **dispatcher_settings(draft, release),
        **graph_settings(draft, release),
    }
    # Megatron-FSDP refuses 1; everything else needs it
    own_fsdp = draft.layout.zero_stage in SHARDING
    connections = {} if own_fsdp else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    program = "pretrain_hybrid.py" if is_hybrid(draft.model) else "pretrain_gpt.py"
    launch = Launch(
        draft,
        (program,),
        written_flags(settings),
        environment={**connections, **allocator(draft), **environment(draft)},
        root_variable=ROOT,
    )
    draft.files.update(launch.files())
    draft.notes.append(
        f"Set {ROOT} to the root of Megatron-LM, where {program} is, or run launch.sh there."
    )
    return draft.finished("megatron", launch.command(), launch.arguments)


def _degrees(draft: Draft) -> Settings:
    layout = draft.layout
    overlapped = layout.async_tp and not draft.model.uses_mla
    if overlapped:
        draft.notes.append(
            "--tp-comm-overlap needs --sequence-parallel and Transformer Engine built with user "
            "buffers."
        )
    return {
        **{argument: getattr(layout, name) for name, argument in DEGREES.items()},
        "cp_comm_type": CP_TYPES[layout.cp_method],
        "sequence_parallel": layout.sequence_parallel,
        "tp_comm_overlap": overlapped,
    }


def _pipeline(draft: Draft) -> Settings:
    layout, layers = draft.layout, draft.model.num_hidden_layers
    settings, stages = _schedule(draft), layout.pp * layout.virtual_stages
    split = draft.layer_split if layout.pp > 1 else None
    even = stage_layers(layers, stages, counts_ends=False)
    if is_hybrid(draft.model):
        return {**settings, "hybrid_layer_pattern": pattern(draft.model, split or even)}
    if layout.pp == 1:
        return settings
    ends = ends_counted(layers, stages) if layout.layers_per_stage is None else 0
    if split is None and draft.model.num_hash_layers:
        split = even
    elif split is None and ends is None:
        split = even
        rule = (
            f"is written out: {stages} stages do not divide {layers} layers, nor with embedding "
            "and loss counted"
        )
        draft.inert("layers_per_stage", rule)
    if split is not None:
        text = pipeline_layout(split, draft.model.mtp_num_layers)
        return {**settings, "pipeline_model_parallel_layout": text}
    if layout.virtual_stages > 1:
        settings["num_virtual_stages_per_pipeline_rank"] = layout.virtual_stages
    if ends:
        counted_as = (
            "the loss counts as a layer" if ends == 1 else "embedding and loss count as layers"
        )
        draft.inert("layers_per_stage", f"divides over {stages} stages where {counted_as}")
    return {**settings, **dict.fromkeys(ENDS_COUNTED[ends or 0], True)}


def ends_counted(layers: int, stages: int) -> int | None:
    """How many of embedding and loss must count as layers for the stages to divide the layers.

    None where they never divide.
    """
    return next((ends for ends in range(len(ENDS_COUNTED)) if (layers + ends) % stages == 0), None)


def _schedule(draft: Draft) -> Settings:
    """Settings of the schedule besides the number of stages."""
    layout = draft.layout
    interleaved = layout.pp > 1 and layout.virtual_stages > 1
    implied = "Interleaved1F1B" if interleaved else "1F1B"
    if layout.pp > 1 and layout.pp_schedule in ZERO_BUBBLE_PENDING:
        draft.notes.append(
            "--enable-zero-bubble is an argument of the fork "
            "sail-sg/zero-bubble-pipeline-parallelism, not of Megatron-LM."
        )
        pending = ZERO_BUBBLE_PENDING[layout.pp_schedule] * layout.pp
        return {"enable_zero_bubble": True, "zero_bubble_max_pending_backward": pending}
    if layout.pp_schedule != implied:
        rule = (
            f"is not in Megatron-LM, which runs {implied} with "
            f"{counted(layout.virtual_stages, 'stage')} a rank"
        )
        draft.gap("pp_schedule", rule, f"use {implied}", blocking=layout.pp > 1)
    return _rounds(layout, draft.training.global_batch_size) if interleaved else {}


def _rounds(layout: Layout, global_batch_size: int) -> Settings:
    """The size of a round of the interleaved schedule, where it is not Megatron's own, pp.

    Megatron refuses rounds of which the last holds fewer than pp microbatches
    (pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving).
    """
    count = layout.num_microbatches(global_batch_size)
    size = int(microbatches_per_round(layout.pp, count))
    own = size == layout.pp or count < layout.pp
    return {} if own else {"microbatch_group_size_per_virtual_pipeline_stage": size}


def pipeline_layout(split: tuple[int, ...], predicting: int = 0) -> str:
    """Megatron's layout string, such as "Et*2|t*3|t*2L".

    E is the embedding, t*n are n layers, m is one that predicts more tokens, L is the loss; stages
    are in the order of the layers.
    """
    stages = [f"t*{count}" if count else "" for count in split]
    return "|".join(["E" + stages[0], *stages[1:]]) + "m" * predicting + "L"


def _sharding(draft: Draft) -> Settings:
    layout, overlap = draft.layout, draft.training.overlap.dp
    muon = _muon(draft) if draft.training.optimizer == "muon" else None
    if muon is not None and not (muon.hides_sharded if layout.zero_stage else muon.hides_whole):
        overlap = False
    settings: Settings = {"overlap_grad_reduce": overlap}
    if layout.zero_stage == 0:
        if layout.dp_replicate > 1:
            group = f"is one data-parallel group of {layout.dp_degree}"
            draft.inert("dp_replicate", f"with dp_shard {layout.dp_shard} {group}")
            draft.inert("dp_shard", f"with dp_shard {layout.dp_shard} {group}")
        one = layout.dp_degree * layout.cp == 1
        if one and (layout.cpu_offload or draft.training.optimizer == "adamw-bf16-states"):
            settings["use_distributed_optimizer"] = True  # which both ask for
        return settings
    if muon is not None and muon.named_sharded:
        return {**settings, "overlap_param_gather": overlap}
    settings |= {
        "use_distributed_optimizer": True,
        "overlap_param_gather": overlap,
        "num_distributed_optimizer_instances": layout.dp_replicate,
    }
    if layout.zero_stage in SHARDING:
        settings |= {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": SHARDING[layout.zero_stage],
            "no_gradient_accumulation_fusion": True,
            "ckpt_format": "fsdp_dtensor",
        }
        draft.notes.append(
            "--use-megatron-fsdp is young: check that your release combines it with TP, PP and EP "
            "as here."
        )
    return settings


def _muon(draft: Draft) -> Muon:
    return TRAINERS["megatron"].at(release_of("megatron", draft.version)).muon


def _optimizer(draft: Draft) -> Settings:
    training = draft.training
    if training.optimizer in OPTIMIZERS:
        return OPTIMIZERS[training.optimizer]
    release = release_of("megatron", draft.version)
    if training.optimizer in TRAINERS["megatron"].at(release).optimizers:
        muon = _muon(draft)
        draft.notes.append("Muon needs the package emerging-optimizers.")
        name = MUON[muon.named_sharded and draft.layout.zero_stage > 0]
        return {"optimizer": name, "muon_tp_mode": str(training.muon_tp_mode or muon.tp_mode)}
    return {}


def _recompute(draft: Draft) -> Settings:
    kind, number = parse_ac(draft.layout.ac)
    if kind in ("full", "block", "uniform"):
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if kind == "full" else kind,
            "recompute_num_layers": 1 if kind == "full" else int(number),
        }
    if kind in ("selective-attention", "modules"):
        modules = [*modules_of(number)] or ["core_attn"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _precision(draft: Draft, release: Release) -> Settings:
    layout, name = draft.layout, draft.layout.precision
    settings: Settings = {}
    if layout.param_dtype == "bfloat16":
        settings["fp16" if name == "fp16" else "bf16"] = True
        if name in FP8_RECIPES or (name in FP4_RECIPES and release.since(NEWER)):
            settings |= PRECISIONS[name].megatron_settings
    if layout.float8_all_gather and "fp8_recipe" in settings:
        settings["fp8_param_gather"] = True
    elif layout.float8_all_gather:
        draft.inert("float8_all_gather", "means nothing without fp8")
    wide = layout.reduce_dtype == "float32"
    settings["accumulate_allreduce_grads_in_fp32" if wide else "grad_reduce_in_bf16"] = True
    return settings


def _rest(draft: Draft, release: Release) -> Settings:
    layout = draft.layout
    settings: Settings = {}
    if layout.activation_offload_layers and release.since(NEWER):
        settings["cpu_offloading_num_layers"] = layout.activation_offload_layers
    share = layout.optimizer_offload_fraction
    if not layout.cpu_offload:
        if share != 1.0:
            draft.inert("optimizer_offload_fraction", "means nothing without cpu_offload")
        return settings
    draft.notes.append(
        "--optimizer-cpu-offload moves optimizer states, not parameters and gradients as FSDP2's "
        "offload does."
    )
    settings["optimizer_cpu_offload"] = True
    if share != 1.0:
        settings["optimizer_offload_fraction"] = f"{share:g}"
    if draft.training.optimizer != "adamw-bf16-states":
        settings["use_precision_aware_optimizer"] = True
    return settings


def _training(draft: Draft) -> Settings:
    layout, training, model = draft.layout, draft.training, draft.model
    table = model.max_position_embeddings if model.position_embedding == "learned" else 0
    if training.attention_kernel in ("flash2", "flash3"):
        draft.notes.append(
            f"--attention-backend flash runs flash-attn {training.attention_kernel[-1]} only where "
            "it is the newest that is installed and the GPU has it."
        )
    settings: Settings = {
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "seq_length": training.seq_len,
        "max_position_embeddings": max(training.seq_len, table),
        "train_iters": train_steps(training),
        "clip_grad": training.max_grad_norm or 0.0,
        "lr": "3e-4",
        "mock_data": True,
        "transformer_impl": "transformer_engine",
        "attention_backend": ATTENTION_BACKENDS[training.attention_kernel],
        **_optimizer(draft),
        "qk_clip": training.qk_clip,
    }
    if training.qk_clip:
        draft.notes.append("--qk-clip needs Transformer Engine 2.9 or newer.")
    if fuses_cross_entropy(training, TRAINERS[training.trainer]):
        settings |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    settings["no_overlap_p2p_communication"] = not training.overlap.pp and layout.pp > 1
    if training.vocab_parallel_loss is False and layout.tp > 1:
        rule = "cannot be switched off in Megatron-LM"
        draft.gap("training.vocab_parallel_loss", rule, "leave it out", blocking=False)
    saved = training.checkpoint
    if saved is not None:
        later = saved.mode != "sync"  # without the worker, 0.16 and later save in step
        settings |= {"save": "checkpoints", "save_interval": saved.interval_steps}
        settings |= {"async_save": later, "use_persistent_ckpt_worker": later}
    return settings


def parse_back(exported: Export) -> Layout:
    """The layout of an export, read from its arguments and its size; inverse of `write`."""
    return overlay_gaps(
        read_arguments(exported_words(exported), exported.num_layers, exported.num_gpus),
        exported.gaps,
    )
