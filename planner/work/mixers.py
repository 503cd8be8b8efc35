"""The mixers besides softmax attention that a layer can have, a row each.

A new one is a file with its operations, a row here, and in `planner.specs.mixers` its shapes and a
row with its words, sizes and parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from planner.columns import FloatColumn
from planner.specs.mixers import COMPRESSED, Mixer
from planner.specs.model import ModelSpec
from planner.work import (
    block_sparse,
    compressed_attention,
    gated_delta,
    hyper_connections,
    kimi_delta,
    lightning,
    mamba1,
    mamba2,
    short_conv,
    sparse_attention,
)
from planner.work.ops import Op
from planner.work.pieces import Code


@dataclass(frozen=True, slots=True)
class MixerWork:
    """One mixer.

    operations: from the layer's gathered input to its output projection; the sum over TP follows,
        or attention's own, in a layer that has both.
    sizes: dimensions on one rank, from the model and the TP degrees.
    cut: names of the dimensions that TP divides.
    """

    operations: Callable[[ModelSpec, Code], tuple[Op, ...]]
    sizes: Callable[[ModelSpec, FloatColumn], dict[str, FloatColumn]]
    cut: frozenset[str] = frozenset()


_MAMBA2 = MixerWork(mamba2.operations, mamba2.sizes, mamba2.TP_DIMS)
MIXERS: Mapping[Mixer, MixerWork] = {
    "dsa": MixerWork(sparse_attention.operations, sparse_attention.sizes),
    "dsa-shared": MixerWork(sparse_attention.shared, sparse_attention.sizes),
    "msa": MixerWork(block_sparse.operations, block_sparse.sizes),
    "gated-delta": MixerWork(gated_delta.operations, gated_delta.sizes, gated_delta.TP_DIMS),
    "kimi-delta": MixerWork(kimi_delta.operations, kimi_delta.sizes, kimi_delta.TP_DIMS),
    "mamba2": _MAMBA2,
    "attention-mamba2": _MAMBA2,
    "mamba": MixerWork(mamba1.operations, mamba1.sizes, mamba1.TP_DIMS),
    "short-conv": MixerWork(short_conv.operations, short_conv.sizes, short_conv.TP_DIMS),
    "lightning": MixerWork(lightning.operations, lightning.sizes, lightning.TP_DIMS),
    **{
        mixer: MixerWork(
            partial(compressed_attention.operations, mixer), compressed_attention.sizes
        )
        for mixer in COMPRESSED
    },
}


def mixer_sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of the mixers that the model has, and of its residual streams, on one rank."""
    used = [work.sizes for name, work in MIXERS.items() if name in model.mixers]
    used += [hyper_connections.sizes] * (model.hc_mult > 0)
    return {name: size for sizes in used for name, size in sizes(model, tp).items()}
