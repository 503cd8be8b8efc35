"""Rules on precisions that GPU, trainer and layout can compute in."""

import numpy as np

from planner.columns import BoolColumn, IntColumn
from planner.precision import PRECISIONS, Recipe, bf16_tail
from planner.rules.base import Context, Rule, choices, in_set, under
from planner.specs.layout import DTYPES, Layout
from planner.work.quantised import local_shape, low_share, products

TENSORWISE, DELAYED, MXFP8 = map(
    PRECISIONS.names.index, ("float8-tensorwise", "float8-delayed", "mxfp8")
)
SINGLES = frozenset({"fp32", "tf32"})
_TITAN, _MEGATRON = under("torchtitan"), under("megatron")


def gpu_precisions(c: Context) -> tuple[str, ...]:
    """Precisions that the GPU has units for and the libraries have kernels for."""
    gpu = c.cluster.gpu
    row = gpu.kernel_family
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


def _unaligned_weights(
    tp: IntColumn, etp: IntColumn, precision: IntColumn, c: Context
) -> BoolColumn:
    broken = np.zeros(np.broadcast_shapes(tp.shape, etp.shape, precision.shape), dtype=np.bool_)
    present = set(np.unique(precision).tolist())
    for code, recipe in _quantised(c):
        if code not in present:
            continue
        for kind, _ in c.model.distinct_layers():
            for op in products(c.model, kind):
                if low_share(recipe, op, c.model) > 0:
                    sides = local_shape(op, c.model, tp.astype(np.float64), etp.astype(np.float64))
                    off = [
                        (side == np.floor(side)) & (side % recipe.multiple != 0) for side in sides
                    ]
                    broken |= (precision == code) & (off[0] | off[1])
    return broken


def _unaligned_tokens(
    precision: IntColumn, cp: IntColumn, micro_batch_size: IntColumn, c: Context
) -> BoolColumn:
    tokens = micro_batch_size * c.training.seq_len // cp
    broken = np.zeros(np.broadcast_shapes(tokens.shape, precision.shape), dtype=np.bool_)
    for code, recipe in _quantised(c):
        broken |= (precision == code) & (tokens % recipe.rows_multiple != 0)
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


PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer lacks the precision",
        field="precision",
        broken=lambda precision, c: ~in_set(precision, PRECISIONS, trainer_precisions(c)),
        rule="{c.release_name} does not train {c.model.name} in {x.precision}",
        remedy=lambda x, c: f"use {_both(c)}",
    ),
    Rule(
        key="GPU lacks the precision",
        field="precision",
        broken=lambda precision, c: ~in_set(precision, PRECISIONS, gpu_precisions(c)),
        rule=lambda x, c: f"{c.cluster.gpu.name} has no {_missing(x, c)}",
        remedy=lambda x, c: f"use {_both(c)}",
    ),
    Rule(
        key="GPU lacks fp32 matmuls",
        field="param_dtype",
        broken=lambda param_dtype, c: (
            (param_dtype == DTYPES.index("float32"))
            & np.bool_(not SINGLES & set(c.cluster.gpu.peak_flops_per_second))
        ),
        rule="{c.cluster.gpu.name} lists no fp32 or tf32 matrix units, which param_dtype float32 "
        "needs",
        remedy="set param_dtype to bfloat16",
    ),
    Rule(
        key="fp32 parameters exclude low precision",
        field="precision",
        # arguments.py: --fp16, --bf16 and the fp8 recipes set params_dtype
        applies=_MEGATRON,
        broken=lambda param_dtype, precision: (
            (param_dtype == DTYPES.index("float32")) & (precision != PRECISIONS.names.index("bf16"))
        ),
        rule="{x.precision} computes in 16 bits or fewer; float32 parameters of {c.trainer.name} "
        "do not",
        remedy="set param_dtype to bfloat16, or precision to bf16",
    ),
    Rule(
        key="trainer keeps fp32 masters",
        field="master_dtype",
        applies=_MEGATRON,  # --main-params-dtype takes fp32 and fp16
        broken=lambda master_dtype: master_dtype != DTYPES.index("float32"),
        rule="{c.trainer.name} keeps main parameters in fp32 or fp16, not {x.master_dtype}",
        remedy="set master_dtype to float32",
    ),
    Rule(
        key="low precision needs aligned weights",
        field="precision",
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
        broken=_unaligned_tokens,
        rule=lambda x, c: (
            f"{x.precision} needs tokens a rank in multiples of {_recipe(x, c).rows_multiple}: "
            "micro_batch_size x seq_len "
            f"/ cp is {x.micro_batch_size * c.training.seq_len // x.cp}"
        ),
        remedy="use bf16, a larger micro_batch_size, or a seq_len that is a multiple of 128 x cp",
    ),
    Rule(
        key="float8 tensorwise with TP lacks MLA",
        field="precision",
        # torchtitan models/deepseek_v3/infra/parallelize.py
        applies=lambda c: _TITAN(c) and c.model.uses_mla,
        broken=lambda precision, tp: (precision == TENSORWISE) & (tp > 1),
        rule="{c.trainer.name} does not implement float8-tensorwise with tp={x.tp} for MLA models "
        "({c.model.name})",
        remedy="use float8-rowwise or bf16, or set tp to 1",
    ),
    Rule(
        key="mxfp8 with TP excludes compile",
        field="compile",
        # torchtitan 0.2.2 components/quantization/mx.py; 0.3.0's has no such check
        applies=under("torchtitan", before="0.3"),
        broken=lambda precision, tp, compile: (precision == MXFP8) & (tp > 1) & compile,
        rule="{c.trainer.name} refuses mxfp8 with tp={x.tp} under compile",
        remedy="set compile to false, tp to 1, or precision to float8-rowwise",
    ),
    Rule(
        key="float8 all-gather is tensorwise only",
        field="float8_all_gather",
        # megatron/training/arguments.py takes --fp8-param-gather with delayed scaling too
        broken=lambda float8_all_gather, precision, c: (
            float8_all_gather & (precision != TENSORWISE) & ~((precision == DELAYED) & _MEGATRON(c))
        ),
        rule="float8_all_gather needs one scale a tensor, precision is {x.precision}",
        remedy="set precision to float8-tensorwise, or float8_all_gather to false",
    ),
    Rule(
        key="float8 all-gather needs dp_shard",
        field="float8_all_gather",
        # torchtitan components/quantization/float8.py; Megatron's optimizer is cut over CP, too
        applies=lambda c: not _MEGATRON(c),
        broken=lambda float8_all_gather, dp_shard: float8_all_gather & (dp_shard == 1),
        rule="float8_all_gather gathers FSDP's shards, and dp_shard is 1",
        remedy="set float8_all_gather to false, or dp_shard to 2 or more",
    ),
    Rule(
        key="float8 all-gather needs the distributed optimizer",
        field="float8_all_gather",
        # megatron/training/arguments.py: "--fp8-param-gather only supported with distributed
        # optimizer"
        applies=_MEGATRON,
        broken=lambda float8_all_gather, zero_stage: float8_all_gather & (zero_stage == 0),
        rule="float8_all_gather is the distributed optimizer's, which zero_stage=0 does without",
        remedy="set zero_stage to 1, or float8_all_gather to false",
    ),
    Rule(
        key="float8 all-gather beside offload is of delayed scaling",
        field="float8_all_gather",
        # megatron/training/arguments.py, core 0.14 to 0.20: "the optimizer cpu offload must be used
        # in conjunction with --fp8-recipe delayed"
        applies=_MEGATRON,
        broken=lambda float8_all_gather, cpu_offload, precision: (
            float8_all_gather & cpu_offload & (precision != DELAYED)
        ),
        rule="{c.trainer.name} refuses float8_all_gather of {x.precision} with offload",
        remedy="set float8_all_gather or cpu_offload to false",
    ),
)
