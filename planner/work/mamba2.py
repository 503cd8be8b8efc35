"""Mamba-2 as operations: projection, short convolution, scan in chunks, gated norm.

Every head keeps a state of head width x state width; heads of a group share keys and queries (B and
C). A chunk of tokens multiplies with itself and with the state that the chunks before it left.
Sources: Dao and Gu 2024 (state space duality); mamba_ssm ops/triton/ssd_combined.py for kernels and
    the tensors they save; Megatron-LM core 0.18 ssm/mamba_mixer.py; transformers 5.24
    models/nemotron_h.
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.ops import Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import (
    ATTENTION_IN,
    HIDDEN,
    Code,
    across_heads,
    output_projection,
    projection,
)

TP_DIMS = frozenset({"mamba_in", "mamba_width"})
VALUES: Dims = ("tokens", "mamba_width")


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Size of every dimension of a Mamba-2 mixer on one rank: TP divides heads and groups."""
    ones, width, heads = np.ones_like(tp), model.mamba_width / tp, model.mamba_num_heads / tp
    groups = model.mamba_n_groups / tp
    mixed = width + 2.0 * groups * model.ssm_state_size
    return {
        "mamba_in": width + mixed + heads,
        "mamba_mixed": mixed,
        "mamba_width": width,
        "mamba_groups": groups,
        "mamba_state": model.ssm_state_size * ones,
        "mamba_taps": model.mamba_d_conv * ones,
        "mamba_chunk": model.mamba_chunk_size * ones,
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection.

    mamba_ssm makes the projection's input again for its weight gradient; Megatron-LM keeps it.
    """
    into = projection("mamba_in", ("mamba_in",), ("hidden",), ATTENTION_IN)
    mixed = Tensor("mamba_mixed", ("tokens", "mamba_mixed"))
    scanned = Tensor("mamba_scanned", VALUES)
    normed = Tensor("mamba_normed", VALUES)
    read = normed if model.mamba_norm else scanned
    out = output_projection("mamba_out", VALUES[1:], read)
    return (
        into,
        across_heads("mamba_in_heads", Tensor("mamba_sent", ("tokens", "mamba_in"))),
        convolved(into.output, mixed),
        _scan(model, mixed, scanned),
        *((_norm(code, scanned, normed),) if model.mamba_norm else ()),
        across_heads("mamba_out_heads", Tensor("mamba_returned", VALUES)),
        out if code.own_mixers else replace(out, saves=(scanned,)),
    )


def convolved(source: Tensor, made: Tensor) -> Elementwise:
    """The short convolution over tokens, one kernel; its backward makes the output again."""
    taps = (*made.dims, "mamba_taps")
    return Elementwise(
        name="mamba_conv",
        dims=made.dims,
        kernels=1,
        singles=1,
        moves=Moves(2.0, 5.0, 2.0, 5.0),
        saves=(source,),
        reads=(source,),
        makes=(made,),
        products=(taps,),
        backward_products=(taps,) * 3,
    )


def _scan(model: ModelSpec, mixed: Tensor, scanned: Tensor) -> Elementwise:
    """The state space recurrence in chunks.

    Products of a chunk: queries with keys once a group; for every head that matrix with its values,
    keys with values into a state, and queries with the state. Backward makes the first and the
    states again, then two gradients of each. The projection's output is all that it needs besides
    its own; the convolution is run again.
    """
    inside: Dims = ("tokens", "mamba_groups", "mamba_chunk", "mamba_state")
    values: Dims = ("tokens", "mamba_chunk", "mamba_width")
    state: Dims = ("tokens", "mamba_width", "mamba_state")
    once = (inside, values, state, state)
    forward, backward = _moves(model)
    return Elementwise(
        name="mamba_scan",
        dims=VALUES,
        kernels=5,
        singles=5,
        compiles=False,
        moves=Moves(forward, backward, forward, backward),
        saves=(scanned,),
        reads=(mixed,),
        makes=(scanned,),
        products=once,
        backward_products=(inside, state, *once * 2),
    )


def _moves(model: ModelSpec) -> tuple[float, float]:
    """Elements that the scan's kernels read and write, per element of the values.

    k: keys or queries. m: the matrix of a chunk, and h: its states, both in fp32 (two elements). A
        value counts 1.
    Kernel by kernel: states of chunks; passed from chunk to chunk; queries with keys; output.
    Backward: the three former again; gradients of states, passed back; of queries, of the matrix,
    of keys twice, of values, of decays.
    """
    values = model.mamba_width
    k = model.mamba_n_groups * model.ssm_state_size / values
    m = 2.0 * model.mamba_n_groups * model.mamba_chunk_size / values
    h = 2.0 * model.ssm_state_size / model.mamba_chunk_size
    before = (1.0 + k + h) + 2.0 * h + (2.0 * k + m)
    forward = before + (2.0 + k + h + m)
    of_states, of_rest = (1.0 + k + h) + 3.0 * h, (1.0 + k + h) + 2.0 * k + (2.0 + m)
    backward = before + of_states + of_rest + (2.0 + 2.0 * k + h) + (4.0 + k + h + m) + 2.0
    return forward, backward


def _norm(code: Code, scanned: Tensor, normed: Tensor) -> Elementwise:
    """RMSNorm over each group of heads of the output times the activated gate.

    Megatron-LM gates within the scan, so that the norm keeps another tensor, its input.
    """
    gated = (Tensor("mamba_gated", VALUES),) if code.own_mixers else ()
    rows = Tensor("mamba_norm_rstd", ("tokens", "mamba_groups"), width="fp32")
    return Elementwise(
        name="mamba_norm",
        dims=VALUES,
        kernels=1,
        moves=Moves(3.0, 6.0, 3.0, 6.0),
        saves=(*gated, rows),
        reads=(scanned,),
        makes=(normed,),
    )


def beside_attention(mixer: tuple[Op, ...], attention: tuple[Op, ...]) -> tuple[Op, ...]:
    """Two mixers of one input and their sum, each scaled on its way in and out (Falcon H1).

    Attention saves a scaled copy of the input of its own.
    Source: transformers 5.24 models/falcon_h1 (FalconH1DecoderLayer, FalconH1Mixer).
    """
    scaled = Tensor("attention_scaled", HIDDEN)
    both = tuple(Tensor(f"{ops[-1].name}_out", HIDDEN) for ops in (mixer, attention))
    inside = Elementwise(
        name="mamba_scale", dims=("tokens", "mamba_in"), kernels=1, moves=Moves(2.0, 2.0, 2.0, 2.0)
    )
    total = Elementwise(
        name="mixers_sum",
        dims=HIDDEN,
        kernels=5,
        moves=Moves(11.0, 11.0, 7.0, 7.0),
        saves=(scaled,),
        reads=both,
        makes=(Tensor("mixers_sum_out", HIDDEN),),
    )
    return (mixer[0], inside, *mixer[1:], *attention, total)
