"""Which operations of a unit depend on how routed experts are placed and dispatched."""

from collections.abc import Sequence
from functools import lru_cache

from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op

# Layout fields that nothing outside of routed experts depends on
EXPERT_FIELDS = ("ep", "etp", "moe_dispatcher")
# Dimensions that depend on them (`axes.local_sizes`)
EXPERT_DIMS = frozenset(
    {
        "expert_ffn", "experts", "experts_local", "tokens_copied", "tokens_exchanged",
        "tokens_grouped", "tokens_moe", "tokens_per_expert", "tokens_regrouped", "tokens_routed",
        "tokens_sent", "tokens_unsorted",
    }
)  # fmt: skip
EXPERT_SITES = frozenset({"ep_exchange", "etp_enter", "etp_exit"})


@lru_cache(maxsize=512)
def num_before_experts(ops: tuple[Op, ...]) -> int:
    """How many operations come before the first that depends on EXPERT_FIELDS.

    None of them costs more or less by what comes behind them: GEMMs behind neither cover their
    communication nor read a tensor that they quantised.
    """
    count = next((at for at, op in enumerate(ops) if _of_experts(op)), len(ops))
    while 0 < count < len(ops) and _tied(ops[:count], ops[count:]):
        count -= 1
    return count


@lru_cache(maxsize=512)
def num_alike(ops: tuple[Op, ...], others: tuple[Op, ...]) -> int:
    """How many operations two units begin with that are equal, and cost as much in both.

    See `num_before_experts`.
    """
    pairs = enumerate(zip(ops, others, strict=False))
    count = next((at for at, (one, other) in pairs if one != other), min(len(ops), len(others)))
    while count and any(_tied(unit[:count], unit[count:]) for unit in (ops, others)):
        count -= 1
    return count


def _of_experts(op: Op) -> bool:
    match op:
        case Gemm():
            dims = (*op.rows, *op.cols, *op.depth, *op.batch)
            return op.role == "expert" or not EXPERT_DIMS.isdisjoint(dims)
        case Collective():
            return op.site in EXPERT_SITES or not EXPERT_DIMS.isdisjoint(op.tensor.dims)
        case Elementwise():
            return op.waits > 0 or not EXPERT_DIMS.isdisjoint(op.dims)
        case Attention():
            return False


def _tied(before: Sequence[Op], behind: Sequence[Op]) -> bool:
    gemms = [op for op in behind if isinstance(op, Gemm)]
    read = {tensor.name for op in gemms for tensor in (*op.reads, *op.saves)}
    made = {tensor.name for op in before if isinstance(op, Collective) for tensor in op.makes}
    saved = {tensor.name for op in before if isinstance(op, Gemm) for tensor in op.saves}
    return not read.isdisjoint(made | saved)
