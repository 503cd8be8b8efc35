"""Lightning attention as operations: linear attention with a fixed decay, in blocks of tokens.

Every head keeps a state of its keys times its values. A block multiplies with itself and with the
state. Operations and saved tensors are those of transformers' own code, whose blocks are a loop of
products; kernels that fuse one save less.
Sources: Qin et al. 2024 (Lightning Attention-2); transformers 5.24 models/minimax
    (MiniMaxLightningAttention).
"""

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.ops import Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import ATTENTION_IN, Code, across_heads, output_projection, projection

TP_DIMS = frozenset({"lightning_in", "lightning_heads"})
VALUES: Dims = ("tokens", "lightning_heads", "lightning_dim")


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions on one rank: TP divides heads."""
    ones, width = np.ones_like(tp), model.linear_value_head_dim
    return {
        "lightning_in": 3.0 * model.linear_value_width / tp,
        "lightning_sent": 4.0 * model.linear_value_width / tp,
        "lightning_heads": model.linear_num_value_heads / tp,
        "lightning_dim": width * ones,
        "lightning_block": model.lightning_block_size * ones,
        "lightning_states": width**2 / model.lightning_block_size * ones,
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection."""
    into = projection("lightning_in", ("lightning_in",), ("hidden",), ATTENTION_IN)
    gate = projection("lightning_gate", VALUES[1:], ("hidden",), ATTENTION_IN)
    mixed = Tensor("lightning_mixed", ("tokens", "lightning_in"))
    core, out = (Tensor(f"lightning_{name}", VALUES) for name in ("core", "gated"))
    sent = Tensor("lightning_sent", ("tokens", "lightning_sent"))
    return (
        into,
        gate,
        across_heads("lightning_heads", sent),
        Elementwise(
            name="lightning_silu",
            dims=mixed.dims,
            kernels=1,
            moves=Moves(2.0, 3.0, 2.0, 3.0),
            saves=(into.output,),
            reads=(into.output,),
            makes=(mixed,),
        ),
        _blocks(mixed, core),
        _norm(core, gate.output, out),
        across_heads("lightning_out_heads", Tensor("lightning_returned", VALUES)),
        output_projection("lightning_out", VALUES[1:], out),
    )


def _blocks(mixed: Tensor, core: Tensor) -> Elementwise:
    """Queries with keys and that with values, queries with the state, keys with values into it.

    Each product saves copies of its operands in the order of heads: queries and keys plain and with
    their decays, values twice, the block's matrix with its decay, and the state before the block.
    Moves are those of the products' operands, copies and results.
    """
    inside: Dims = ("tokens", "lightning_heads", "lightning_block", "lightning_dim")
    state: Dims = ("tokens", "lightning_heads", "lightning_dim", "lightning_dim")
    once = (inside, inside, state, state)
    names = ("q", "k", "v", "q_decayed", "k_decayed", "v_again")
    matrix = Tensor("lightning_matrix", ("tokens", "lightning_heads", "lightning_block"))
    states = Tensor("lightning_kept", ("tokens", "lightning_heads", "lightning_states"))
    return Elementwise(
        name="lightning_blocks",
        dims=VALUES,
        kernels=14,
        moves=Moves(34.0, 60.0, 20.0, 40.0),
        saves=(*(Tensor(f"lightning_{one}", VALUES) for one in names), matrix, states),
        reads=(mixed,),
        makes=(core,),
        products=once,
        backward_products=once * 2,
    )


def _norm(core: Tensor, gate: Tensor, out: Tensor) -> Elementwise:
    """RMSNorm over all heads, times the sigmoid of the gate, of which only the result stays."""
    saved = (Tensor(f"lightning_{name}", VALUES) for name in ("normed", "sigmoid"))
    return Elementwise(
        name="lightning_norm",
        dims=VALUES,
        kernels=9,
        moves=Moves(16.0, 32.0, 4.0, 8.0),
        saves=(core, *saved, Tensor("lightning_rstd", ("tokens",), width="fp32")),
        reads=(core, gate),
        makes=(out,),
    )
