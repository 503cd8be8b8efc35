"""DeepSeek sparse attention (DSA) as operations: latent attention to the tokens an indexer finds.

transformers computes all and masks the others; its indexer learns nothing. Megatron-LM
attends in the latent: keys' half of the up projection goes into the queries, values' half behind
the core, and all query heads share one key. Its indexer learns by a loss on the chosen tokens,
whose gradients its forward makes.
Sources: DeepSeek-V3.2 technical report (2025); transformers 5.24 models/deepseek_v32; Megatron-LM
    core 0.19 experimental_attention_variant/absorbed_mla.py, dsa.py, dsa_cudnn_kernels.py (saved
    tensors, padded heads).
"""

import numpy as np

from planner.columns import FloatColumn
from planner.specs.mixers import LEAST_HEADS
from planner.specs.model import ModelSpec
from planner.work.attention import attention, latents, rotary
from planner.work.ops import Attention, Collective, Dims, Elementwise, Gemm, Moves, Op, Tensor
from planner.work.pieces import Code, norm, output_projection, product

_SCORED: Dims = ("tokens", "index_heads", "context")
CHOSEN: Dims = ("tokens", "chosen", "index_heads", "index_dim")
PROJECTIONS: tuple[Dims, ...] = (
    ("tokens", "index_width", "q_lora"),
    ("tokens", "index_few", "hidden"),
)


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of the indexer, which TP does not divide, and of the core, whose heads it does."""
    ones = np.ones_like(tp)
    width = model.index_head_dim
    return {
        "index_heads": model.index_n_heads * ones,
        "index_dim": width * ones,
        "index_width": model.index_n_heads * width * ones,
        "index_few": (width + model.index_n_heads) * ones,
        "qk_nope": model.qk_nope_head_dim * ones,
        "latent_sent": (model.kv_lora_rank + model.qk_rope_head_dim + width) * ones,
        "sparse_heads": np.maximum(model.num_attention_heads / tp, LEAST_HEADS),
    }


def operations(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the layer's gathered input to the output projection, with an indexer."""
    return _absorbed(model, code, True) if code.own_mixers else _masked(model, code, True)


def shared(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """Attention to the tokens that a layer before has chosen."""
    return _absorbed(model, code, False) if code.own_mixers else _masked(model, code, False)


def _masked(model: ModelSpec, code: Code, indexes: bool) -> tuple[Op, ...]:
    """Ordinary latent attention under a mask, as transformers runs it."""
    # ones, zeros where chosen, and the causal mask
    square = mask(("tokens", "context"), 5, 5.0, fused=not model.attention_sinks)
    found = (_indexer(learns=False), square)
    return attention(model, 0, True, code, found if indexes else found[1:])


def mask(square: Dims, kernels: int, moves: float, *, fused: bool = True) -> Elementwise:
    """Minus infinity on the keys that are not chosen, with the causal mask.

    fused: attention's memory-efficient kernel, the only fused one with a mask, saves it.
    Source: torch tools/autograd/derivatives.yaml (_scaled_dot_product_efficient_attention).
    """
    return Elementwise(
        name="index_mask",
        dims=square,
        kernels=kernels,
        compiles=False,
        moves=Moves(moves, 0.0, moves, 0.0),
        saves=(Tensor("index_mask", square),) * fused,
    )


def indexer(
    projections: tuple[Dims, ...],
    scores: tuple[Dims, ...],
    scored: Dims,
    *,
    loss: tuple[Dims, ...] = (),
    key: Dims = ("tokens", "index_dim"),
    kernels: int = 12,
    moves: float = 7.0,
) -> Elementwise:
    """Projections, scores of all tokens before, and the choice of the highest.

    projections, scores, loss: products; one with a loss learns: scores of the chosen are made again
        with the core's own, and gradients of both factors from them; fused kernels hold no scores
        of all tokens.
    scored, key: dimensions of the scores and of the keys.
    kernels, moves: of one that learns nothing.
    """
    learns, query = bool(loss), ("tokens", "index_width")
    stay: dict[str, Dims] = {"query": query, "key": key, "weights": ("tokens", "index_heads")}
    whole = () if learns else (Tensor("index_scores", scored, width="fp32"),) * 2
    return Elementwise(
        name="indexer",
        dims=query if learns else scored,
        width="compute" if learns else "fp32",
        kernels=kernels,
        singles=6,
        compiles=False,
        moves=Moves(
            12.0 if learns else moves,
            6.0 if learns else 0.0,
            6.0 if learns else moves,
            4.0 if learns else 0.0,
        ),
        saves=tuple(Tensor(f"index_{name}", dims) for name, dims in stay.items()) if learns else (),
        forward_workspace=whole,
        as_attention=learns,
        products=(*projections, *scores, *loss),
        backward_products=projections if learns else (),
    )


def _indexer(*, learns: bool) -> Elementwise:
    """The indexer of latent attention, whose scores of all heads transformers sums in a product."""
    if not learns:
        return indexer(PROJECTIONS, ((*_SCORED, "index_dim"), _SCORED), _SCORED)
    loss = (("tokens", "chosen", "sparse_heads", "kv_lora_rope"), *(CHOSEN,) * 3)
    half = ("tokens", "index_heads", "attended", "index_dim")
    return indexer(PROJECTIONS, (half,), _SCORED, loss=loss)


def _absorbed(model: ModelSpec, code: Code, indexes: bool) -> tuple[Op, ...]:
    """Attention in the latent, as Megatron-LM's fused kernels run it."""
    query, down = latents(model, code)
    latent: Dims = ("tokens", "kv_lora_rope")
    q = Tensor("q", ("tokens", "sparse_heads", "kv_lora_rope"))
    key = Tensor("k", latent)
    out = Tensor("latent_out", ("tokens", "sparse_heads", "kv_lora"))
    attended = Tensor("attention_out", ("tokens", "heads", "v_dim"))
    statistics = Tensor("log_sum_exp", ("tokens", "sparse_heads"), width="fp32")
    found = Tensor("chosen", ("tokens", "chosen"), width="fp32")  # int32
    queries = query[-1].output
    return (
        *query,
        down,
        norm(model, "wkv_b_norm", down.output, code),
        _up("wk_absorb", ("kv_lora",), ("qk_nope",), queries),
        rotary(
            ("tokens", "heads", "kv_lora_rope"),
            True,
            True,
            reads=(queries, down.output),
            makes=(q, key),
        ),
        *((_indexer(learns=True),) if indexes else ()),
        Collective(
            name="context_in",
            site="cp_enter",
            tensor=Tensor("latent_full", ("tokens", "latent_sent")),
        ),
        Attention(
            name="attention",
            window=model.index_topk,
            heads="sparse_heads",
            widths=("kv_lora_rope", "kv_lora"),
            saves=(q, key, found, out, statistics),
            output=out,
            statistics=statistics,
            reads=(q, key),
            workspace=(Tensor("dkv", latent, width="fp32"),),
        ),
        _up("wv_absorb", ("v_dim",), ("kv_lora",), out),
        output_projection("wo", ("heads", "v_dim"), attended),
    )


def _up(name: str, cols: Dims, depth: Dims, source: Tensor) -> Gemm:
    """Half of the up projection, a product a head, which no precision recipe covers."""
    made = Tensor(f"{name}_out", ("tokens", "heads", *cols))
    batch: Dims = ("heads",)
    return product(name, ("tokens",), depth, cols, source, made, batch=batch, role="router")
