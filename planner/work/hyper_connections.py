"""Hyper-connections as operations: several residual streams, which each branch reads as a mix.

Around a branch, a projection of all normalised streams of a token gives the weights: of each stream
in the branch's input, of its output in each stream, and of every stream in every other, made doubly
stochastic by Sinkhorn's iterations, or none, where each stays as it is (HY 4). The weights are in
fp32. Megatron-LM's functions are compiled and run the iterations again in the backward.
Sources: Xie et al. 2026 (mHC); transformers 5.24 models/deepseek_v4 (DeepseekV4HyperConnection,
    DeepseekV4HyperHead), models/hy_v4 (HYV4HyperConnection, HYV4DecoderLayer); Megatron-LM dev of
    2026-08-21 transformer/hyper_connection.py;
    deepseek-ai/DeepSeek-V4 inference/model.py for multi-token prediction.
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import ModelSpec
from planner.work.ops import Dims, Elementwise, Moves, Op, Tensor
from planner.work.pieces import HIDDEN_SP, Code, embedding, norm, product, upcast

STREAMS: Dims = ("tokens_sp", "streams", "hidden")


def stream_dims(model: ModelSpec) -> Dims:
    """Dimensions of the residual stream between layers."""
    return STREAMS if model.hc_mult else HIDDEN_SP


def sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Dimensions of the streams and their weights, which TP does not divide.

    mix_steps: saved by eager autograd of the iterations, numerators and sums, and one more weight
        a stream.
    """
    ones, streams = np.ones_like(tp), model.hc_mult
    divisions = max(2 * model.hc_sinkhorn_iters - 1, 0)
    return {
        "streams": streams * ones,
        "mixes": model.num_mixes * ones,
        "mix_steps": (divisions * (streams + 1) * streams + streams) * ones,
    }


def entering(model: ModelSpec, name: str, stream: Tensor) -> tuple[Elementwise, ...]:
    """From the streams to a branch's input, or the head's; empty where there is one stream."""
    if not model.hc_mult:
        return ()
    head, across = name == "head", model.hc_sinkhorn_iters > 0
    weights = "streams" if head else "mixes"
    mixes: Dims = ("tokens_sp", weights)
    # without a mix of streams, what is normed is the product and not its input
    eager: dict[str, Dims] = {"upcast": STREAMS}
    eager |= {"normed": STREAMS} if across else dict.fromkeys(("product", "shifted"), mixes)
    eager |= {"steps": ("tokens_sp", "mix_steps")} if across and not head else {}
    small: dict[str, Dims] = {"rstd": ("tokens_sp",), "logits": mixes, "weights": mixes}
    saved = (
        Tensor(f"{name}_mix_{one}", dims, width="fp32", eager_only=one in eager)
        for one, dims in (eager | small).items()
    )
    made = Tensor(f"{name}_mixed", HIDDEN_SP)
    product = (*STREAMS, weights)
    return (
        Elementwise(
            name=f"{name}_mix",
            dims=STREAMS,
            kernels=14 if head else 25 + 3 * (2 * model.hc_sinkhorn_iters - 1) if across else 19,
            singles=2 if head else 4,
            moves=Moves(20.0 if across else 17.0, 45.0 if across else 44.0, 2.25, 5.0),
            saves=(stream, *saved),
            reads=(stream,),
            makes=(made,),
            products=(product,),
            backward_products=(product,) * 2,
        ),
    )


def leaving(
    name: str,
    saved: tuple[Tensor, ...],
    branches: tuple[Tensor, ...],
    after: Tensor,
    *,
    across: bool = True,
) -> Elementwise:
    """The branch's output in each stream, and the streams mixed with each other, or as they are.

    saved: the streams before, and others that are saved here.
    branches: outputs, of which the sum is saved; after: the streams after.
    """
    stream, *more = saved
    joined = len(branches) > 1
    output = Tensor(f"{name}_sum", HIDDEN_SP) if joined else branches[0]
    product: tuple[Dims, ...] = ((*STREAMS, "streams"),) * across
    weights = {"out": STREAMS[:2], "across": (*STREAMS[:2], "streams")}
    casts = [Tensor(f"{name}_{one}", weights[one], eager_only=True) for one in weights]
    saves = (output, stream, *casts) if across else upcast(output)  # all of it in fp32
    moves = Moves(6.0, 10.5, 2.25, 3.5) if across else Moves(15.25, 22.75, 2.25, 1.5)
    return Elementwise(
        name=name,
        dims=STREAMS,
        kernels=5 + across + joined,
        moves=moves._replace(forward=moves.forward + 0.75 * joined),
        saves=(*saves, *more),
        reads=(stream, *branches),
        makes=(after,),
        products=product,
        backward_products=product * 2,
    )


def widened(model: ModelSpec) -> tuple[Elementwise, ...]:
    """The embedding copied to each stream."""
    return (_spread("streams", (), ()),) if model.hc_mult else ()


def predicting(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """Multi-token prediction: each stream and the next embedding, projected and summed."""
    ends = {"mtp_state": STREAMS, "mtp_embedded": HIDDEN_SP}
    into = {name: Tensor(name, dims) for name, dims in ends.items()}
    norms = [norm(model, f"{name}_norm", one, code) for name, one in into.items()]
    projected = [
        product(
            f"{name}_proj",
            dims[:-1],
            ("hidden",),
            ("hidden",),
            one.makes[0],
            saves=(replace(one.makes[0], width="linear"),),
        )
        for (name, dims), one in zip(ends.items(), norms, strict=True)
    ]
    return (
        *embedding("mtp_embedding", "mtp_embedded_full", into["mtp_embedded"]),
        *norms,
        *projected,
        _spread("mtp_join", tuple(one.output for one in projected), (Tensor("x", STREAMS),)),
    )


def _spread(name: str, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Elementwise:
    """One tensor added to every stream, or copied there."""
    return Elementwise(
        name=name,
        dims=STREAMS,
        kernels=1,
        moves=Moves(1.25 + bool(reads), 1.25, 1.25 + bool(reads), 1.25),
        reads=reads,
        makes=makes,
    )
