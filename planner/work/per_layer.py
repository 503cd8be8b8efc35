"""Per-layer embeddings as operations (Gemma 4): a second input of each layer.

A table and a projection of the embedding give all layers theirs at once, before the first; each
layer multiplies its part by a gate. All parts stay until the first layer's backward, whatever is
recomputed, and the gradient of one part is one of all, of zeros but there, which is added to the
others'. No trainer divides any of it over TP but the table.
Source: transformers 5.24 models/gemma4 (get_per_layer_inputs, project_per_layer_inputs,
    Gemma4TextDecoderLayer); torch tools/autograd/derivatives.yaml (select_backward).
"""

from dataclasses import replace

from planner.specs.model import ModelSpec
from planner.work.ops import Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import HIDDEN_SP, Code, embedding, norm, product

ALL: Dims = ("tokens_sp", "layers", "per_layer")
OWN: Dims = ("tokens_sp", "per_layer")
INPUTS = Tensor("per_layer_inputs", ALL)


def looked_up(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """Rows of the table, scaled, and the normalised projection of the embedding, for all layers."""
    rows, total = embedding("per_layer_rows", "per_layer_full", dims=("tokens", *ALL[1:]))
    source = Tensor("embedded", HIDDEN_SP)
    projected = Tensor("per_layer_projected", ALL)
    return (
        replace(rows, kernels=3, moves=rows.moves._replace(forward=4.0, backward=6.0)),
        total,
        product("per_layer_model", ("tokens_sp",), ("hidden",), ALL[1:], source, projected),
        norm(model, "per_layer_model_norm", projected, code),
        # scales of the projection and of the sum of both
        Elementwise(
            name="per_layer_sum",
            dims=ALL,
            kernels=3,
            moves=Moves(7.0, 4.0, 3.0, 1.0),
            saves=(INPUTS,),
            makes=(INPUTS,),
        ),
    )


def gated(model: ModelSpec, ends: tuple[Tensor, Tensor], code: Code) -> tuple[Op, ...]:
    """The layer's part by a gate of the stream, projected and added to it, and the layer's scale.

    ends: the residual stream before and after it.
    """
    stream, end = ends
    gate, given = (Tensor(f"per_layer_{name}", OWN) for name in ("gate_out", "product"))
    activated = Tensor("per_layer_activated", OWN, eager_only=True)
    branch = Tensor("per_layer_out", HIDDEN_SP)
    normed = norm(model, "per_layer_norm", branch, code)
    return (
        product("per_layer_gate", OWN[:1], ("hidden",), OWN[1:], stream),
        Elementwise(
            name="per_layer_product",
            dims=OWN,
            kernels=2,
            moves=Moves(5.0, 9.0, 3.0, 5.0),
            saves=(gate, activated),
            reads=(gate, INPUTS),
            makes=(given,),
            workspace=(INPUTS,),
        ),
        # zeros of all parts, and their sum with later layers'
        Elementwise(name="per_layer_parts", dims=ALL, kernels=2, moves=Moves(0.0, 4.0, 0.0, 4.0)),
        product("per_layer_back", OWN[:1], OWN[1:], ("hidden",), given, branch),
        normed,
        Elementwise(
            name="per_layer_residual",
            dims=HIDDEN_SP,
            kernels=2,
            moves=Moves(5.0, 4.0, 2.0, 2.0),
            reads=(stream, *normed.makes),
            makes=(end,),
        ),
    )
