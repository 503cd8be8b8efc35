"""Megatron-LM: arguments of its programs, the scripts that start them, and the way back.

Sources: Megatron-LM core 0.14 to 0.18 megatron/training/arguments.py;
    megatron/core/transformer/transformer_config.py (fp8, recompute, cp_comm_type),
    pipeline_parallel_layer_layout.py ("Ett|ttL"),
    distributed/distributed_data_parallel_config.py; the zero-bubble fork
    sail-sg/zero-bubble-pipeline-parallelism, README.
"""

from planner.cost.layer.trainer_kernels import fuses_cross_entropy
from planner.cost.pipeline.stages import stage_layers
from planner.export.base import Draft, Export, overlay_gaps, safe_name, train_steps
from planner.export.commands import Launch, read_flags
from planner.export.megatron_graphs import environment, graph_arguments
from planner.export.megatron_mixers import pattern
from planner.export.megatron_model import dispatcher_arguments, model_arguments
from planner.export.megatron_read import (
    FP4_RECIPES,
    FP8_RECIPES,
    SHARDING,
    plain_names,
    read_arguments,
)
from planner.precision import PRECISIONS
from planner.schedules.depth_first import microbatches_per_round
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import Layout, modules_of, parse_ac
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
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
    (), ("--account-for-loss-in-pipeline-split",),
    ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)  # fmt: skip
# megatron/core/transformer/enums.py AttnBackend. `auto` leaves the choice to Transformer Engine,
# which the kernel that the release brings stands for; `flash` switches cuDNN off.
ATTENTION_BACKENDS = {
    "flash": "auto", "flash2": "flash", "flash3": "flash", "cudnn": "fused", "unfused": "unfused",
}  # fmt: skip
MUON = "muon", "dist_muon"
OPTIMIZERS = {"adamw": ("--optimizer", "adam"), "sgd": ("--optimizer", "sgd")}
BF16_STATES = (
    "--optimizer",
    "adam",
    "--use-precision-aware-optimizer",
    "--exp-avg-dtype",
    "bf16",
    "--exp-avg-sq-dtype",
    "bf16",
)


def export(
    layout: Layout,
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    version: str | None = None,
) -> Export:
    """The layout as arguments of Megatron-LM's pretrain_gpt.py, or pretrain_hybrid.py.

    The arguments are those of the release, from core 0.14 on. A note says so where a job names an
    older one, a date or a distribution.
    """
    release = release_of("megatron", version or version_under(training, "megatron"))
    written = OLDEST if release.before(OLDEST) else release.number
    draft = Draft(layout=layout, model=model, cluster=cluster, training=training, version=written)
    if release.number != written or not release.exact:
        draft.notes.append(
            f"Written for Megatron-LM core {written}: check the arguments against your "
            f"{release.named.text}."
        )
    fork = FORKS.get(cluster.gpu.vendor)
    if fork is not None:
        draft.notes.append(
            f"On GPUs of {cluster.gpu.vendor} run it in the fork {fork}, with its Transformer "
            "Engine."
        )
    draft.check_common()
    draft.notes.append(YOURS)
    groups = (_degrees, _pipeline, _sharding, _recompute, _training)
    arguments = (
        *(word for group in groups for word in group(draft)),
        *_precision(draft, release),
        *_rest(draft, release),
        *model_arguments(draft, release),
        *dispatcher_arguments(draft, release),
        *graph_arguments(draft, release),
    )
    expandable = (
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if training.expandable_segments
        else {}
    )
    own_fsdp = layout.zero_stage in SHARDING
    # Megatron-FSDP refuses 1; everything else needs it
    connections = {} if own_fsdp else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    program = "pretrain_hybrid.py" if is_hybrid(model) else "pretrain_gpt.py"
    launch = Launch(
        name=safe_name(model.name),
        num_gpus=layout.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        program=(program,),
        arguments=arguments,
        environment={**connections, **expandable, **environment(draft)},
        root_variable=ROOT,
    )
    draft.notes.append(
        f"Set {ROOT} to the root of Megatron-LM, where {program} is, or run launch.sh there."
    )
    return Export(
        trainer="megatron",
        version=written,
        num_layers=model.num_hidden_layers,
        num_gpus=layout.num_gpus,
        files=launch.files(),
        command=launch.command(),
        arguments=arguments,
        notes=tuple(draft.notes),
        gaps=tuple(draft.gaps),
    )


