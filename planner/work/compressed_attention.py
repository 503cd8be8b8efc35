"""Attention of DeepSeek-V4 as operations: one key head, a window, and compressed entries beside it.

A compressor makes one entry of several tokens by gates; of short entries (CSA) an indexer chooses
some for each query, of long ones (HCA) all are attended to. Keys are values, queries have a low
rank, and the heads' outputs go through a projection for each group of them.
transformers computes all scores and masks most, in eager kernels (no fused one has sinks and heads
of 512). Megatron-LM's dev branch gathers the chosen in a sparse kernel.
Sources: DeepSeek-V4 technical report (2026), sections 2.1 and 2.3; transformers 5.24
    models/deepseek_v4; Megatron-LM dev of 2026-08-21 experimental_attention_variant/csa.py,
    csa_utils/fused_sparse_attention.py (CSASparseAttnFunc, saved tensors).
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn
from planner.specs.mixers import COMPRESSED, Mixer
from planner.specs.model import ModelSpec
from planner.work.attention import latents, with_sinks
from planner.work.ops import Attention, Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import (
    ATTENTION_IN,
    Code,
    norm,
    norm_saves,
    output_projection,
    product,
    projection,
)
from planner.work.sparse_attention import CHOSEN, PROJECTIONS, indexer

HEADS: Dims = ("tokens", "heads", "qk_dim")
QUERY, KEY = Tensor("q", HEADS), Tensor("k", ("tokens", "qk_dim"))
OUT, TURNED = Tensor("attention_out", HEADS), Tensor("attention_turned", HEADS)


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of output groups, compressors and indexer; TP divides none of these layers.

    csa_share: entries for each token, csa_keys: keys, csa_width: of a compressor; so for HCA.
    """
    ones, width = np.ones_like(tp), model.head_dim
    rates = {one: model.entries(one)[0] for one in COMPRESSED}
    shares = {one: 1.0 / rate if rate else 0.0 for one, rate in rates.items()}
    return {
        **{f"{one}_share": share * ones for one, share in shares.items()},
        **{f"{one}_keys": (1.0 + share) * ones for one, share in shares.items()},
        "window_keys": model.sliding_window * ones,
        "o_groups": model.o_groups * ones,
        "o_group_in": model.num_attention_heads * width / model.o_groups * ones,
        "o_lora": model.o_lora_rank * ones,
        "csa_width": 2 * width * ones,
        "hca_width": width * ones,
        "index_heads": model.index_n_heads * ones,
        "index_dim": model.index_head_dim * ones,
        "index_width": model.index_n_heads * model.index_head_dim * ones,
        "index_few": (4 * model.index_head_dim + model.index_n_heads) * ones,
    }


