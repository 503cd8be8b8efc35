"""Mamba (the first) as operations: projection, short convolution, selective scan.

Every channel has a state of its own, with a step from a product of low rank; keys and queries (B
and C) serve all channels. Jamba has norms between, so that its kernels run one by one; without them
one function runs all, which saves the projection and the scan, and makes the rest again.
Sources: Gu and Dao 2023; mamba_ssm 2.2 ops/selective_scan_interface.py (SelectiveScanFn,
    MambaInnerFn with checkpoint_lvl 1); transformers 5.24 models/jamba, models/mamba.
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.mamba2 import convolved
from planner.work.ops import Dims, Elementwise, Gemm, Moves, Op, Tensor
from planner.work.pieces import ATTENTION_IN, Code, norm, output_projection, product, projection

TP_DIMS = frozenset({"mamba_in", "mamba_width"})
VALUES: Dims = ("tokens", "mamba_width")
LOW: Dims = ("tokens", "mamba_low")
# of values that could be moved meanwhile, for each number of a state: an exponential and its
# products; judgement
SCANNED = 0.5


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Size of every dimension of the mixer on one rank: TP divides channels."""
    ones, rank, state = np.ones_like(tp), model.mamba_dt_rank, model.ssm_state_size
    return {
        "mamba_in": 2.0 * model.mamba_width / tp,
        "mamba_width": model.mamba_width / tp,
        "mamba_low": (rank + 2 * state) * ones,
        "mamba_rank": rank * ones,
        "mamba_keys": 2 * state * ones,
        "mamba_taps": model.mamba_d_conv * ones,
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection."""
    steps = model.mamba_norm
    into = projection("mamba_in", ("mamba_in",), ("hidden",), ATTENTION_IN)
    values, step, scanned, gated = (
        Tensor(f"mamba_{name}", VALUES) for name in ("values", "step", "scan", "gated")
    )
    low = Tensor("mamba_low", LOW)
    rank = Tensor("mamba_rank", ("tokens", "mamba_rank"))
    keys = Tensor("mamba_keys", ("tokens", "mamba_keys"))
    copies = tuple(Tensor(f"mamba_{name}_copy", VALUES) for name in ("values", "gate"))
    out = output_projection("mamba_out", VALUES[1:], gated)
    once = (4.0 + SCANNED * model.ssm_state_size, 8.0 + 3.0 * SCANNED * model.ssm_state_size)
    # without norms also: convolution, step and gated output again
    moves = once if steps else (once[0], once[1] + 6.0)
    return (
        into,
        convolved(into.output, values),
        _low("mamba_x", VALUES, LOW, values, values if steps else into.output, low),
        *((norm(model, "mamba_low_norm", low, code),) if steps else ()),
        _low("mamba_dt", rank.dims, VALUES, low, rank if steps else low, step),
        Elementwise(
            name="mamba_scan",
            dims=VALUES,
            kernels=4 if steps else 1,
            compiles=False,
            moves=Moves(moves[0] + 4.0 * steps, moves[1] + 4.0 * steps, moves[0], moves[1]),
            saves=(*copies, step, scanned, keys) if steps else (scanned, keys),
            reads=(values, step),
            makes=(gated,),
        ),
        out if steps else replace(out, saves=(scanned,)),
    )


def _low(name: str, depth: Dims, cols: Dims, source: Tensor, saved: Tensor, made: Tensor) -> Gemm:
    """A product to or from the low rank, which no precision recipe covers."""
    rows: Dims = ("tokens",)
    return product(name, rows, depth[1:], cols[1:], source, made, saves=(saved,), role="router")
