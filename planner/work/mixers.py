"""The mixers besides softmax attention that a layer can have, a row each.

A new one is a file with its operations, a row here, its shapes in `planner.specs.mixers` and its
parameters in `planner.specs.mixer_parameters`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerWork:
    """One mixer.

    operations: from the layer's gathered input to its output projection; the sum over TP follows,
        or attention's own, in a layer that has both.
    sizes: dimensions on one rank, from the model and the TP degrees.
    cut: names of the dimensions that TP divides.
    """

    operations: Callable[[ModelSpec, Code], tuple[Op, ...]]
    sizes: Callable[[ModelSpec, FloatColumn], dict[str, FloatColumn]]
    cut: frozenset[str]


MIXERS: Mapping[Mixer, MixerWork] = {
    "dsa": MixerWork(
        operations=sparse_attention.operations, sizes=sparse_attention.sizes, cut=frozenset()
    ),
    "dsa-shared": MixerWork(
        operations=sparse_attention.shared, sizes=sparse_attention.sizes, cut=frozenset()
    ),
    "msa": MixerWork(operations=block_sparse.operations, sizes=block_sparse.sizes, cut=frozenset()),
    "gated-delta": MixerWork(
        operations=gated_delta.operations, sizes=gated_delta.sizes, cut=gated_delta.TP_DIMS
    ),
    "kimi-delta": MixerWork(
        operations=kimi_delta.operations, sizes=kimi_delta.sizes, cut=kimi_delta.TP_DIMS
    ),
    **dict.fromkeys(
        ("mamba2", "attention-mamba2"),
        MixerWork(operations=mamba2.operations, sizes=mamba2.sizes, cut=mamba2.TP_DIMS),
    ),
    "mamba": MixerWork(operations=mamba1.operations, sizes=mamba1.sizes, cut=mamba1.TP_DIMS),
    "short-conv": MixerWork(
        operations=short_conv.operations, sizes=short_conv.sizes, cut=short_conv.TP_DIMS
    ),
    "lightning": MixerWork(
        operations=lightning.operations, sizes=lightning.sizes, cut=lightning.TP_DIMS
    ),
    **{
        mixer: MixerWork(
            operations=compressed_attention.operations(mixer),
            sizes=compressed_attention.sizes,
            cut=frozenset(),
        )
        for mixer in COMPRESSED
    },
}


def mixer_sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of the mixers that the model has, and of its residual streams, on one rank."""
    used = [work.sizes for name, work in MIXERS.items() if name in model.mixers]
    used += [hyper_connections.sizes] * (model.hc_mult > 0)
    return {name: size for sizes in used for name, size in sizes(model, tp).items()}
