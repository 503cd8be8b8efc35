"""A model's layers as lists of operations.

Mixers (attention, rows of `mixers.MIXERS`), MLP, experts, norms, embedding, head and loss.
Moves per element are counted from the eager kernels of PyTorch (reads + writes of each kernel).
Fused values are what one fused kernel must move. Saved tensors are what eager autograd saves for
backward; `tests/torch_memory` compares them with torch's.
"""

from dataclasses import replace

from planner.specs.model import LayerKind, ModelSpec
from planner.work import per_layer
from planner.work.attention import attention
from planner.work.feed_forward import mlp, moe, routed_norms
from planner.work.gated_norm import branch_norm
from planner.work.heads import of_kind
from planner.work.hyper_connections import entering, leaving, predicting, stream_dims, widened
from planner.work.mamba2 import beside_attention
from planner.work.mixers import MIXERS
from planner.work.next_tokens import joined, predicted
from planner.work.ops import Collective, Elementwise, Moves, Op, Tensor, remembered
from planner.work.pieces import (
    ATTENTION_IN,
    HIDDEN,
    HIDDEN_SP,
    LOSS_CHUNKS,
    PLAIN,
    SCATTERED,
    Code,
    embedding,
    norm,
    product,
    tp_exit,
)


@remembered
def layer_ops(model: ModelSpec, kind: LayerKind, flash: bool, code: Code = PLAIN) -> tuple[Op, ...]:
    """Operations of one layer, in order: its mixer, then its feed-forward, or one of the two.

    flash: fused attention; otherwise the probabilities are materialised.
    code: what the trainer's own code saves differently.
    """
    stream, middle, end = (Tensor(name, stream_dims(model)) for name in ("x", "h", "y"))
    if kind.mtp:
        inner = layer_ops(model, replace(kind, mtp=False), flash, code)
        before = predicting(model, code) if model.hc_mult else joined(model, code)
        return (*before, *inner, *predicted(head_ops(model, code)))
    last = Tensor("fed", HIDDEN_SP) if model.hidden_size_per_layer_input else end
    gated = per_layer.gated(model, (last, end), code) if last is not end else ()
    ends = (stream, middle if kind.feeds else last)
    mixing = _mixing(model, kind, ends, flash, code) if kind.mixes else ()
    feeding = _feeding(model, kind, (middle if kind.mixes else stream, last), code)
    return (*mixing, *(feeding if kind.feeds else ()), *gated)


def _mixing(
    model: ModelSpec, kind: LayerKind, ends: tuple[Tensor, Tensor], flash: bool, code: Code
) -> tuple[Op, ...]:
    """The branch that mixes tokens; ends: the residual stream before and after it."""
    stream, after = ends
    branch = Tensor("attention_sum", HIDDEN_SP)
    mixer = MIXERS[kind.mixer].operations(model, code) if kind.mixer in MIXERS else ()
    if kind.mixer in ("attention", "attention-shared", "attention-mamba2"):
        at = model.at(kind.window)
        own = attention(at, kind.window, flash, code, own_keys=not kind.shares_keys)
        own = of_kind(model, kind, own)
        mixer = beside_attention(mixer, own) if mixer else own
    out = mixer[-1].name
    mixed = entering(model, "attention", stream)
    read = mixed[0].makes[0] if mixed else stream
    opening, normed = branch_norm(model, "attention_norm", read, code)
    return (
        *mixed,
        *opening,
        Collective(
            name="attention_in",
            site="tp_enter",
            tensor=Tensor("attention_in_full", HIDDEN),
            reads=(normed,),
            makes=(ATTENTION_IN,),
            exchanged=(SCATTERED,),
        ),
        *mixer,
        tp_exit("attention_sum", f"{out}_full", f"{out}_out", branch),
        _residual(
            model,
            "attention_residual",
            (stream, *_sandwich(model, branch), *_dropout_mask("attention", model, code)),
            after,
            branch,
        ),
    )


def _feeding(
    model: ModelSpec, kind: LayerKind, ends: tuple[Tensor, Tensor], code: Code
) -> tuple[Op, ...]:
    """The feed-forward branch; ends: the residual stream before and after it."""
    middle, end = ends
    own_norm, width = model.norms_per_layer != 1, "wide_ffn" if model.widens_mlp(kind) else "ffn"
    branch = Tensor(f"{'moe' if kind.moe else 'mlp'}_sum", HIDDEN_SP)
    has_shared = kind.moe and model.shared_expert_intermediate_size > 0
    shared = (Tensor("shared_sum", HIDDEN_SP),) * has_shared
    normed = (branch,) * model.moe_output_norm + (branch, *shared) * model.moe_branch_norms
    behind = tuple(
        norm(model, one.name.removesuffix("sum") + "norm", one, code) for one in normed if kind.moe
    )
    joint = replace(branch, name="branches") if len(behind) > 1 else branch
    mixed = entering(model, "mlp", middle)
    read = mixed[0].makes[0] if mixed else middle
    before = routed_norms(model, read, code) if kind.moe else ()
    opening, source = (
        branch_norm(model, "mlp_norm", read, code, gates=kind.moe)
        if own_norm
        else ((_shared_norm(model, code),), Tensor("attention_norm_out", HIDDEN_SP))
    )
    return (
        *mixed,
        *opening,
        *before,
        *(moe(model, source, code) if kind.moe else mlp(model, width, "mlp", source)),
        *behind,
        _residual(
            model,
            "mlp_residual",
            (middle, *_sandwich(model, joint), *_dropout_mask("mlp", model, code)),
            end,
            *([one.makes[0] for one in behind] or [branch]),
            *(() if model.moe_branch_norms else shared),
        ),
    )


