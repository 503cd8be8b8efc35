"""Rules on what a trainer, a GPU or a combination of switches supports.

They cover ZeRO, precision, recomputation, compile and the rest.
"""

import numpy as np

from planner.columns import TRAINER_SPLIT, BoolColumn, IntColumn, LayoutBatch, schedule_is
from planner.precision import PRECISIONS, Recipe, bf16_tail
from planner.rules.base import (
    Context,
    Rule,
    choices,
    in_set,
    num_microbatches,
    sharding_degree,
    under,
)
from planner.specs.kernel_families import kernel_family
from planner.specs.layout import AC_KINDS, CP_METHODS, DTYPES, MOE_DISPATCHERS, Layout
from planner.specs.training import OPTIMIZER_STATE_BYTES
from planner.units import format_bytes
from planner.work.quantised import local_shape, low_share, products

TENSORWISE, MXFP8 = PRECISIONS.names.index("float8-tensorwise"), PRECISIONS.names.index("mxfp8")
MEMORY_BUDGET, SELECTIVE_OP = AC_KINDS.index("memory-budget"), AC_KINDS.index("selective-op")
BLOCK, UNIFORM = AC_KINDS.index("block"), AC_KINDS.index("uniform")

SINGLES = frozenset({"fp32", "tf32"})
HOST_TOO_SMALL = "host memory too small for CPU offload"


def splits_backward(codes: IntColumn) -> BoolColumn:
    """Whether a schedule computes weight gradients in an action of their own. (N,)."""
    return schedule_is(codes, lambda schedule: schedule.splits_backward)


_TITAN, _MEGATRON = under("torchtitan"), under("megatron")
# 0.3 applies FSDP2 to every layout, over replicas too (distributed/fsdp.py)
_TITAN_02 = under("torchtitan", before="0.3")


def gpu_precisions(c: Context) -> tuple[str, ...]:
    """Precisions that the GPU has units for and the libraries have kernels for."""
    gpu = c.cluster.gpu
    row = kernel_family(gpu)
    return tuple(
        precision.name
        for precision in PRECISIONS.values()
        if all(dtype in gpu.peak_flops_per_second for dtype in precision.needs)
        and (precision.kernel_rows is None or row in precision.kernel_rows)
        and (precision.vendors is None or gpu.vendor in precision.vendors)
    )


def trainer_precisions(c: Context) -> frozenset[str]:
    """Precisions of the trainer's release that convert anything in the model."""
    idle = (recipe.name for recipe in _recipes(c) if _converts_nothing(recipe, c))
    return c.released.precisions - frozenset(idle)


def _recipes(c: Context) -> tuple[Recipe, ...]:
    return c.trainer.recipes(c.training.trainer_version)


def _converts_nothing(recipe: Recipe, c: Context) -> bool:
    """Whether the recipe leaves every layer of the model in 16 bits.

    TorchTitan 0.3's nvfp4 skips experts, and the last layers of any model
    (components/quantization/nvfp4.py).
    """
    layers = c.model.num_hidden_layers
    return (recipe.dense_only and c.model.is_moe) or bf16_tail(recipe, layers) >= layers


def _both(c: Context) -> str:
    both = [name for name in gpu_precisions(c) if name in trainer_precisions(c)]
    return choices(both) if both else "another GPU or trainer"


def _missing(x: Layout, c: Context) -> str:
    missing = [
        dtype
        for dtype in PRECISIONS[x.precision].needs
        if dtype not in c.cluster.gpu.peak_flops_per_second
    ]
    found = " and ".join("microscaling" if dtype == "fp4" else dtype for dtype in missing)
    return (
        f"{found} units, which {x.precision} needs"
        if found
        else f"kernels for {x.precision} in any library"
    )


def _quantised(c: Context) -> list[tuple[int, Recipe]]:
    """(code, recipe) of the low precisions that both GPU and trainer can run."""
    usable = trainer_precisions(c) & {*gpu_precisions(c)}
    recipes = enumerate(_recipes(c))
    return [(code, recipe) for code, recipe in recipes if recipe.low and recipe.name in usable]


def _unaligned_weights(x: LayoutBatch, c: Context) -> BoolColumn:
    tp, etp = x.tp.astype(np.float64), x.etp.astype(np.float64)
    broken = np.zeros(np.broadcast_shapes(tp.shape, etp.shape, x.precision.shape), dtype=np.bool_)
    present = set(np.unique(x.precision).tolist())
    for code, recipe in _quantised(c):
        if code not in present:
            continue
        for kind, _ in c.model.distinct_layers():
            for op in products(c.model, kind):
                if low_share(recipe, op, c.model) > 0:
                    sides = local_shape(op, c.model, tp, etp)
                    off = [
                        (side == np.floor(side)) & (side % recipe.multiple != 0) for side in sides
                    ]
                    broken |= (x.precision == code) & (off[0] | off[1])
    return broken


