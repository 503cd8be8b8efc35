"""Kimi Delta Attention as operations: a gated DeltaNet whose decay differs by channel.

Decay and gate come from products of low rank, whose first halves TP does not divide, or of full
rank (Ling 3).
Sources: Kimi Linear technical report (2025); fla 0.6 ops/kda/chunk.py for kernels and their saved
    tensors; transformers 5.24 models/kimi_linear, models/bailing_hybrid.
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work import gated_delta
from planner.work.gated_delta import VALUES
from planner.work.ops import Elementwise, Moves, Op, Tensor
from planner.work.pieces import (
    ATTENTION_IN,
    PLAIN,
    Code,
    across_heads,
    output_projection,
    projection,
)

TP_DIMS = gated_delta.TP_DIMS | {"kimi_in"}
# Decays are in fp32, two elements a channel: read by three kernels and summed; their gradients too.
MORE_MOVES = 10.0, 24.0


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of a gated DeltaNet, and of the products of low rank."""
    width, heads = model.linear_value_width / tp, model.linear_num_value_heads / tp
    rank = model.linear_value_head_dim * np.ones_like(tp)
    return {
        **gated_delta.sizes(model, tp),
        "kimi_in": 3.0 * width + heads,
        "kimi_sent": 5.0 * width + heads,
        "kimi_rank": rank,
        "kimi_ranks": 2.0 * rank,
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection."""
    into = projection("kimi_in", ("kimi_in",), ("hidden",), ATTENTION_IN)
    low = projection("kimi_low", ("kimi_ranks",), ("hidden",), ATTENTION_IN)
    full = model.linear_full_gates
    depth, read = ("hidden", ATTENTION_IN) if full else ("kimi_rank", low.output)
    decay, gate = (
        projection(name, VALUES[1:], (depth,), read) for name in ("kimi_decay", "kimi_gate")
    )
    decays = Tensor("kimi_decay_in", VALUES, width="compute" if full else "fp32")
    mixed = Tensor("delta_mixed", ("tokens", "delta_mixed"))
    core, normed = Tensor("delta_core", VALUES), Tensor("delta_normed", VALUES)
    return (
        into,
        *(() if full else (low,)),
        decay,
        gate,
        across_heads("kimi_heads", Tensor("kimi_sent", ("tokens", "kimi_sent"))),
        gated_delta.convolution(into, mixed),
        _decays(full, decay.output, decays),
        _rule(model, code, (mixed, decays), core),
        _norm(core, gate.output, normed),
        across_heads("kimi_out_heads", Tensor("kimi_returned", VALUES)),
        output_projection("delta_out", VALUES[1:], normed),
    )


def _norm(core: Tensor, gate: Tensor, normed: Tensor) -> Elementwise:
    """RMSNorm of each head times the sigmoid of the gate, which is a tensor of its own."""
    plain = gated_delta.norm(PLAIN, core, normed)
    return replace(plain, saves=(*plain.saves, gate), reads=(core, gate))


def _decays(full: bool, projected: Tensor, decays: Tensor) -> Elementwise:
    """A softplus and a scale in fp32, and the sigmoid of a rate.

    transformers writes the softplus out: exponential, logarithm and a choice between two. Ling 3
    has a scale and a sigmoid instead, and rounds what it hands on to 16 bits.
    """
    written_out = () if full else (("grown", "fp32"), ("choice", "byte"))
    passing = (
        Tensor(f"kimi_{one}", VALUES, width=width, eager_only=True) for one, width in written_out
    )
    steps = (Tensor(f"kimi_{one}", VALUES, width="fp32") for one in ("steps", "scaled"))
    return Elementwise(
        name="kimi_decays",
        dims=VALUES,
        width="fp32",
        kernels=5,
        moves=Moves(6.5, 9.0, 1.5, 2.5),
        saves=(*passing, *steps, Tensor("kimi_rate", VALUES[:2])),
        reads=(projected,),
        makes=(decays,),
    )


def _rule(model: ModelSpec, code: Code, given: tuple[Tensor, Tensor], core: Tensor) -> Elementwise:
    """The delta rule with a decay for each channel, which stays as given and summed."""
    plain = gated_delta.rule(model, code, given[0], core)
    sums = Tensor("kimi_decay_sums", VALUES, width="fp32")
    scores = Tensor("kimi_scores", ("tokens", "delta_value_heads", "delta_chunk"))
    others = tuple(one for one in plain.saves if one.name != "delta_decay_sums")
    return replace(
        plain,
        moves=Moves(*map(sum, zip(plain.moves, MORE_MOVES * 2, strict=True))),
        saves=(*others, scores, given[1], sums),
        reads=given,
    )