@remembered
def head_ops(model: ModelSpec, code: Code = PLAIN) -> tuple[Op, ...]:
    """Final norm, vocabulary projection and cross entropy.

    Logits are counted at the peak of the loss: `cost.memory`.
    """
    normed = Tensor("final_norm_out", HIDDEN_SP)
    source = Tensor("head_in", HIDDEN)
    stream = Tensor("y", stream_dims(model))
    mixed = entering(model, "head", stream)
    return (
        *mixed,
        norm(model, "final_norm", mixed[0].makes[0] if mixed else stream, code),
        Collective(
            name="head_in",
            site="tp_enter",
            tensor=Tensor("head_in_full", HIDDEN),
            linear=False,
            reads=(normed,),
            makes=(source,),
            exchanged=(SCATTERED,),
        ),
        product(
            "head",
            ("tokens",),
            ("hidden",),
            ("vocab",),
            source,
            Tensor("logits", ("tokens", "vocab")),
            role="head",
        ),
        Elementwise(
            name="cross_entropy",
            dims=("tokens", "vocab_loss"),
            width="fp32",
            kernels=5,
            moves=Moves(4.5, 5.5, 1.0, 1.5),
        ),
        *(_chunked_loss() if code.chunks_loss else ()),
    )


def _chunked_loss() -> tuple[Op, ...]:
    """Bytes that a loss in chunks moves besides, not fused: hidden states and head gradients.

    Hidden states are copied into chunks; their fp32 gradient is zeroed, filled from 16 bits and
    cast back: 2 + 2 + 4 + 6 + 6 bytes an element, of 2 bytes a move. The head's gradient is added
    to an fp32 sum, which is read and written, for every chunk but the first.
    Source: torchtitan 0.3.0 components/loss.py (ChunkedLossWrapper, GradAccumulator),
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (accumulate_unsharded_grad_if_needed).
    """
    moves = {"loss_chunks": (HIDDEN, 10.0), "head_sum": (("vocab", "hidden"), 5.0)}
    times = {"loss_chunks": 1.0, "head_sum": LOSS_CHUNKS - 1.0}
    return tuple(
        Elementwise(
            name=name,
            dims=dims,
            kernels=2 * LOSS_CHUNKS,
            moves=Moves(times[name] * count, 0.0, times[name] * count, 0.0),
        )
        for name, (dims, count) in moves.items()
    )


@remembered
def embedding_ops(model: ModelSpec, code: Code = PLAIN) -> tuple[Op, ...]:
    """Row gather forward, scatter-add backward; under TP the rows are summed over the group."""
    more = per_layer.looked_up(model, code) if model.hidden_size_per_layer_input else ()
    return (*embedding("embedding", "embedded"), *more, *widened(model))


def _shared_norm(model: ModelSpec, code: Code) -> Elementwise:
    """The share of the second branch in a norm that both read (a parallel residual)."""
    one = norm(model, "mlp_norm", Tensor("x", HIDDEN_SP), code)
    return replace(one, saves=(), output=None, reads=(), makes=(), workspace=(), casts=False)


def _sandwich(model: ModelSpec, branch: Tensor) -> tuple[Tensor, ...]:
    """Tensors saved by norms behind attention and MLP (Gemma 2 and 3): the branch's sum."""
    return (
        (branch, Tensor(f"{branch.name}_rstd", branch.dims[:-1], width="fp32"))
        if model.norms_per_layer == 4
        else ()
    )


def _dropout_mask(name: str, model: ModelSpec, code: Code) -> tuple[Tensor, ...]:
    """Mask saved by dropout of a branch before the residual sum: a byte an element.

    Source: Korthikanti et al. 2022, section 4.1; torch's native_dropout saves a boolean mask.
    """
    drops = code.drops_residual and model.residual_dropout > 0
    return (Tensor(f"{name}_mask", HIDDEN_SP, width="byte"),) * drops


def _residual(
    model: ModelSpec, name: str, held: tuple[Tensor, ...], output: Tensor, *branches: Tensor
) -> Elementwise:
    """The sum of the residual stream and the branches, or a branch's output in each stream."""
    if model.hc_mult:
        return leaving(name, held, branches, output, across=model.hc_sinkhorn_iters > 0)
    stream, *kept = held
    masks = 0.5 * sum(tensor.width == "byte" for tensor in kept)  # a byte of a 16-bit element's two
    return Elementwise(
        name=name,
        dims=HIDDEN_SP,
        kernels=1,
        moves=Moves(3.0 + masks, 2.0 + masks, 1.0 + masks, 1.0 + masks),
        saves=tuple(kept),
        reads=(stream, *branches),
        makes=(output,),
        shares=True,
    )