def _unaligned_tokens(x: LayoutBatch, c: Context) -> BoolColumn:
    tokens = x.micro_batch_size * c.training.seq_len // x.cp
    broken = np.zeros(np.broadcast_shapes(tokens.shape, x.precision.shape), dtype=np.bool_)
    for code, recipe in _quantised(c):
        broken |= (x.precision == code) & (tokens % recipe.rows_multiple != 0)
    return broken


def _recipe(x: Layout, c: Context) -> Recipe:
    return _recipes(c)[PRECISIONS.names.index(x.precision)]


def _offending(x: Layout, c: Context) -> str:
    """A sentence on the first weight that is not aligned on one rank."""
    recipe = _recipe(x, c)
    for kind, _ in c.model.distinct_layers():
        for op in products(c.model, kind):
            k, n = (
                int(side[0])
                for side in local_shape(
                    op, c.model, np.array([float(x.tp)]), np.array([float(x.etp)])
                )
            )
            if low_share(recipe, op, c.model) > 0 and (k % recipe.multiple or n % recipe.multiple):
                return f"{op.name} of {c.model.name} is {k} x {n} on a rank"
    return "a weight is not aligned"


def scale_up_gpus(c: Context) -> int:
    """GPUs that the innermost level of the fabric joins."""
    return c.cluster.fabric[0].gpus


def peer_gpus(c: Context) -> int:
    """GPUs that can read each other's memory; 1 where none can.

    Symmetric memory ends there, and so does async TP.
    """
    return scale_up_gpus(c) if c.cluster.fabric[0].peer_memory else 1


def node_bytes(c: Context) -> float:
    """Bytes that whole CPU offload keeps in one node's host memory for one replica.

    These are fp32 parameters and gradients, and optimizer states.
    """
    return (
        c.model.total_parameters()
        * (8.0 + OPTIMIZER_STATE_BYTES[c.training.optimizer])
        / c.cluster.num_nodes
    )


def _in(values: frozenset[int], x: LayoutBatch) -> BoolColumn:
    return np.isin(x.zero_stage, sorted(values))


