"""Gated short convolution as operations: two gates around a convolution over a few tokens.

The projection's three parts are a gate before the convolution, one behind it, and the values.
Sources: Liquid AI 2025 (LFM2); causal_conv1d for the kernel and what it saves; transformers 5.24
    models/lfm2 (Lfm2ShortConv).
"""

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.ops import Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import ATTENTION_IN, Code, output_projection, projection

TP_DIMS = frozenset({"short_in", "short_width"})
CHANNELS: Dims = ("tokens", "short_width")


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions on one rank; as many channels as the hidden size has."""
    return {
        "short_in": 3.0 * model.hidden_size / tp,
        "short_width": model.hidden_size / tp,
        "short_taps": model.linear_conv_kernel_dim * np.ones_like(tp),
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection.

    The convolution runs over channels, so what it makes is copied back to tokens for the
    projection. Both gates and values are parts of the projection's output, which stays.
    """
    into = projection("short_in", ("short_in",), ("hidden",), ATTENTION_IN)
    mixed, made = (Tensor(f"short_{name}", CHANNELS) for name in ("gated", "mixed"))
    out = Tensor("short_returned", CHANNELS)
    return (
        into,
        Elementwise(
            name="short_conv",
            dims=CHANNELS,
            kernels=4,
            moves=Moves(10.0, 23.0, 8.0, 13.0),
            saves=(into.output, mixed, made),
            reads=(into.output,),
            makes=(out,),
            products=((*CHANNELS, "short_taps"),),
            backward_products=((*CHANNELS, "short_taps"),) * 2,
        ),
        output_projection("short_out", CHANNELS[1:], out),
    )