def _degrees(draft: Draft) -> list[str]:
    layout = draft.layout
    arguments = [
        "--tensor-model-parallel-size",
        str(layout.tp),
        "--pipeline-model-parallel-size",
        str(layout.pp),
        "--context-parallel-size",
        str(layout.cp),
        "--expert-model-parallel-size",
        str(layout.ep),
        "--expert-tensor-parallel-size",
        str(layout.etp),
        "--cp-comm-type",
        CP_TYPES[layout.cp_method],
    ]
    if layout.sequence_parallel:
        arguments.append("--sequence-parallel")
    if layout.async_tp and draft.model.uses_mla:
        rule = "is switched off by Megatron-LM for multi-latent attention"
        draft.gap("async_tp", True, rule, "set it to false")
    elif layout.async_tp:
        arguments.append("--tp-comm-overlap")
        draft.notes.append(
            "--tp-comm-overlap needs --sequence-parallel and Transformer Engine built with user "
            "buffers."
        )
    return arguments


def _pipeline(draft: Draft) -> list[str]:
    layout, layers = draft.layout, draft.model.num_hidden_layers
    arguments = _schedule(draft)
    split = draft.layer_split if layout.pp > 1 else None
    if is_hybrid(draft.model):
        stages = layout.pp * layout.virtual_stages
        even = stage_layers(layers, stages, counts_ends=False)
        return [*arguments, "--hybrid-layer-pattern", pattern(draft.model, split or even)]
    if split is None and draft.model.num_hash_layers and layout.pp > 1:
        split = stage_layers(layers, layout.pp * layout.virtual_stages, counts_ends=False)
    if split is not None:
        return [
            *arguments,
            "--pipeline-model-parallel-layout",
            pipeline_layout(split, draft.model.mtp_num_layers),
        ]
    if layout.pp == 1:
        return arguments
    stages = layout.pp * layout.virtual_stages
    ends = ends_counted(layers, stages) if layout.layers_per_stage is None else 0
    if ends is None:
        sizes = stage_layers(layers, stages, counts_ends=False)
        rule = (
            f"is written out: {stages} stages do not divide {layers} layers, nor with embedding "
            "and loss counted"
        )
        draft.gap("layers_per_stage", None, rule, "no setting is needed", blocking=False)
        return [
            *arguments,
            "--pipeline-model-parallel-layout",
            pipeline_layout(sizes, draft.model.mtp_num_layers),
        ]
    if layout.virtual_stages > 1:
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(layout.virtual_stages)]
    if ends:
        counted_as = (
            "the loss counts as a layer" if ends == 1 else "embedding and loss count as layers"
        )
        draft.gap(
            "layers_per_stage",
            None,
            f"divides over {stages} stages where {counted_as}",
            "no setting is needed",
            blocking=False,
        )
    return [*arguments, *ENDS_COUNTED[ends]]


def ends_counted(layers: int, stages: int) -> int | None:
    """How many of embedding and loss must count as layers for the stages to divide the layers.

    None where they never divide.
    """
    return next((ends for ends in range(len(ENDS_COUNTED)) if (layers + ends) % stages == 0), None)


def _schedule(draft: Draft) -> list[str]:
    """Arguments of the schedule besides the number of stages."""
    layout = draft.layout
    interleaved = layout.pp > 1 and layout.virtual_stages > 1
    implied = "Interleaved1F1B" if interleaved else "1F1B"
    if layout.pp > 1 and layout.pp_schedule in ZERO_BUBBLE_PENDING:
        draft.notes.append(
            "--enable-zero-bubble is an argument of the fork "
            "sail-sg/zero-bubble-pipeline-parallelism, not of Megatron-LM."
        )
        pending = ZERO_BUBBLE_PENDING[layout.pp_schedule] * layout.pp
        return ["--enable-zero-bubble", "--zero-bubble-max-pending-backward", str(pending)]
    if layout.pp_schedule != implied:
        rule = (
            f"is not in Megatron-LM, which runs {implied} with "
            f"{counted(layout.virtual_stages, 'stage')} a rank"
        )
        draft.gap("pp_schedule", layout.pp_schedule, rule, f"use {implied}", blocking=layout.pp > 1)
    return round_arguments(layout, draft.training.global_batch_size) if interleaved else []


def round_arguments(layout: Layout, global_batch_size: int) -> list[str]:
    """The size of a round of the interleaved schedule, where it is not Megatron's own, pp.

    Megatron refuses rounds of which the last holds fewer than pp microbatches
    (pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving).
    """
    count = layout.num_microbatches(global_batch_size)
    size = int(microbatches_per_round(layout.pp, count))
    own = size == layout.pp or count < layout.pp
    return [] if own else ["--microbatch-group-size-per-virtual-pipeline-stage", str(size)]