_ZERO_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer lacks the ZeRO stage",
        field="zero_stage",
        reads=frozenset({"zero_stage"}),
        broken=lambda x, c: ~_in(c.trainer.zero_stages, x),
        rule=lambda x, c: f"{c.trainer.name} has no ZeRO stage {x.zero_stage}",
        remedy=lambda x, c: f"use zero_stage {choices(sorted(c.trainer.zero_stages))}",
    ),
    Rule(
        key="DDP cannot hold shards",
        field="zero_stage",
        reads=frozenset({"zero_stage", "sharding_degree"}),
        applies=lambda c: c.trainer.sharding.degrees_decide,
        broken=lambda x, c: np.asarray((x.zero_stage == 0) & (sharding_degree(x, c) > 1)),
        rule=lambda x, c: (
            f"zero_stage=0 shards nothing, but dp_shard x cp = {x.dp_shard * x.cp} ranks shard "
            f"under {c.trainer.name}"
        ),
        remedy=lambda x, c: (
            "set zero_stage to 2 or 3"
            + (f", or dp_replicate to {x.dp_degree} and dp_shard to 1" if x.cp == 1 else "")
        ),
    ),
    Rule(
        key="DDP combines with no other parallelism",
        field="dp_replicate",
        reads=frozenset({"dp_replicate", "tp", "pp", "sharding_degree"}),
        applies=_TITAN,
        broken=lambda x, c: np.asarray(
            (x.dp_replicate > 1) & (sharding_degree(x, c) == 1) & (x.tp * x.pp > 1)
        ),
        rule=lambda x, c: (
            f"dp_replicate={x.dp_replicate} without sharding is DDP, which {c.trainer.name} "
            "combines with neither tp nor pp"
        ),
        remedy=lambda x, c: (
            f"set dp_shard to {x.dp_replicate} and dp_replicate to 1, or to any split of the two "
            "with dp_shard > 1"
        ),
    ),
    Rule(
        key="DDP reduces in the dtype of the parameters",
        field="reduce_dtype",
        reads=frozenset({"dp_replicate", "sharding_degree", "reduce_dtype", "master_dtype"}),
        # models/llama3/infra/parallelize.py, apply_ddp: mixed_precision_reduce goes to FSDP alone
        applies=_TITAN_02,
        broken=lambda x, c: np.asarray(
            (x.dp_replicate > 1) & (sharding_degree(x, c) == 1) & (x.reduce_dtype != x.master_dtype)
        ),
        rule=lambda x, c: (
            f"dp_replicate={x.dp_replicate} without sharding is DDP, which reduces gradients in "
            f"{x.master_dtype}, the dtype of the parameters"
        ),
        remedy=lambda x, c: f"set reduce_dtype to {x.master_dtype}, or dp_shard to 2 or more",
    ),
    Rule(
        key="TorchTitan 0.2 mixes precisions in FSDP alone",
        field="param_dtype",
        reads=frozenset({"tp", "pp", "sharding_degree", "param_dtype", "master_dtype"}),
        # distributed/utils.py, maybe_enable_amp: "Mixed precision training is disabled"
        applies=_TITAN_02,
        broken=lambda x, c: np.asarray(
            (x.tp * x.pp > 1) & (sharding_degree(x, c) == 1) & (x.param_dtype != x.master_dtype)
        ),
        rule=lambda x, c: (
            f"tp={x.tp} x pp={x.pp} without sharding computes in {x.master_dtype}, the dtype of "
            f"the parameters: {_release(c)} casts to {x.param_dtype} in FSDP alone"
        ),
        remedy=lambda x, c: (
            f"set dp_shard or cp to 2 or more, param_dtype to {x.master_dtype}, or "
            "training.trainer_version to 0.3.0"
        ),
    ),
    Rule(
        key="ZeRO-3 excludes schedules that split the backward",
        field="zero_stage",
        reads=frozenset({"zero_stage", "pp", "pp_schedule"}),
        applies=lambda c: c.trainer.framework.splits_backward_by_group,
        # torch/distributed/pipelining/_backward.py, stage_backward_weight: it pairs gradients with
        # the parameters that it finds then, which FSDP2 has swapped since the forward
        broken=lambda x, c: (x.zero_stage == 3) & (x.pp > 1) & splits_backward(x.pp_schedule),
        rule=lambda x, c: (
            f"{x.pp_schedule} goes back for weight gradients, and loses those of parameters that "
            "zero_stage=3 has freed in between"
        ),
        remedy=lambda x, c: "set zero_stage to 2, or pp_schedule to Interleaved1F1B or 1F1B",
    ),
    Rule(
        key="ZeRO-2 and 3 exclude pipelines",
        field="zero_stage",
        reads=frozenset({"zero_stage", "pp"}),
        applies=lambda c: not c.trainer.zero_2_under_pp,
        broken=lambda x, c: np.asarray((x.pp > 1) & (x.zero_stage >= 2)),
        rule=lambda x, c: f"{c.trainer.name} refuses zero_stage={x.zero_stage} with pp={x.pp}",
        remedy=lambda x, c: "set zero_stage to 1, or pp to 1",
    ),
    Rule(
        key="CPU offload needs shards",
        field="cpu_offload",
        reads=frozenset({"cpu_offload", "zero_stage", "sharding_degree"}),
        # FSDP2's CPUOffloadPolicy; Megatron's --optimizer-cpu-offload works on the distributed
        # optimizer
        broken=lambda x, c: np.asarray(
            x.cpu_offload
            & (
                (sharding_degree(x, c) == 1)
                if c.trainer.sharding.offloads_shards
                else (x.zero_stage == 0)
            )
        ),
        rule=lambda x, c: (
            f"cpu_offload moves shards, and zero_stage={x.zero_stage} over dp_shard x cp = "
            f"{x.dp_shard * x.cp} leaves none"
        ),
        remedy=lambda x, c: "set cpu_offload to false, or raise dp_shard and zero_stage",
    ),
    Rule(
        key="offload needs a device beside the host",
        field="cpu_offload",
        reads=frozenset({"cpu_offload"}),
        applies=lambda c: c.cluster.gpu.vendor == "cpu",
        broken=lambda x, c: np.asarray(x.cpu_offload),
        rule=lambda x, c: "cpu_offload moves states to the host, which here is the device",
        remedy=lambda x, c: "set cpu_offload to false",
    ),
    Rule(
        key=HOST_TOO_SMALL,
        field="cpu_offload",
        reads=frozenset({"cpu_offload", "dp_replicate", "optimizer_offload_fraction"}),
        broken=lambda x, c: np.asarray(
            x.cpu_offload
            & (
                node_bytes(c) * x.dp_replicate * x.optimizer_offload_fraction
                > c.cluster.host_memory_bytes
            )
        ),
        rule=lambda x, c: (
            f"needs {format_bytes(node_bytes(c) * x.dp_replicate * x.optimizer_offload_fraction)} "
            f"of host memory in each node, which has {format_bytes(c.cluster.host_memory_bytes)}"
        ),
        remedy=lambda x, c: (
            "set cpu_offload to false, use more nodes, or lower dp_replicate"
            + (" or optimizer_offload_fraction" if c.released.offloads_partly else "")
        ),
    ),
    Rule(
        key="trainer offloads all states or none",
        field="optimizer_offload_fraction",
        reads=frozenset({"optimizer_offload_fraction"}),
        applies=lambda c: not c.released.offloads_partly,
        broken=lambda x, c: np.asarray(x.optimizer_offload_fraction < 1.0),
        rule=lambda x, c: (
            f"{_release(c)} moves all optimizer states to the host or none, not a share of "
            f"{x.optimizer_offload_fraction:g}"
        ),
        remedy=lambda x, c: "set optimizer_offload_fraction to 1",
    ),
    Rule(
        key="trainer keeps activations on the device",
        field="activation_offload_layers",
        reads=frozenset({"activation_offload_layers"}),
        applies=lambda c: not c.released.offloads_activations,
        broken=lambda x, c: np.asarray(x.activation_offload_layers > 0),
        rule=lambda x, c: f"{_release(c)} cannot move the activations of layers to the host",
        remedy=lambda x, c: "set activation_offload_layers to 0",
    ),
    Rule(
        key="activation offload keeps one layer",
        field="activation_offload_layers",
        reads=frozenset({"activation_offload_layers"}),
        # core/transformer/transformer_config.py: "CPU offloading can be done only for layers less
        # than ..."
        applies=lambda c: c.released.offloads_activations,
        broken=lambda x, c: np.asarray(x.activation_offload_layers >= c.model.num_hidden_layers),
        rule=lambda x, c: (
            f"{x.activation_offload_layers} is not below the {c.model.num_hidden_layers} layers of "
            f"{c.model.name}"
        ),
        remedy=lambda x, c: (
            f"set activation_offload_layers to at most {c.model.num_hidden_layers - 1}"
        ),
    ),
    Rule(
        key="activation offload excludes pipelines and recomputation",
        field="activation_offload_layers",
        reads=frozenset({"activation_offload_layers", "pp", "ac_kind"}),
        # the same: "Currently there is no support for Pipeline parallelism with CPU offloading",
        # "CPU offloading does not work when activation recomputation is enabled"
        applies=lambda c: c.released.offloads_activations,
        broken=lambda x, c: np.asarray(
            (x.activation_offload_layers > 0) & ((x.pp > 1) | (x.ac_kind != AC_KINDS.index("none")))
        ),
        rule=lambda x, c: (
            f"{_release(c)} moves activations to the host only without pipeline and recomputation; "
            f"pp is {x.pp} and ac {x.ac}"
        ),
        remedy=lambda x, c: "set activation_offload_layers to 0, or pp to 1 and ac to none",
    ),
    Rule(
        key="a share of CPU offload without it",
        field="optimizer_offload_fraction",
        reads=frozenset({"cpu_offload", "optimizer_offload_fraction"}),
        broken=lambda x, c: np.asarray(~x.cpu_offload & (x.optimizer_offload_fraction < 1.0)),
        rule=lambda x, c: (
            f"{x.optimizer_offload_fraction:g} is a share of what cpu_offload moves, which is false"
        ),
        remedy=lambda x, c: "set cpu_offload to true, or optimizer_offload_fraction to 1",
    ),
)

_PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer lacks the precision",
        field="precision",
        reads=frozenset({"precision"}),
        broken=lambda x, c: ~in_set(x.precision, PRECISIONS, trainer_precisions(c)),
        rule=lambda x, c: f"{_release(c)} does not train {c.model.name} in {x.precision}",
        remedy=lambda x, c: f"use {_both(c)}",
    ),
    Rule(
        key="GPU lacks the precision",
        field="precision",
        reads=frozenset({"precision"}),
        broken=lambda x, c: ~in_set(x.precision, PRECISIONS, gpu_precisions(c)),
        rule=lambda x, c: f"{c.cluster.gpu.name} has no {_missing(x, c)}",
        remedy=lambda x, c: f"use {_both(c)}",
    ),
    Rule(
        key="GPU lacks fp32 matmuls",
        field="param_dtype",
        reads=frozenset({"param_dtype"}),
        broken=lambda x, c: (
            (x.param_dtype == DTYPES.index("float32"))
            & np.bool_(not SINGLES & set(c.cluster.gpu.peak_flops_per_second))
        ),
        rule=lambda x, c: (
            f"{c.cluster.gpu.name} lists no fp32 or tf32 matrix units, which param_dtype float32 "
            "needs"
        ),
        remedy=lambda x, c: "set param_dtype to bfloat16",
    ),
    Rule(
        key="fp32 parameters exclude low precision",
        field="precision",
        reads=frozenset({"precision", "param_dtype"}),
        # arguments.py: --fp16, --bf16 and the fp8 recipes set params_dtype
        applies=_MEGATRON,
        broken=lambda x, c: np.asarray(
            (x.param_dtype == DTYPES.index("float32"))
            & (x.precision != PRECISIONS.names.index("bf16"))
        ),
        rule=lambda x, c: (
            f"{x.precision} computes in 16 bits or fewer; float32 parameters of {c.trainer.name} "
            "do not"
        ),
        remedy=lambda x, c: "set param_dtype to bfloat16, or precision to bf16",
    ),
    Rule(
        key="trainer keeps fp32 masters",
        field="master_dtype",
        reads=frozenset({"master_dtype"}),
        applies=_MEGATRON,  # --main-params-dtype takes fp32 and fp16
        broken=lambda x, c: x.master_dtype != DTYPES.index("float32"),
        rule=lambda x, c: (
            f"{c.trainer.name} keeps main parameters in fp32 or fp16, not {x.master_dtype}"
        ),
        remedy=lambda x, c: "set master_dtype to float32",
    ),
    Rule(
        key="low precision needs aligned weights",
        field="precision",
        reads=frozenset({"precision", "tp", "etp"}),
        # torch._scaled_mm; Transformer Engine assert_dim_for_fp8_exec; torchao to_mx,
        # nvfp4_mm_triton
        broken=_unaligned_weights,
        rule=lambda x, c: (
            f"{x.precision} multiplies matrices with sides in multiples of "
            f"{_recipe(x, c).multiple}; {_offending(x, c)}"
        ),
        remedy=lambda x, c: "use bf16" + (", or a smaller tp" if x.tp > 1 else ""),
    ),
    Rule(
        key="low precision needs aligned tokens",
        field="precision",
        reads=frozenset({"precision", "cp", "micro_batch_size"}),
        broken=_unaligned_tokens,
        rule=lambda x, c: (
            f"{x.precision} needs tokens a rank in multiples of {_recipe(x, c).rows_multiple}: "
            "micro_batch_size x seq_len "
            f"/ cp is {x.micro_batch_size * c.training.seq_len // x.cp}"
        ),
        remedy=lambda x, c: (
            "use bf16, a larger micro_batch_size, or a seq_len that is a multiple of 128 x cp"
        ),
    ),
    Rule(
        key="float8 tensorwise with TP lacks MLA",
        field="precision",
        reads=frozenset({"precision", "tp"}),
        # torchtitan models/deepseek_v3/infra/parallelize.py
        applies=lambda c: _TITAN(c) and c.model.uses_mla,
        broken=lambda x, c: np.asarray((x.precision == TENSORWISE) & (x.tp > 1)),
        rule=lambda x, c: (
            f"{c.trainer.name} does not implement float8-tensorwise with tp={x.tp} for MLA models "
            f"({c.model.name})"
        ),
        remedy=lambda x, c: "use float8-rowwise or bf16, or set tp to 1",
    ),
    Rule(
        key="mxfp8 with TP excludes compile",
        field="compile",
        reads=frozenset({"precision", "tp", "compile"}),
        # torchtitan 0.2.2 components/quantization/mx.py; 0.3.0's has no such check
        applies=under("torchtitan", before="0.3"),
        broken=lambda x, c: np.asarray((x.precision == MXFP8) & (x.tp > 1) & x.compile),
        rule=lambda x, c: f"{c.trainer.name} refuses mxfp8 with tp={x.tp} under compile",
        remedy=lambda x, c: "set compile to false, tp to 1, or precision to float8-rowwise",
    ),
    Rule(
        key="float8 all-gather is tensorwise only",
        field="float8_all_gather",
        reads=frozenset({"float8_all_gather", "precision"}),
        broken=lambda x, c: np.asarray(x.float8_all_gather & (x.precision != TENSORWISE)),
        rule=lambda x, c: f"float8_all_gather needs one scale a tensor, precision is {x.precision}",
        remedy=lambda x, c: "set precision to float8-tensorwise, or float8_all_gather to false",
    ),
    Rule(
        key="float8 all-gather needs dp_shard",
        field="float8_all_gather",
        reads=frozenset({"float8_all_gather", "dp_shard"}),
        # torchtitan components/quantization/float8.py
        broken=lambda x, c: np.asarray(x.float8_all_gather & (x.dp_shard == 1)),
        rule=lambda x, c: "float8_all_gather gathers FSDP's shards, and dp_shard is 1",
        remedy=lambda x, c: "set float8_all_gather to false, or dp_shard to 2 or more",
    ),
    Rule(
        key="float8 all-gather needs the distributed optimizer",
        field="float8_all_gather",
        reads=frozenset({"float8_all_gather", "zero_stage"}),
        # megatron/training/arguments.py: "--fp8-param-gather only supported with distributed
        # optimizer"
        applies=_MEGATRON,
        broken=lambda x, c: np.asarray(x.float8_all_gather & (x.zero_stage == 0)),
        rule=lambda x, c: (
            "float8_all_gather is the distributed optimizer's, which zero_stage=0 does without"
        ),
        remedy=lambda x, c: "set zero_stage to 1, or float8_all_gather to false",
    ),
)


