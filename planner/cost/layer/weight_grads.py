"""Memory and time of backwards that compute weight gradients (W) after input gradients (I).

torch runs W on the graph that I leaves behind (torch 2.13 pipelining/_backward.py,
`retain_graph=True`). All that the forward saved stays in memory, and so do the gradients that came
into each layer with weights. W asks autograd for one group of parameters at a time, and a
checkpointed region is recomputed for each: 9 times in a Llama layer. (Selective checkpointing
refuses the second time: `planner.rules`.)
Megatron's zero-bubble fork saves only each linear layer's input and incoming gradient (its
WeightGradStore).
"""

from collections.abc import Sequence

import numpy as np

from planner.columns import FloatColumn, in_order
from planner.cost.layer.context import CostContext
from planner.trainers.base import TrainerRules
from planner.work.ops import Elementwise, Gemm, Op


def parameter_groups(ops: Sequence[Op]) -> tuple[Gemm | Elementwise, ...]:
    """The operations whose weight gradients wait for W: GEMMs and norms."""
    return tuple(
        op
        for op in ops
        if isinstance(op, Gemm) or (isinstance(op, Elementwise) and op.name.endswith("_norm"))
    )


def incoming_bytes(context: CostContext, ops: Sequence[Op]) -> FloatColumn:
    """Bytes of gradients that wait from I until W, (U,).

    torch: those coming into each group of parameters; Megatron: those of GEMMs' outputs.
    """
    nothing = np.zeros(len(context.batch))
    incoming = [context.bytes_of(op.output) for op in _waiting(context, ops) if op.output]
    return in_order([nothing, *incoming])


def input_bytes(context: CostContext, ops: Sequence[Op]) -> FloatColumn:
    """Bytes of the inputs of GEMMs, each once, (U,)."""
    sources = {op.saves[0].name: op.saves[0] for op in ops if isinstance(op, Gemm)}
    return in_order([np.zeros(len(context.batch)), *map(context.bytes_of, sources.values())])


def repeats(rules: TrainerRules, ops: Sequence[Op]) -> int:
    """How often W recomputes a checkpointed unit, exchanges included.

    Once for each group of parameters.
    """
    return len(parameter_groups(ops)) if rules.framework.splits_backward_by_group else 0


def _waiting(context: CostContext, ops: Sequence[Op]) -> tuple[Gemm | Elementwise, ...]:
    if context.rules.framework.splits_backward_by_group:
        return parameter_groups(ops)
    return tuple(op for op in ops if isinstance(op, Gemm))
