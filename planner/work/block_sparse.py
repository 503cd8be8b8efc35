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
from planner.work.ops import Dims, Op
from planner.work.pieces import Code
from planner.work.sparse_attention import indexer, mask

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
    """From the layer's gathered input to the output projection.

    The indexer takes the maximum of each block's scores; booleans are half an element's bytes in
    the mask of each query head.
    """
    if code.own_mixers:
        return attention(model, 0, True, code)
    chosen = (
        indexer(
            (("tokens", "index_width", "hidden"), ("tokens", "index_dim", "hidden")),
            ((*_SCORED, "index_dim"),),
            _SCORED,
            kernels=16,
            moves=4.0,
        ),
        mask(_SQUARE, 6, 6.5, fused=not model.attention_sinks),
    )
    return attention(model, 0, True, code, chosen)