def largest_stage(x: LayoutBatch, c: Context) -> IntColumn:
    """Layers of the largest stage, (N,).

    A split that does not divide counts embedding and head as layers.
    """
    layers, stages = c.model.num_hidden_layers, x.pp * x.virtual_stages
    usual = np.where(layers % stages == 0, layers // stages, -(-(layers + 2) // stages))
    own = np.array([*(max(split, default=0) for split in x.splits), 0], dtype=np.int64)[x.split]
    return np.asarray(np.where(x.split == TRAINER_SPLIT, usual, own))


_SWITCH_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer lacks the activation checkpointing",
        field="ac",
        reads=frozenset({"ac_kind"}),
        broken=lambda x, c: ~in_set(x.ac_kind, AC_KINDS, c.released.ac_kinds),
        rule=lambda x, c: f"{_release(c)} has no activation checkpointing {x.ac}",
        remedy=lambda x, c: (
            f"use {choices(kind for kind in AC_KINDS if kind in c.released.ac_kinds)}"
        ),
    ),
    Rule(
        key="block-N and uniform-N count layers of a stage",
        field="ac",
        reads=frozenset({"ac_kind", "ac_value", "pp", "virtual_stages", "split"}),
        broken=lambda x, c: (
            ((x.ac_kind == BLOCK) & (x.ac_value >= largest_stage(x, c)))
            | ((x.ac_kind == UNIFORM) & (x.ac_value > largest_stage(x, c)))
        ),
        rule=lambda x, c: f"{x.ac} is as many layers as a stage has, or more",
        remedy=lambda x, c: "set ac to full, or fewer layers",
    ),
    Rule(
        key="trainer always compiles",
        field="compile",
        reads=frozenset({"compile"}),
        applies=lambda c: c.released.always_compiles,
        broken=lambda x, c: ~np.asarray(x.compile),
        rule=lambda x, c: f"{c.trainer.title}'s graph trainer compiles the whole step",
        remedy=lambda x, c: "set compile to true",
    ),
    Rule(
        key="memory-budget checkpointing needs compile",
        field="ac",
        reads=frozenset({"ac_kind", "compile"}),
        broken=lambda x, c: np.asarray((x.ac_kind == MEMORY_BUDGET) & ~x.compile),
        rule=lambda x, c: f"{x.ac} is a pass of torch.compile, which is off",
        remedy=lambda x, c: "set compile to true, or ac to selective-op",
    ),
    Rule(
        key="selective checkpointing excludes schedules that split the backward",
        field="ac",
        reads=frozenset({"ac_kind", "pp", "pp_schedule"}),
        applies=lambda c: c.trainer.framework.splits_backward_by_group,
        # torch/utils/checkpoint.py recomputes a selectively checkpointed region only once, and W
        # asks for it again for each weight.
        broken=lambda x, c: (
            (x.ac_kind == SELECTIVE_OP) & (x.pp > 1) & splits_backward(x.pp_schedule)
        ),
        rule=lambda x, c: (
            f"{x.pp_schedule} goes back for weight gradients, which torch refuses under {x.ac}"
        ),
        remedy=lambda x, c: "set ac to none, or pp_schedule to Interleaved1F1B or 1F1B",
    ),
    Rule(
        key="TorchTitan 0.2 always shards sequences over TP",
        field="sequence_parallel",
        reads=frozenset({"tp", "sequence_parallel"}),
        applies=under("torchtitan", since="0.2", before="0.3"),
        broken=lambda x, c: np.asarray((x.tp > 1) & ~x.sequence_parallel),
        rule=lambda x, c: (
            f"TorchTitan {c.release.number} has no tp={x.tp} without sequence parallelism"
        ),
        remedy=lambda x, c: "set sequence_parallel to true, or training.trainer_version to 0.3.0",
    ),
    Rule(
        key="trainer lacks the CP method",
        field="cp_method",
        reads=frozenset({"cp", "cp_method"}),
        broken=lambda x, c: (x.cp > 1) & ~in_set(x.cp_method, CP_METHODS, c.released.cp_methods),
        rule=lambda x, c: f"{_release(c)} has no cp_method {x.cp_method}",
        remedy=lambda x, c: (
            f"use {choices(name for name in CP_METHODS if name in c.released.cp_methods)}"
        ),
    ),
    Rule(
        key="trainer lacks the dispatcher",
        field="moe_dispatcher",
        reads=frozenset({"moe_dispatcher"}),
        applies=lambda c: c.model.is_moe,
        broken=lambda x, c: ~in_set(x.moe_dispatcher, MOE_DISPATCHERS, c.released.moe_dispatchers),
        rule=lambda x, c: f"{_release(c)} has no moe_dispatcher {x.moe_dispatcher}",
        remedy=lambda x, c: (
            f"use {choices(n for n in MOE_DISPATCHERS if n in c.released.moe_dispatchers)}"
        ),
    ),
    Rule(
        key="a dispatcher without experts",
        field="moe_dispatcher",
        reads=frozenset({"moe_dispatcher"}),
        applies=lambda c: not c.model.is_moe,
        broken=lambda x, c: x.moe_dispatcher != MOE_DISPATCHERS.index("alltoall"),
        rule=lambda x, c: f"{c.model.name} has no experts to dispatch tokens to",
        remedy=lambda x, c: "leave moe_dispatcher out",
    ),
    Rule(
        key="trainer does not compile",
        field="compile",
        reads=frozenset({"compile"}),
        applies=lambda c: not c.trainer.compiles,
        broken=lambda x, c: np.asarray(x.compile),
        rule=lambda x, c: f"{c.trainer.name} runs fused kernels and does not use torch.compile",
        remedy=lambda x, c: "set compile to false",
    ),
    Rule(
        key="compile excludes schedules that split the backward",
        field="compile",
        reads=frozenset({"compile", "pp", "pp_schedule"}),
        applies=lambda c: c.trainer.compiles,
        # pytorch issue 161904, check added by pull request 162511
        broken=lambda x, c: x.compile & (x.pp > 1) & splits_backward(x.pp_schedule),
        rule=lambda x, c: (
            f"{x.pp_schedule} splits the backward, which torch refuses for compiled stages"
        ),
        remedy=lambda x, c: "set compile to false, or pp_schedule to Interleaved1F1B or 1F1B",
    ),
    Rule(
        key="async TP needs compile",
        field="async_tp",
        reads=frozenset({"async_tp", "compile"}),
        applies=lambda c: c.trainer.compiles,
        broken=lambda x, c: np.asarray(x.async_tp & ~x.compile),
        rule=lambda x, c: "async_tp is a pass of torch.compile, which is off",
        remedy=lambda x, c: "set compile to true, or async_tp to false",
    ),
    Rule(
        key="trainer lacks async TP",
        field="async_tp",
        reads=frozenset({"async_tp"}),
        applies=lambda c: not any(row.asked for row in c.trainer.tp_overlaps_at(c.release)),
        broken=lambda x, c: np.asarray(x.async_tp),
        rule=lambda x, c: f"{c.trainer.name} has nothing that async_tp would switch on",
        remedy=lambda x, c: "set async_tp to false",
    ),
    Rule(
        key="async TP is off for MLA",
        field="async_tp",
        reads=frozenset({"async_tp"}),
        applies=lambda c: _MEGATRON(c) and c.model.uses_mla,
        broken=lambda x, c: np.asarray(x.async_tp),
        rule=lambda x, c: (
            f"{c.trainer.title} switches --tp-comm-overlap off for multi-latent attention "
            f"({c.model.name})"
        ),
        remedy=lambda x, c: "set async_tp to false",
    ),
    Rule(
        key="async TP needs sequence-parallel TP",
        field="async_tp",
        reads=frozenset({"async_tp", "tp", "sequence_parallel"}),
        broken=lambda x, c: np.asarray(x.async_tp & ((x.tp == 1) | ~x.sequence_parallel)),
        rule=lambda x, c: (
            f"async_tp overlaps the all-gathers of sequence parallelism: tp={x.tp}, "
            f"sequence_parallel={x.sequence_parallel}"
        ),
        remedy=lambda x, c: "set async_tp to false, or tp to 2 or more with sequence_parallel true",
    ),
    Rule(
        key="async TP needs NVLink between all TP ranks",
        field="async_tp",
        reads=frozenset({"async_tp", "tp"}),
        broken=lambda x, c: np.asarray(x.async_tp & (x.tp > _joined_gpus(c))),
        rule=lambda x, c: (
            f"async_tp copies through symmetric memory, which joins {_joined(c)}; tp is {x.tp}"
        ),
        remedy=lambda x, c: (
            "set async_tp to false"
            + (f", or tp to at most {_joined_gpus(c)}" if _joined_gpus(c) > 1 else "")
        ),
    ),
    Rule(
        key="trainer lacks optimizer-in-backward",
        field="optimizer_in_backward",
        reads=frozenset({"optimizer_in_backward"}),
        applies=lambda c: not c.released.steps_in_backward,
        broken=lambda x, c: np.asarray(x.optimizer_in_backward),
        rule=lambda x, c: f"{_release(c)} steps the optimizer after the backward only",
        remedy=lambda x, c: "set optimizer_in_backward to false",
    ),
    Rule(
        key="optimizer-in-backward excludes gradient clipping",
        field="optimizer_in_backward",
        reads=frozenset({"optimizer_in_backward"}),
        applies=lambda c: c.training.max_grad_norm is not None,
        broken=lambda x, c: np.asarray(x.optimizer_in_backward),
        rule=lambda x, c: (
            "optimizer_in_backward steps before the norm is known, and max_grad_norm is "
            f"{c.training.max_grad_norm:g}"
        ),
        remedy=lambda x, c: "set optimizer_in_backward to false, or training.max_grad_norm to null",
    ),
    Rule(
        key="optimizer-in-backward excludes pipelines and experts",
        field="optimizer_in_backward",
        reads=frozenset({"optimizer_in_backward", "pp", "ep"}),
        broken=lambda x, c: np.asarray(x.optimizer_in_backward & ((x.pp > 1) | (x.ep > 1))),
        rule=lambda x, c: (
            f"optimizer_in_backward works with neither pp={x.pp} nor ep={x.ep} above 1"
        ),
        remedy=lambda x, c: "set optimizer_in_backward to false, or pp and ep to 1",
    ),
    Rule(
        key="optimizer-in-backward would step once a microbatch",
        field="optimizer_in_backward",
        reads=frozenset({"optimizer_in_backward", "num_microbatches"}),
        # components/optimizer.py, OptimizersInBackwardContainer: a hook on every parameter, which
        # FSDP2 calls after each microbatch's reduction; train.py, train_step: one backward each
        applies=_TITAN,
        broken=lambda x, c: np.asarray(x.optimizer_in_backward & (num_microbatches(x, c) > 1)),
        rule=lambda x, c: (
            f"{_release(c)} steps the optimizer in every backward, and "
            f"micro_batch_size={x.micro_batch_size} makes "
            f"{x.num_microbatches(c.training.global_batch_size)} of them a step"
        ),
        remedy=lambda x, c: (
            "set optimizer_in_backward to false, or micro_batch_size to "
            f"{c.training.global_batch_size // x.dp_degree}"
        ),
    ),
    Rule(
        key="optimizer-in-backward excludes DDP",
        field="optimizer_in_backward",
        reads=frozenset({"optimizer_in_backward", "dp_replicate", "tp", "pp", "sharding_degree"}),
        # torch/nn/parallel/distributed.py: the reducer's own hook follows those of a parameter's
        # gradient, so that each replica steps by its own
        applies=lambda c: c.trainer.framework.runtime == "torch",
        broken=lambda x, c: np.asarray(
            x.optimizer_in_backward
            & (x.dp_replicate > 1)
            & (sharding_degree(x, c) == 1)
            & (x.tp * x.pp == 1)
        ),
        rule=lambda x, c: (
            f"dp_replicate={x.dp_replicate} without sharding is DDP, which reduces a gradient "
            "after optimizer_in_backward has used it: replicas would differ"
        ),
        remedy=lambda x, c: (
            f"set optimizer_in_backward to false, or dp_shard to {x.dp_replicate} and dp_replicate "
            "to 1"
        ),
    ),
)


def _joined_gpus(c: Context) -> int:
    """GPUs over which async TP works: torch's micro-pipelined matmuls are for NVIDIA's only."""
    return peer_gpus(c) if c.cluster.gpu.vendor == "nvidia" else 1


def _joined(c: Context) -> str:
    if c.cluster.gpu.vendor != "nvidia":
        return f"NVIDIA GPUs, not {c.cluster.gpu.name}"
    if peer_gpus(c) == 1:
        return (
            f"no two {c.cluster.gpu.name}: over {c.cluster.fabric[0].name} they cannot read each "
            "other's memory"
        )
    return f"{peer_gpus(c)} GPUs here"


def _release(c: Context) -> str:
    """The trainer, with its release where rules differ by it."""
    return c.trainer.name if c.release.number == "0" else f"{c.trainer.name} {c.release.number}"


FEATURE_RULES: tuple[Rule, ...] = (*_ZERO_RULES, *_PRECISION_RULES, *_SWITCH_RULES)
