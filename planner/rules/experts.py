"""Rules on expert parallelism.

Experts regroup the ranks of one pipeline stage: ep x etp of them hold one set of experts.
"""

import numpy as np

from planner.columns import BoolColumn, IntColumn, LayoutBatch
from planner.rules.base import Context, Rule, choices, divides, divisors, under
from planner.specs.layout import Layout
from planner.units import counted


def expert_ranks(x: LayoutBatch, c: Context) -> IntColumn:
    """Ranks over which experts may spread. (N,).

    dp_shard x cp x tp, and also x dp_replicate where the trainer allows it.
    """
    ranks = x.dp_shard * x.cp * x.tp
    return ranks * x.dp_replicate if c.trainer.ep_over_replicas else ranks


def _pool(x: Layout, c: Context) -> int:
    ranks = x.dp_shard * x.cp * x.tp
    return ranks * x.dp_replicate if c.trainer.ep_over_replicas else ranks


def _pool_text(c: Context) -> str:
    return (
        "dp_replicate x dp_shard x cp x tp" if c.trainer.ep_over_replicas else "dp_shard x cp x tp"
    )


def _etp_width(x: LayoutBatch, c: Context) -> BoolColumn:
    """Where the width of an expert does not divide by its TP degree. (N,).

    TorchTitan cuts experts by tp while ep = 1, whatever etp is.
    Source: torchtitan expert_parallel.py, apply_moe_ep_tp.
    """
    cut = np.where(x.ep > 1, x.etp, x.tp) if c.trainer.etp_one_or_tp else x.etp
    return ~divides(c.model.moe_intermediate_size, cut)


def _expert_widths(x: Layout, c: Context) -> list[int]:
    return [d for d in divisors(c.model.moe_intermediate_size) if d <= max(x.etp, x.tp)]


_TITAN_03 = under("torchtitan", since="0.3")
EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        key="expert parallelism without experts",
        field="ep",
        reads=frozenset({"ep", "etp"}),
        applies=lambda c: not c.model.is_moe,
        broken=lambda x, c: np.asarray((x.ep > 1) | (x.etp > 1)),
        rule=lambda x, c: f"ep={x.ep} x etp={x.etp}: {c.model.name} has no experts",
        remedy=lambda x, c: "set ep and etp to 1",
    ),
    Rule(
        key="ep does not divide the experts",
        field="ep",
        reads=frozenset({"ep"}),
        applies=lambda c: c.model.is_moe,
        broken=lambda x, c: ~divides(c.model.num_experts, x.ep),
        rule=lambda x, c: (
            f"ep={x.ep} does not divide {counted(c.model.num_experts, 'expert')} of {c.model.name}"
        ),
        remedy=lambda x, c: f"try ep {choices(divisors(c.model.num_experts))}",
    ),
    Rule(
        key="etp is neither 1 nor tp",
        field="etp",
        reads=frozenset({"ep", "etp", "tp"}),
        applies=lambda c: c.model.is_moe and c.trainer.etp_one_or_tp,
        broken=lambda x, c: np.asarray((x.ep > 1) & (x.etp != 1) & (x.etp != x.tp)),
        rule=lambda x, c: f"etp={x.etp} is neither 1 nor tp={x.tp}, as {c.trainer.name} needs",
        remedy=lambda x, c: f"set etp to 1 or {x.tp}",
    ),
    Rule(
        key="TorchTitan 0.3 never splits experts over TP",
        field="etp",
        reads=frozenset({"ep", "etp"}),
        applies=lambda c: c.model.is_moe and _TITAN_03(c),
        broken=lambda x, c: np.asarray((x.ep > 1) & (x.etp != 1)),
        rule=lambda x, c: (
            f"TorchTitan {c.release.number} has no setting for etp={x.etp}: with ep={x.ep} "
            "experts are whole"
        ),
        remedy=lambda x, c: "set etp to 1, or training.trainer_version to 0.2.2",
    ),
    Rule(
        key="etp does not divide the expert width",
        field="etp",
        reads=frozenset({"ep", "etp", "tp"}),
        applies=lambda c: c.model.is_moe,
        broken=_etp_width,
        rule=lambda x, c: (
            f"etp={x.etp} (tp={x.tp}) does not divide {c.model.name}'s moe_intermediate_size "
            f"{c.model.moe_intermediate_size}"
        ),
        remedy=lambda x, c: f"try etp {choices(_expert_widths(x, c))}",
    ),
    Rule(
        key="ep x etp does not divide its ranks",
        field="ep",
        reads=frozenset({"dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"}),
        applies=lambda c: c.model.is_moe,
        broken=lambda x, c: np.asarray(
            (x.ep * x.etp > 1) & (expert_ranks(x, c) % (x.ep * x.etp) != 0)
        ),
        rule=lambda x, c: (
            f"ep={x.ep} x etp={x.etp} does not divide {counted(_pool(x, c), 'rank')} "
            f"({_pool_text(c)})"
        ),
        remedy=lambda x, c: f"make ep x etp one of {choices(divisors(_pool(x, c)))}",
    ),
    Rule(
        key="tp with ep needs sequence parallelism",
        field="sequence_parallel",
        reads=frozenset({"tp", "ep", "sequence_parallel"}),
        applies=lambda c: c.model.is_moe and c.trainer.sp_with_experts,
        broken=lambda x, c: np.asarray((x.ep > 1) & (x.tp > 1) & ~x.sequence_parallel),
        rule=lambda x, c: (
            f"{c.trainer.name} refuses ep={x.ep} with tp={x.tp} without sequence parallelism"
        ),
        remedy=lambda x, c: "set sequence_parallel to true",
    ),
)