def operations(mixer: Mixer, model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From a layer's gathered input to the output projection; mixer: of this layer."""
    query, _ = latents(model, code)
    own = projection("wkv", ("qk_dim",), ("hidden",), ATTENTION_IN)
    rate, chosen = model.entries(mixer)
    entries = (Tensor("k_entries", ("tokens", f"{mixer}_share", "qk_dim")),) * (rate > 0)
    grouped = Tensor("wo_a_out", ("tokens", "o_groups", "o_lora"))
    core = Attention(
        name="attention",
        window=model.sliding_window,
        compressed=rate,
        chosen=chosen,
        saves=(),
        output=OUT,
        statistics=Tensor("log_sum_exp", HEADS[:2], width="fp32"),
        reads=(QUERY, KEY, *entries),
    )
    return (
        *query,
        own,
        normed := norm(model, "wkv_norm", own.output, code),
        _rotary(query[-1].output, normed.makes[0]),
        *(_compressor(model, mixer, entries[0], code) if rate else ()),
        *((_indexer(code.own_mixers),) if chosen else ()),
        *(_sparse if code.own_mixers else _eager)(core, mixer),
        _turned_back(),
        # a batched product, which no recipe of linear layers covers
        product(
            "wo_a",
            ("tokens",),
            ("o_group_in",),
            ("o_lora",),
            TURNED,
            grouped,
            batch=("o_groups",),
            role="router",
        ),
        output_projection("wo", grouped.dims[1:], grouped),
    )


def _rotary(queries: Tensor, keys: Tensor) -> Elementwise:
    """A norm of each query head without weights, and the rotary embedding of a part of each."""
    rows: Dims = HEADS[:2]
    return Elementwise(
        name="rotary",
        dims=HEADS,
        kernels=16,
        moves=Moves(12.0, 24.0, 2.0, 3.0),
        saves=(
            queries,
            Tensor("q_upcast", HEADS, width="fp32", eager_only=True),
            Tensor("q_rstd", rows, width="fp32"),
            Tensor("q_rstd_16", rows, eager_only=True),
        ),
        reads=(queries, keys),
        makes=(QUERY, KEY),
    )


def _compressor(model: ModelSpec, mixer: Mixer, entries: Tensor, code: Code) -> tuple[Op, ...]:
    """Keys and gates of every token, a softmax over those of one entry, its sum and norm."""
    width = (f"{mixer}_width",)
    both = [
        projection(f"compress_{one}", width, ("hidden",), ATTENTION_IN) for one in ("kv", "gate")
    ]
    dims: Dims = ("tokens", *width)
    summed = Tensor("entries_sum", entries.dims)
    return (
        *both,
        Elementwise(
            name="compress",
            dims=dims,
            kernels=22,
            singles=2,
            moves=Moves(18.0, 26.0, 2.25, 4.25),
            saves=(
                Tensor("compress_keys", dims),
                Tensor("compress_weights", dims),
                Tensor("compress_softmax", dims, width="fp32", eager_only=True),
                *norm_saves(model, "entries_norm", summed, code.composite_norm),
            ),
            reads=tuple(one.output for one in both),
            makes=(entries,),
        ),
    )


def _indexer(learns: bool) -> Elementwise:
    """Scores of all entries, of keys from a compressor of its own.

    learns: by a loss on the chosen entries, as in Megatron-LM.
    """
    scored: Dims = ("tokens", "index_heads", "context", "csa_share")
    if not learns:
        return indexer(PROJECTIONS, ((*scored, "index_dim"),), scored)
    half = ("tokens", "index_heads", "attended", "csa_share", "index_dim")
    loss = (("tokens", "chosen", "heads", "qk_dim"), *(CHOSEN,) * 3)
    key = ("tokens", "csa_share", "index_dim")
    return indexer(PROJECTIONS, (half,), scored, loss=loss, key=key)


def _eager(core: Attention, mixer: Mixer) -> tuple[Op, ...]:
    """Scores of all tokens and entries.

    Batched products of several sequences copy keys, and values, for every query head.
    """
    copied: Dims = ("tokens_batched", "heads", f"{mixer}_keys", "qk_dim")
    copies = (Tensor(f"{one}_copied", copied) for one in "kv")
    square: Dims = ("tokens", "heads", "context", f"{mixer}_keys")
    return with_sinks(replace(core, saves=(*core.reads, *copies)), square)


def _sparse(core: Attention, mixer: Mixer) -> tuple[Op, ...]:
    """One kernel, which reads keys by index: of the window, and of chosen or all entries."""
    others: Dims = ("chosen",) if core.chosen else ("context", f"{mixer}_share")
    indices = (
        Tensor(f"indices_{dims[0]}", ("tokens", *dims), width="fp32")  # int32
        for dims in (("window_keys",), others)
    )
    gradients = (replace(one, name=f"d{one.name}", width="fp32") for one in core.reads[1:])
    saves = (*core.reads, *indices, OUT, core.statistics)
    return (replace(core, saves=saves, workspace=tuple(gradients)),)


def _turned_back() -> Elementwise:
    """The rotation of values taken back, since keys are the values."""
    return Elementwise(
        name="rotary_back",
        dims=HEADS,
        kernels=8,
        moves=Moves(5.0, 5.0, 2.0, 2.0),
        reads=(OUT,),
        makes=(TURNED,),
    )
