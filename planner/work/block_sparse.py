"""MiniMax sparse attention (MSA) as operations: grouped-query attention to blocks of keys.

An indexer scores all keys for each group of query heads and keeps the best blocks. transformers
scores the whole square and masks the other blocks for every query head; the choice has no gradient.
Megatron-Bridge builds the layer without its indexer, as full attention.
Sources: transformers 5.24 models/minimax_m3_vl (MiniMaxM3VLIndexer, MiniMaxM3VLAttention);
    Megatron-Bridge of 2026-08-22, docs/models/minimax/minimax-m3.md (Known Limitations).
"""

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.attention import attention
from planner.work.ops import Dims, Elementwise, Op, Tensor
from planner.work.pieces import Code

_SCORED: Dims = ("tokens", "index_heads", "context")
_SQUARE: Dims = ("tokens", "heads", "context")


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of the indexer, which TP does not divide."""
    ones = np.ones_like(tp)
    return {
        "index_heads": model.index_n_heads * ones,
        "index_dim": model.index_head_dim * ones,
        "index_width": model.index_n_heads * model.index_head_dim * ones,
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection."""
    return attention(model, 0, True, code, () if code.own_mixers else (_indexer(), _mask()))


def _indexer() -> Elementwise:
    """Projections, scores of all keys, their maximum in each block, and the choice of blocks."""
    return Elementwise(
        name="indexer",
        dims=_SCORED,
        width="fp32",
        kernels=16,
        compiles=False,
        forward_moves=4.0,
        backward_moves=0.0,
        fused_forward_moves=4.0,
        fused_backward_moves=0.0,
        forward_workspace=(Tensor(name="index_scores", dims=_SCORED, width="fp32"),) * 2,
        products=(
            ("tokens", "index_width", "hidden"),
            ("tokens", "index_dim", "hidden"),
            (*_SCORED, "index_dim"),
        ),
    )


def _mask() -> Elementwise:
    """Minus infinity on other blocks, for each query head; booleans are half an element's bytes.

    Attention's memory-efficient kernel, the only fused one with a mask, keeps it.
    """
    return Elementwise(
        name="index_mask",
        dims=_SQUARE,
        kernels=6,
        compiles=False,
        forward_moves=6.5,
        backward_moves=0.0,
        fused_forward_moves=6.5,
        fused_backward_moves=0.0,
        saves=(Tensor(name="index_mask", dims=_SQUARE),),
    )
