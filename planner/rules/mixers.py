"""Rules on recurrent mixers: which heads TP and context parallelism cut, and who cuts them."""

import math

import numpy as np

from planner.columns import BoolColumn, LayoutBatch
from planner.rules.base import Context, Rule, choices, divides, divisors, under

_CUTTERS = frozenset({"megatron", "megatron-bridge"})


def _heads(c: Context) -> int:
    """The number that TP times CP divides."""
    return math.gcd(*c.model.recurrent_heads)


def _recurrent(c: Context) -> bool:
    return not {"attention", "none"}.issuperset(c.model.mixers)


def _uneven(x: LayoutBatch, c: Context) -> BoolColumn:
    return ~divides(_heads(c), x.tp * x.cp)


MIXER_RULES: tuple[Rule, ...] = (
    # Megatron-Core ssm/gated_delta_net.py, mamba_context_parallel.py; transformer_config.py
    # (linear_num_key_heads must be a multiple of tp x cp)
    Rule(
        key="tp x cp does not divide the heads of a recurrent mixer",
        field="tp",
        reads=frozenset({"tp", "cp"}),
        applies=_recurrent,
        broken=_uneven,
        rule=lambda x, c: (
            f"tp={x.tp} x cp={x.cp} does not divide the {_heads(c)} groups of heads that recurrent "
            f"layers of {c.model.name} have"
        ),
        remedy=lambda x, c: f"try tp x cp {choices(divisors(_heads(c)))}",
    ),
    # transformers' tensor-parallel plan gathers what it projects, and its scan has no ranks
    Rule(
        key="the trainer does not cut recurrent mixers",
        field="tp",
        reads=frozenset({"tp", "cp"}),
        applies=lambda c: _recurrent(c) and c.training.trainer not in _CUTTERS,
        broken=lambda x, c: np.asarray(x.tp * x.cp > 1),
        rule=lambda x, c: (
            f"tp={x.tp}, cp={x.cp}: under {c.trainer.title} every rank runs recurrent layers whole"
        ),
        remedy=lambda x, c: "set tp and cp to 1, or training.trainer to megatron",
    ),
    # core 0.17 and 0.18 transformer/transformer_config.py (__post_init__)
    Rule(
        key="gated DeltaNet under context parallelism came with a release",
        field="cp",
        reads=frozenset({"cp"}),
        applies=lambda c: "gated-delta" in c.model.mixers and under("megatron", before="0.18")(c),
        broken=lambda x, c: np.asarray(x.cp > 1),
        rule=lambda x, c: (
            f"{c.trainer.title} {c.release.number} has no gated DeltaNet with cp={x.cp}"
        ),
        remedy=lambda x, c: "set cp to 1, or training.trainer_version to 0.18 or later",
    ),
)
