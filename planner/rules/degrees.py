"""Rules on parallel degrees: what GPUs, heads, widths, sequence and batch allow."""

import math

import numpy as np

from planner.columns import BoolColumn, IntColumn
from planner.rules.base import Context, Rule, choices, divides, divisors, under
from planner.specs.layout import CP_METHODS, Layout
from planner.trainers.titan_models import cuts_sequences, lacking, line_of
from planner.units import counted
from planner.work.attention import WIDEST_FUSED

PRODUCT_KEY = "degrees do not multiply to num_gpus"
# Causal load balance cuts the sequence into 2 x cp chunks and gives each rank one from the head and
# one from the tail.
HEAD_TAIL = 2


def _fitting(number: int, limit: int | None = None) -> str:
    return choices(d for d in divisors(number) if limit is None or d <= limit)


def _ranks(numbers: str, c: Context) -> str:
    """Data-parallel ranks, which are all GPUs where a trainer splits models only on request."""
    return f"num_gpus {numbers}" if "tp" in c.trainer.by_request else f"{numbers} of them"


def _product_remedy(x: Layout, c: Context) -> str:
    others = x.num_gpus // x.dp_shard
    if c.cluster.num_gpus % others == 0:
        return f"set dp_shard to {c.cluster.num_gpus // others}"
    return f"choose degrees that divide {c.cluster.num_gpus}"


def _kv_broken(tp: IntColumn, c: Context) -> BoolColumn:
    broken = np.zeros(tp.shape, dtype=np.bool_)
    for heads in c.kv_heads:
        replicated = np.asarray(tp % heads == 0) & c.released.replicates_kv_heads
        broken |= ~divides(heads, tp) & ~replicated
    return broken


def _kv_remedy(x: Layout, c: Context) -> str:
    fitting = divisors(c.num_kv_heads)
    if c.released.replicates_kv_heads:
        fitting = sorted(
            {*fitting, *(d for d in divisors(c.num_heads) if all(d % kv == 0 for kv in c.kv_heads))}
        )
    return f"try tp {choices(fitting)}"


def _mlp_widths(c: Context) -> tuple[tuple[str, int], ...]:
    """Widths that tp divides: of dense MLPs and of shared experts, where the model has them."""
    dense = c.model.intermediate_size if c.model.num_dense_layers else 0
    widths = (
        ("intermediate_size", dense),
        ("shared_expert_intermediate_size", c.model.shared_expert_intermediate_size),
    )
    return tuple((name, width) for name, width in widths if width)


def _width_broken(tp: IntColumn, c: Context) -> BoolColumn:
    result = np.zeros(tp.shape, dtype=np.bool_)
    for _, width in _mlp_widths(c):
        result |= ~divides(width, tp)
    return result


def _width_rule(x: Layout, c: Context) -> str:
    uneven = [f"{name} {width}" for name, width in _mlp_widths(c) if width % x.tp]
    return f"tp={x.tp} does not divide {' and '.join(uneven)} of {c.model.name}"


def _width_divisor(c: Context) -> int:
    return math.gcd(*(width for _, width in _mlp_widths(c)), c.num_heads)


def _cp_chunks(cp: IntColumn, c: Context) -> BoolColumn:
    return np.asarray(
        ((cp > 1) | c.trainer.seq_divisor_always) & ~divides(c.training.seq_len, HEAD_TAIL * cp)
    )


def _tp_chunks(cp: IntColumn, tp: IntColumn, c: Context) -> BoolColumn:
    chunks = HEAD_TAIL * cp
    return divides(c.training.seq_len, chunks) & ~divides(c.training.seq_len, chunks * tp)


def _next_multiple(number: int, divisor: int) -> int:
    return math.ceil(number / divisor) * divisor


