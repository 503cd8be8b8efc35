"""Norms with a gate as operations (A.X K2).

The output of a norm is multiplied by the sigmoid of a projection of itself, of low rank with an
activation between. No trainer divides it over TP.
Source: transformers 5.24 models/axk2 (AXK2GatedRMSNorm).
"""

from planner.specs.model import ModelSpec
from planner.work.feed_forward import activation
from planner.work.ops import Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import HIDDEN_SP, Code, norm, product, upcast

LOW: Dims = ("tokens_sp", "norm_rank")


def branch_norm(
    model: ModelSpec, name: str, source: Tensor, code: Code, *, gates: bool = True
) -> tuple[tuple[Op, ...], Tensor]:
    """The norm before a branch and its output, gated where the model has it and this one is."""
    normed = norm(model, name, source, code)
    output = normed.makes[0]
    if not (gates and model.gated_norm_rank):
        return (normed,), output
    activated = Tensor(f"{name}_act", LOW)
    gate, gated = (Tensor(f"{name}_{one}", HIDDEN_SP) for one in ("w2_out", "gated"))
    ops = (
        normed,
        product(f"{name}_w1", LOW[:1], ("hidden",), LOW[1:], output),
        activation(name, LOW, "gelu"),
        product(f"{name}_w2", LOW[:1], LOW[1:], ("hidden",), activated),
        Elementwise(
            name=f"{name}_gate",
            dims=HIDDEN_SP,
            kernels=4,
            moves=Moves(15.0, 26.0, 3.0, 5.0),
            saves=(output, *upcast(gate)),
            reads=(output, gate),
            makes=(gated,),
        ),
    )
    return ops, gated