def pipeline_layout(split: tuple[int, ...], predicting: int = 0) -> str:
    """Megatron's layout string, such as "Et*2|t*3|t*2L".

    E is the embedding, t*n are n layers, m is one that predicts more tokens, L is the loss; stages
    are in the order of the layers.
    """
    stages = [f"t*{count}" if count else "" for count in split]
    return "|".join(["E" + stages[0], *stages[1:]]) + "m" * predicting + "L"


def _sharding(draft: Draft) -> list[str]:
    layout, overlap = draft.layout, draft.training.overlap.dp
    muon = _muon(draft) if draft.training.optimizer == "muon" else None
    if muon is not None and not (muon.hides_sharded if layout.zero_stage else muon.hides_whole):
        overlap = False
    arguments = ["--overlap-grad-reduce"] if overlap else []
    if layout.zero_stage == 0:
        if layout.dp_replicate > 1:
            rule = (
                f"with dp_shard {layout.dp_shard} is one data-parallel group of {layout.dp_degree}"
            )
            draft.gap(
                "dp_replicate", layout.dp_replicate, rule, "no setting is needed", blocking=False
            )
            draft.gap("dp_shard", layout.dp_shard, rule, "no setting is needed", blocking=False)
        aware = layout.cpu_offload or draft.training.optimizer == "adamw-bf16-states"
        return [*arguments, "--use-distributed-optimizer"] if aware else arguments
    gather = ["--overlap-param-gather"] if overlap else []
    if muon is not None and muon.named_sharded:
        return [*arguments, *gather]
    arguments += ["--use-distributed-optimizer", *gather]
    arguments += ["--num-distributed-optimizer-instances", str(layout.dp_replicate)]
    if layout.zero_stage in SHARDING:
        arguments += [
            "--use-megatron-fsdp",
            "--data-parallel-sharding-strategy",
            SHARDING[layout.zero_stage],
        ]
        arguments += ["--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor"]
        draft.notes.append(
            "--use-megatron-fsdp is young: check that your release combines it with TP, PP and EP "
            "as here."
        )
    return arguments


def _muon(draft: Draft) -> Muon:
    return TRAINERS["megatron"].at(release_of("megatron", draft.version)).muon


def _optimizer(draft: Draft) -> list[str]:
    training = draft.training
    if training.optimizer == "adamw-bf16-states":
        return [*BF16_STATES]
    if training.optimizer in OPTIMIZERS:
        return [*OPTIMIZERS[training.optimizer]]
    release = release_of("megatron", draft.version)
    if training.optimizer in TRAINERS["megatron"].at(release).optimizers:
        muon = _muon(draft)
        draft.notes.append("Muon needs the package emerging-optimizers.")
        name = MUON[muon.named_sharded and draft.layout.zero_stage > 0]
        return ["--optimizer", name, "--muon-tp-mode", str(training.muon_tp_mode or muon.tp_mode)]
    draft.gap(
        "training.optimizer",
        training.optimizer,
        f"is not in Megatron-LM core {draft.version}, or not priced there",
        "use adamw or sgd",
    )
    return []


def _recompute(draft: Draft) -> list[str]:
    layout = draft.layout
    kind, number = parse_ac(layout.ac)
    if kind == "full":
        return [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ]
    if kind in ("selective-attention", "modules"):
        modules = modules_of(number) or ("core_attn",)
        return ["--recompute-granularity", "selective", "--recompute-modules", *modules]
    if kind in ("block", "uniform"):
        return [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            kind,
            "--recompute-num-layers",
            str(int(number)),
        ]
    if kind != "none":
        remedy = "use none, full, selective-attention, block-N, uniform-N or modules-A+B"
        draft.gap("ac", layout.ac, "is not in Megatron-LM", remedy)
    return []