def _near_multiples(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    return choices([*([below] if below else []), below + divisor])


def _cp_remedy(x: Layout, c: Context) -> str:
    seq_len = c.training.seq_len
    longer = f"seq_len {_next_multiple(seq_len, HEAD_TAIL * x.cp)}"
    return (
        f"try {longer}"
        if seq_len % HEAD_TAIL
        else f"try cp {_fitting(seq_len // HEAD_TAIL, x.cp)}, or {longer}"
    )


def _tp_remedy(x: Layout, c: Context) -> str:
    chunks = HEAD_TAIL * x.cp
    return (
        f"try tp {_fitting(c.training.seq_len // chunks, x.tp)}, or seq_len "
        f"{_next_multiple(c.training.seq_len, chunks * x.tp)}"
    )


def _ulysses_heads(c: Context) -> int:
    return math.gcd(c.num_heads, c.num_kv_heads)


def _titan_without_cp(c: Context) -> bool:
    line = line_of(c.release)
    return not lacking(c.model, line) and not cuts_sequences(c.model, line)


WIDE = f", which heads wider than {WIDEST_FUSED} have not"
_TITAN = under("torchtitan")
DEGREE_RULES: tuple[Rule, ...] = (
    Rule(
        key=PRODUCT_KEY,
        field="dp_shard",
        broken=lambda dp_replicate, dp_shard, cp, tp, pp, c: (
            dp_replicate * dp_shard * cp * tp * pp != c.cluster.num_gpus
        ),
        rule=lambda x, c: (
            f"dp_replicate {x.dp_replicate} x dp_shard {x.dp_shard} x cp {x.cp} x tp {x.tp} x "
            f"pp {x.pp} = {x.num_gpus} "
            f"ranks on {counted(c.cluster.num_gpus, 'GPU')}"
        ),
        remedy=_product_remedy,
    ),
    Rule(
        key="tp does not divide the attention heads",
        field="tp",
        broken=lambda tp, c: ~divides(c.num_heads, tp),
        rule="tp={x.tp} does not divide {c.num_heads} attention heads of {c.model.name}",
        remedy=lambda x, c: f"try tp {_fitting(math.gcd(c.num_heads, c.num_kv_heads))}",
    ),
    Rule(
        key="tp does not divide the KV heads",
        field="tp",
        applies=lambda c: not c.model.uses_mla,
        broken=_kv_broken,
        rule="tp={x.tp} does not divide {c.num_kv_heads} KV heads of {c.model.name}",
        remedy=_kv_remedy,
    ),
    Rule(
        key="tp does not divide the MLP width",
        field="tp",
        applies=lambda c: bool(_mlp_widths(c)),
        broken=_width_broken,
        rule=_width_rule,
        remedy=lambda x, c: f"try tp {_fitting(_width_divisor(c))}",
    ),
    Rule(
        key="cp does not cut the sequence evenly",
        field="cp",
        broken=_cp_chunks,
        rule=lambda x, c: (
            f"seq_len {c.training.seq_len} is not divisible by 2 x cp = {HEAD_TAIL * x.cp} "
            "(causal load balance)"
        ),
        remedy=_cp_remedy,
    ),
    Rule(
        key="tp does not cut the sequence evenly",
        field="tp",
        applies=lambda c: c.trainer.seq_divisor_always,
        broken=_tp_chunks,
        rule=lambda x, c: (
            f"seq_len {c.training.seq_len} is not divisible by 2 x cp x tp = "
            f"{HEAD_TAIL * x.cp * x.tp} "
            f"(causal load balance, sequence parallelism)"
        ),
        remedy=_tp_remedy,
    ),
    Rule(
        key="tp does not cut the sequence evenly",
        field="sequence_parallel",
        applies=lambda c: not c.trainer.seq_divisor_always,
        broken=lambda sequence_parallel, cp, tp, c: (
            sequence_parallel
            & ((c.training.seq_len // cp) % tp != 0)
            & (c.training.seq_len % cp == 0)
        ),
        rule=lambda x, c: (
            f"{counted(c.training.seq_len // x.cp, 'token')} of a sequence on a rank are not "
            f"divisible by tp={x.tp}"
        ),
        remedy=lambda x, c: (
            f"set sequence_parallel to false, or seq_len to a multiple of {x.cp * x.tp}"
        ),
    ),
    Rule(
        key="ulysses needs cp to divide the heads of a TP rank",
        field="cp_method",
        applies=lambda c: "ulysses" in c.trainer.cp_methods,
        broken=lambda cp, tp, cp_method, c: (
            (cp_method == CP_METHODS.index("ulysses"))
            & (cp > 1)
            & (np.maximum(_ulysses_heads(c) // tp, 1) % cp != 0)
        ),
        rule=lambda x, c: (
            f"ulysses: cp={x.cp} does not divide {max(_ulysses_heads(c) // x.tp, 1)} KV heads of "
            f"a TP rank of {c.model.name}"
        ),
        remedy=lambda x, c: (
            f"set cp_method to allgather, or cp to {_fitting(max(_ulysses_heads(c) // x.tp, 1))}"
        ),
    ),
    Rule(
        key="context parallelism needs flash attention",
        field="cp",
        applies=lambda c: c.unfused,
        broken=lambda cp: cp > 1,
        rule=lambda x, c: (
            f"cp={x.cp} with unfused attention: no trainer passes keys and values round without a "
            f"flash kernel{'' if c.training.attention_kernel == 'unfused' else WIDE}"
        ),
        remedy="set cp to 1, or training.attention_kernel to flash",
    ),
    Rule(
        key="TorchTitan's model lacks context parallelism",
        field="cp",
        applies=lambda c: _TITAN(c) and _titan_without_cp(c),
        broken=lambda cp: cp > 1,
        rule=lambda x, c: (
            f"cp={x.cp}: TorchTitan {line_of(c.release)}'s model for {c.model.name} refuses "
            "context parallelism"
        ),
        remedy="set cp to 1, or trainer_version to 0.3.0",
    ),
    Rule(
        key="data-parallel ranks do not divide the global batch",
        field="dp_shard",
        broken=lambda dp_replicate, dp_shard, c: (
            ~divides(c.training.global_batch_size, dp_replicate * dp_shard)
        ),
        rule="{x.dp_degree} data-parallel ranks do not divide global_batch_size "
        "{c.training.global_batch_size}",
        remedy=lambda x, c: (
            f"try {_ranks(_fitting(math.gcd(c.training.global_batch_size, c.cluster.num_gpus)), c)}"
            f", or global_batch_size {_near_multiples(c.training.global_batch_size, x.dp_degree)}"
        ),
    ),
    Rule(
        key="microbatch does not divide the local batch",
        field="micro_batch_size",
        broken=lambda dp_replicate, dp_shard, micro_batch_size, c: (
            divides(c.training.global_batch_size, dp_replicate * dp_shard)
            & ~divides(c.training.global_batch_size, dp_replicate * dp_shard * micro_batch_size)
        ),
        rule=lambda x, c: (
            f"micro_batch_size={x.micro_batch_size} does not divide the "
            f"{counted(c.training.global_batch_size // x.dp_degree, 'sequence')} "
            f"of a data-parallel rank ({c.training.global_batch_size} / {x.dp_degree})"
        ),
        remedy=lambda x, c: (
            f"try micro_batch_size {_fitting(c.training.global_batch_size // x.dp_degree)}"
        ),
    ),
)
