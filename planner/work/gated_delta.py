"""Gated DeltaNet as operations: projection, short convolution, delta rule in chunks, gated norm.

Every head keeps a state of key width x value width. A chunk of tokens multiplies with itself (the
delta rule's triangular system, and attention within the chunk) and with the state.
Sources: Yang, Kautz, Hatamizadeh 2024 (Gated DeltaNet); fla 0.6 ops/gated_delta_rule/chunk.py for
    kernels and the tensors they save; transformers 5.24 models/qwen3_next; Megatron-LM core 0.18
    ssm/gated_delta_net.py.
"""

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.ops import Dims, Elementwise, Gemm, Moves, Op, Tensor
from planner.work.pieces import ATTENTION_IN, Code, across_heads, output_projection, projection

CHUNK = 64  # fla's chunk_size
TP_DIMS = frozenset({"delta_in", "delta_value_heads"})
VALUES: Dims = ("tokens", "delta_value_heads", "delta_value_dim")


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Size of every dimension of a gated DeltaNet on one rank: TP divides heads."""
    ones = np.ones_like(tp)
    keys, values = model.linear_key_width / tp, model.linear_value_width / tp
    value_heads = model.linear_num_value_heads / tp
    return {
        "delta_in": 2.0 * (keys + values + value_heads),
        "delta_mixed": 2.0 * keys + values,
        "delta_key_heads": model.linear_num_key_heads / tp,
        "delta_value_heads": value_heads,
        "delta_key_dim": model.linear_key_head_dim * ones,
        "delta_value_dim": model.linear_value_head_dim * ones,
        "delta_taps": model.linear_conv_kernel_dim * ones,
        "delta_chunk": CHUNK * ones,
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection.

    Queries, keys, values, gate and both scalars of a head are one product, as in Megatron-LM;
    transformers cuts it into two to four of the same sum.
    """
    into = projection("delta_in", ("delta_in",), ("hidden",), ATTENTION_IN)
    mixed = Tensor("delta_mixed", ("tokens", "delta_mixed"))
    core = Tensor("delta_core", VALUES)
    normed = Tensor("delta_normed", VALUES)
    return (
        into,
        across_heads("delta_in_heads", Tensor("delta_sent", ("tokens", "delta_in"))),
        convolution(into, mixed),
        _gates(),
        rule(model, code, mixed, core),
        norm(code, core, normed),
        across_heads("delta_out_heads", Tensor("delta_returned", VALUES)),
        output_projection("delta_out", VALUES[1:], normed),
    )


def convolution(projected: Gemm, mixed: Tensor) -> Elementwise:
    """The short convolution and its activation; it keeps all of the projection's output."""
    return Elementwise(
        name="delta_conv",
        dims=mixed.dims,
        kernels=4,
        moves=Moves(4.0, 6.0, 2.0, 3.0),
        saves=(projected.output,),
        reads=(projected.output,),
        makes=(mixed,),
        products=((*mixed.dims, "delta_taps"),),
        backward_products=((*mixed.dims, "delta_taps"),) * 2,
    )


def _gates() -> Elementwise:
    """Decay and learning rate of every head, from two scalars; they stay for the rule."""
    heads: Dims = ("tokens", "delta_value_heads")
    return Elementwise(
        name="delta_gates",
        dims=heads,
        width="fp32",
        kernels=7,
        moves=Moves(10.0, 14.0, 3.0, 5.0),
        saves=(
            Tensor("delta_rate", heads),
            Tensor("delta_step", heads, width="fp32"),
            Tensor("delta_decay", heads, width="fp32"),
        ),
    )


def rule(model: ModelSpec, code: Code, mixed: Tensor, core: Tensor) -> Elementwise:
    """The delta rule in chunks.

    Products of a chunk, per head: keys with keys and queries with keys; the system's inverse with
    keys and with values; the attention with new values; and the state three times (its
    prediction, the queries' reads, the keys' additions). Backward makes the inverse's and two of
    the state's again, then two gradients of each.
    """
    heads = "delta_value_heads"
    keys: Dims = ("tokens", heads, "delta_chunk", "delta_key_dim")
    values: Dims = ("tokens", heads, "delta_chunk", "delta_value_dim")
    state: Dims = ("tokens", heads, "delta_key_dim", "delta_value_dim")
    again = (keys, values, state, state)
    once = (keys, keys, *again, values, state)
    forward, backward = _moves(model)
    return Elementwise(
        name="delta_rule",
        dims=core.dims,
        kernels=8,
        singles=8,
        compiles=False,
        moves=Moves(forward, backward, forward, backward),
        saves=_rule_saves(code),
        reads=(mixed,),
        makes=(core,),
        products=once,
        backward_products=(*again, *once * 2),
    )


def _rule_saves(code: Code) -> tuple[Tensor, ...]:
    """Normalised queries and keys, values, the inverse of each chunk's system, decays' sums.

    Megatron-LM normalises queries and keys before it repeats them for every value head, and both
    stay.
    """
    own: Dims = ("tokens", "delta_key_heads", "delta_key_dim")
    repeated: Dims = ("tokens", "delta_value_heads", "delta_key_dim")
    copies = {"q_repeated": repeated, "k_repeated": repeated} if code.own_mixers else {}
    stay = {
        "q": own,
        "k": own,
        **copies,
        "v": VALUES,
        "inverse": ("tokens", "delta_value_heads", "delta_chunk"),
    }
    sums = {
        "q_rstd": own[:2], "k_rstd": own[:2], "decay_sums": ("tokens", "delta_value_heads"),
    }  # fmt: skip
    return (
        *(Tensor(f"delta_{name}", dims) for name, dims in stay.items()),
        *(Tensor(f"delta_{name}", dims, width="fp32") for name, dims in sums.items()),
    )


def _moves(model: ModelSpec) -> tuple[float, float]:
    """Elements that the rule's kernels read and write, per element of the values.

    k, w: keys, and keys or queries repeated for every value head. a: the inverse. h: the state of
        each chunk, in one direction. A value counts 1.
    Kernel by kernel: norms; inverse with its products; states and new values; output. Backward:
    both former again, local gradients, states' gradients, gradients of queries, keys and decays,
    of the inverse, norms.
    """
    width, values = model.linear_key_head_dim, model.linear_value_width
    k = model.linear_key_width / values
    w = width * model.linear_num_value_heads / values
    a, h = CHUNK * model.linear_num_value_heads / values, width / CHUNK
    inverse, states = k + w + a + 2.0, k + w + h + 2.0
    forward = 4.0 * k + inverse + states + (2.0 * k + h + 2.0)
    local, of_states = 2.0 * k + 2.0, 2.0 * k + w + h + 3.0
    of_keys, of_inverse = 2.0 * k + 4.0 * w + 2.0 * h + 3.0, k + 2.0 * w + a + 3.0
    backward = inverse + states + local + of_states + of_keys + of_inverse + 6.0 * k
    return forward, backward


def norm(code: Code, core: Tensor, normed: Tensor) -> Elementwise:
    """RMSNorm of each head's output times the activated gate.

    Its gate is a part of the projection's output, which the convolution keeps; Megatron-LM copies
    it.
    """
    gate = (Tensor("delta_gate", VALUES),) if code.own_mixers else ()
    return Elementwise(
        name="delta_norm",
        dims=VALUES,
        kernels=9,
        moves=Moves(14.0, 30.0, 3.0, 6.0),
        saves=(core, *gate, Tensor("delta_norm_rstd", VALUES[:2], width="fp32")),
        reads=(core,),
        makes=(normed,),
    )