def _precision(draft: Draft, release: Release) -> list[str]:
    layout, name = draft.layout, draft.layout.precision
    sixteen = "--fp16" if name == "fp16" else "--bf16"
    arguments = [sixteen] if layout.param_dtype == "bfloat16" else []
    if layout.param_dtype == "float32" and name != "bf16":
        draft.gap(
            "precision",
            name,
            "computes in 16 bits or fewer; float32 parameters do not",
            "use param_dtype bfloat16",
        )
    elif name in FP8_RECIPES or (name in FP4_RECIPES and release.since(NEWER)):
        arguments += PRECISIONS[name].megatron_arguments
    elif name not in ("bf16", "fp16"):
        draft.gap(
            "precision",
            name,
            f"is not in Megatron-LM core {release.number}",
            f"use bf16 or one of {', '.join(FP8_RECIPES)}",
        )
    if layout.float8_all_gather:
        if "--fp8-recipe" in arguments:
            arguments.append("--fp8-param-gather")
        else:
            draft.inert("float8_all_gather", "means nothing without fp8")
    arguments.append(
        "--accumulate-allreduce-grads-in-fp32"
        if layout.reduce_dtype == "float32"
        else "--grad-reduce-in-bf16"
    )
    if layout.master_dtype != "float32":
        draft.gap(
            "master_dtype",
            layout.master_dtype,
            "is not in Megatron-LM: its main parameters are fp32 or fp16",
            "use float32",
        )
    return arguments


def _rest(draft: Draft, release: Release) -> list[str]:
    layout = draft.layout
    if layout.compile:
        draft.gap(
            "compile",
            True,
            "is not in Megatron-LM, whose kernels are fused by Transformer Engine",
            "set it to false",
        )
    if layout.optimizer_in_backward:
        draft.gap("optimizer_in_backward", True, "is not in Megatron-LM", "set it to false")
    arguments = []
    if layout.activation_offload_layers:
        arguments = ["--cpu-offloading-num-layers", str(layout.activation_offload_layers)]
        if release.before(NEWER):
            draft.gap(
                "activation_offload_layers",
                layout.activation_offload_layers,
                f"has no argument in Megatron-LM core {release.number}",
                f"use 0, or export for {NEWER} or later",
            )
            arguments = []
    share = layout.optimizer_offload_fraction
    if not layout.cpu_offload:
        if share != 1.0:
            draft.inert("optimizer_offload_fraction", "means nothing without cpu_offload")
        return arguments
    draft.notes.append(
        "--optimizer-cpu-offload moves optimizer states, not parameters and gradients as FSDP2's "
        "offload does."
    )
    aware = (
        []
        if draft.training.optimizer == "adamw-bf16-states"
        else ["--use-precision-aware-optimizer"]
    )
    fraction = [] if share == 1.0 else ["--optimizer-offload-fraction", f"{share:g}"]
    return [*arguments, "--optimizer-cpu-offload", *fraction, *aware]


def _training(draft: Draft) -> list[str]:
    layout, training, model = draft.layout, draft.training, draft.model
    table = model.max_position_embeddings if model.position_embedding == "learned" else 0
    arguments = [
        "--micro-batch-size",
        str(layout.micro_batch_size),
        "--global-batch-size",
        str(training.global_batch_size),
        "--seq-length",
        str(training.seq_len),
        "--max-position-embeddings",
        str(max(training.seq_len, table)),
        "--train-iters",
        str(train_steps(training)),
        "--clip-grad",
        str(training.max_grad_norm or 0.0),
        "--lr",
        "3e-4",
        "--mock-data",
        "--transformer-impl",
        "transformer_engine",
        "--attention-backend",
        ATTENTION_BACKENDS[training.attention_kernel],
    ]
    if training.attention_kernel in ("flash2", "flash3"):
        draft.notes.append(
            f"--attention-backend flash runs flash-attn {training.attention_kernel[-1]} only where "
            "it is the newest that is installed and the GPU has it."
        )
    arguments += _optimizer(draft)
    if training.qk_clip:
        arguments.append("--qk-clip")
        draft.notes.append("--qk-clip needs Transformer Engine 2.9 or newer.")
    if fuses_cross_entropy(training, TRAINERS[training.trainer]):
        arguments += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]
    if not training.overlap.pp and layout.pp > 1:
        arguments.append("--no-overlap-p2p-communication")
    if training.vocab_parallel_loss is False and layout.tp > 1:
        draft.gap(
            "training.vocab_parallel_loss",
            False,
            "cannot be switched off in Megatron-LM",
            "leave it out",
            blocking=False,
        )
    if training.checkpoint is not None:
        arguments += [
            "--save",
            "checkpoints",
            "--save-interval",
            str(training.checkpoint.interval_steps),
        ]
        if training.checkpoint.mode != "sync":  # without the worker, 0.16 and later save in step
            arguments += ["--async-save", "--use-persistent-ckpt-worker"]
    return arguments


def parse_back(exported: Export) -> Layout:
    """The layout of an export, read from its arguments and its size; inverse of `export`."""
    words = plain_names(read_flags(exported.arguments))
    return overlay_gaps(
        read_arguments(words, exported.num_layers, exported.num_gpus), exported.gaps
    )
