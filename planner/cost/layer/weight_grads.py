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
from planner.work.ops import Elementwise, Gemm, Op


def parameter_groups(ops: Sequence[Op]) -> tuple[Gemm | Elementwise, ...]:
    """The operations whose weight gradients wait for W: GEMMs and norms."""
    return tuple(
        op
        for op in ops
        if isinstance(op, Gemm) or (isinstance(op, Elementwise) and op.name.endswith("_norm"))
    )


def held_bytes(context: CostContext, ops: Sequence[Op], saved_bytes: FloatColumn) -> FloatColumn:
    """Bytes of one microbatch of a unit that stay from I until W, (U,).

    torch: what the forward saved, and the gradients coming into each group of parameters.
    Megatron: the inputs of GEMMs, each once, and the gradients of their outputs.
    """
    groups = (
        parameter_groups(ops)
        if context.rules.framework.splits_backward_by_group
        else tuple(op for op in ops if isinstance(op, Gemm))
    )
    incoming = [context.bytes_of(op.output) for op in groups if op.output is not None]
    kept = (
        saved_bytes if context.rules.framework.splits_backward_by_group else _inputs(context, ops)
    )
    return np.asarray(kept + in_order(incoming)) if incoming else np.zeros(len(context.batch))


def _inputs(context: CostContext, ops: Sequence[Op]) -> FloatColumn:
    sources = {op.saves[0].name: op.saves[0] for op in ops if isinstance(op, Gemm)}
    return in_order([context.bytes_of(tensor) for tensor in sources.values()])


def redone_seconds(
    context: CostContext, ops: Sequence[Op], recompute_seconds: FloatColumn
) -> FloatColumn:
    """Seconds that W spends on recomputing one microbatch of a unit, exchanges included, (U,).

    A checkpointed unit is recomputed once for each group of parameters.
    """
    return recompute_seconds * (
        len(parameter_groups(ops)) if context.rules.framework.splits_backward_by_group else 0.0
    )
