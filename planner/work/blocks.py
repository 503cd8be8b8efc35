"""A model's layers as lists of operations: attention (GQA, MLA), MLP, mixture of experts, norms, embedding, head and loss.

Moves per element are counted from the eager kernels of PyTorch (reads + writes of each kernel); fused values are what one
fused kernel must move. Saved tensors are what eager autograd keeps for backward.
"""

from functools import lru_cache

from planner.specs.model import LayerKind, ModelSpec
from planner.work.ops import Attention, Collective, Dims, Elementwise, Gemm, Op, Tensor

HIDDEN: Dims = ("tokens", "hidden")
HIDDEN_SP: Dims = ("tokens_sp", "hidden")


@lru_cache(maxsize=256)
def layer_ops(model: ModelSpec, kind: LayerKind, flash: bool, composite_norm: bool = False) -> tuple[Op, ...]:
    """Operations of one transformer layer, in order.

    flash: fused attention; otherwise the probabilities are materialised.  composite_norm: eager norms keep fp32 copies.
    """
    attention = _mla(model) if model.uses_mla else _gqa(model)
    feed_forward = _moe(model) if kind.moe else _mlp(model, "ffn", "mlp", model.mlp)
    core = _attention_core(kind.window, flash, model.uses_mla)
    return (
        _norm(model, "attention_norm", Tensor(name="x", dims=HIDDEN_SP), composite_norm),
        Collective(name="attention_in", site="tp_enter", tensor=Tensor(name="attention_in_full", dims=HIDDEN)),
        *attention,
        Collective(name="context_in", site="cp_enter", tensor=Tensor(name="kv_full", dims=("tokens", "kv_width"))),
        *core,
        Collective(name="context_out", site="cp_exit", tensor=Tensor(name="qo", dims=("tokens", "qo_width"))),
        Gemm(
            name="wo",
            rows=("tokens",),
            cols=("hidden",),
            depth=("heads", "v_dim"),
            saves=(Tensor(name="attention_out", dims=("tokens", "heads", "v_dim")),),
            output=Tensor(name="wo_out", dims=HIDDEN),
        ),
        Collective(name="attention_sum", site="tp_exit", tensor=Tensor(name="wo_full", dims=HIDDEN)),
        _residual("attention_residual"),
        _norm(model, "mlp_norm", Tensor(name="h", dims=HIDDEN_SP), composite_norm),
        *feed_forward,
        _residual("mlp_residual"),
    )


def head_ops(model: ModelSpec) -> tuple[Op, ...]:
    """Final norm, vocabulary projection and cross entropy. Logits are counted where they live: `cost.memory`."""
    return (
        _norm(model, "final_norm", Tensor(name="final_x", dims=HIDDEN_SP)),
        Collective(name="head_in", site="tp_enter", tensor=Tensor(name="head_in_full", dims=HIDDEN), linear=False),
        Gemm(
            name="head",
            rows=("tokens",),
            cols=("vocab",),
            depth=("hidden",),
            role="head",
            saves=(Tensor(name="head_in", dims=HIDDEN),),
            output=Tensor(name="logits", dims=("tokens", "vocab")),
        ),
        Elementwise(
            name="cross_entropy",
            dims=("tokens", "vocab_loss"),
            width="fp32",
            kernels=5,
            forward_moves=4.5,
            backward_moves=5.5,
            fused_forward_moves=1.0,
            fused_backward_moves=1.5,
        ),
    )


def embedding_ops() -> tuple[Op, ...]:
    """Row gather forward, scatter-add backward; under TP the rows are summed over the group."""
    return (
        Elementwise(
            name="embedding",
            dims=HIDDEN,
            kernels=2,
            forward_moves=2.0,
            backward_moves=4.0,
            fused_forward_moves=2.0,
            fused_backward_moves=4.0,
        ),
        Collective(name="embedding_sum", site="tp_exit", tensor=Tensor(name="embedded", dims=HIDDEN), linear=False),
    )


def _norm(model: ModelSpec, name: str, source: Tensor, composite: bool = False) -> Elementwise:
    upcast = (Tensor(name=f"{name}_upcast", dims=source.dims, width="fp32", eager_only=True),) if composite else ()
    sandwich = model.norms_per_layer / 2 if name != "final_norm" else 1.0
    return Elementwise(
        name=name,
        dims=source.dims,
        kernels=max(1, round(4 * sandwich)),
        saves=(source, *upcast),
        forward_moves=6.0 * sandwich,
        backward_moves=8.0 * sandwich,
        fused_forward_moves=2.0 * sandwich,
        fused_backward_moves=4.0 * sandwich,
        output=Tensor(name=f"{name}_out", dims=source.dims),
    )


def _residual(name: str) -> Elementwise:
    return Elementwise(
        name=name, dims=HIDDEN_SP, kernels=1, forward_moves=3.0, backward_moves=2.0, fused_forward_moves=1.0, fused_backward_moves=1.0
    )


def _projection(name: str, cols: Dims, depth: Dims, source: Tensor) -> Gemm:
    return Gemm(
        name=name, rows=("tokens",), cols=cols, depth=depth, saves=(source,), output=Tensor(name=f"{name}_out", dims=("tokens", *cols))
    )


def _gqa(model: ModelSpec) -> tuple[Op, ...]:
    source = Tensor(name="attention_in", dims=("tokens_saved", "hidden"), width="linear")
    return (
        _projection("wq", ("heads", "qk_dim"), ("hidden",), source),
        _projection("wk", ("kv_heads", "qk_dim"), ("hidden",), source),
        _projection("wv", ("kv_heads", "v_dim"), ("hidden",), source),
        _rotary(("tokens", "heads_and_kv", "qk_dim"), model.qk_norm != "none", model.position_embedding == "rope"),
    )


def _mla(model: ModelSpec) -> tuple[Op, ...]:
    """DeepSeek-V2's low-rank attention: queries and keys/values through narrow projections, then up."""
    source = Tensor(name="attention_in", dims=("tokens_saved", "hidden"), width="linear")
    query: tuple[Op, ...] = (_projection("wq", ("heads", "qk_dim"), ("hidden",), source),)
    if model.q_lora_rank:
        narrow = Tensor(name="q_narrow", dims=("tokens", "q_lora"), width="linear")
        query = (_projection("wq_a", ("q_lora",), ("hidden",), source), _projection("wq_b", ("heads", "qk_dim"), ("q_lora",), narrow))
    return (
        *query,
        _projection("wkv_a", ("kv_lora_rope",), ("hidden",), source),
        _projection("wkv_b", ("heads", "kv_up"), ("kv_lora",), Tensor(name="kv_narrow", dims=("tokens", "kv_lora"), width="linear")),
        _rotary(("tokens", "heads_and_kv", "qk_dim"), True, True),
    )


def _rotary(dims: Dims, normed: bool, rope: bool) -> Elementwise:
    extra = 6.0 if normed else 0.0
    base = 8.0 if rope else 0.5
    return Elementwise(
        name="rotary",
        dims=dims,
        kernels=6 if rope else 1,
        forward_moves=base + extra,
        backward_moves=base + extra,
        fused_forward_moves=2.0 if rope else 0.0,
        fused_backward_moves=2.0 if rope else 0.0,
    )


def _attention_core(window: int, flash: bool, mla: bool) -> tuple[Op, ...]:
    out = Tensor(name="attention_out", dims=("tokens", "heads", "v_dim"))
    keys = "heads" if mla else "kv_heads"
    inputs = (
        Tensor(name="q", dims=("tokens", "heads", "qk_dim")),
        Tensor(name="k", dims=("tokens", keys, "qk_dim")),
        Tensor(name="v", dims=("tokens", keys, "v_dim")),
    )
    if flash:
        statistics = Tensor(name="log_sum_exp", dims=("tokens", "heads"), width="fp32")
        return (Attention(name="attention", window=window, saves=(*inputs, out, statistics), output=out, statistics=statistics),)
    # Korthikanti et al. 2022: softmax output 2, dropout mask 1, dropout output 2 bytes an element of heads x seq x seq.
    softmax = Tensor(name="softmax_out", dims=("tokens", "heads", "context"))
    probabilities = Tensor(name="probabilities", dims=("tokens", "heads", "context"))
    mask = Tensor(name="dropout_mask", dims=("tokens", "heads", "context"), width="byte")
    core = Attention(name="attention", window=window, saves=(*inputs, out, softmax, probabilities, mask), output=out, statistics=softmax)
    moves = Elementwise(
        name="softmax_dropout",
        dims=("tokens", "heads", "context"),
        kernels=3,
        forward_moves=6.0,
        backward_moves=8.0,
        fused_forward_moves=6.0,
        fused_backward_moves=8.0,
    )
    return core, moves


def _mlp(model: ModelSpec, width: str, prefix: str, activation: str) -> tuple[Op, ...]:
    source = Tensor(name=f"{prefix}_in", dims=("tokens_saved", "hidden"), width="linear")
    inner: Dims = ("tokens", width)
    activated = Tensor(name=f"{prefix}_act", dims=inner, width="linear")
    up: tuple[Op, ...] = (_projection(f"{prefix}_w1", (width,), ("hidden",), source),)
    if activation == "swiglu":
        up = (*up, _projection(f"{prefix}_w3", (width,), ("hidden",), source))
    return (
        Collective(name=f"{prefix}_in", site="tp_enter", tensor=Tensor(name=f"{prefix}_full", dims=HIDDEN)),
        *up,
        _activation(prefix, inner, activation),
        Gemm(
            name=f"{prefix}_w2",
            rows=("tokens",),
            cols=("hidden",),
            depth=(width,),
            saves=(activated,),
            output=Tensor(name=f"{prefix}_w2_out", dims=HIDDEN),
        ),
        Collective(name=f"{prefix}_sum", site="tp_exit", tensor=Tensor(name=f"{prefix}_w2_full", dims=HIDDEN)),
    )


def _activation(prefix: str, dims: Dims, activation: str) -> Elementwise:
    first = Tensor(name=f"{prefix}_w1_out", dims=dims)
    if activation == "swiglu":
        saves = (first, Tensor(name=f"{prefix}_w3_out", dims=dims), Tensor(name=f"{prefix}_silu", dims=dims, eager_only=True))
        return Elementwise(
            name=f"{prefix}_swiglu",
            dims=dims,
            kernels=2,
            saves=saves,
            forward_moves=5.0,
            backward_moves=9.0,
            fused_forward_moves=3.0,
            fused_backward_moves=5.0,
        )
    return Elementwise(
        name=f"{prefix}_activation",
        dims=dims,
        kernels=2,
        saves=(first,),
        forward_moves=4.0,
        backward_moves=5.0,
        fused_forward_moves=2.0,
        fused_backward_moves=3.0,
    )


def _moe(model: ModelSpec) -> tuple[Op, ...]:
    """Router, permutation, dispatch over EP, grouped experts, combine, and the shared expert where there is one."""
    routed: Dims = ("tokens_routed", "hidden")
    inner: Dims = ("tokens_routed", "expert_ffn")
    received = Tensor(name="expert_in", dims=routed, width="expert")
    shared: tuple[Op, ...] = _mlp(model, "shared_ffn", "shared", model.mlp) if model.shared_expert_intermediate_size else ()
    up = [("expert_w1", "expert_ffn")] + ([("expert_w3", "expert_ffn")] if model.mlp == "swiglu" else [])
    return (
        Gemm(
            name="router",
            rows=("tokens_moe",),
            cols=("experts",),
            depth=("hidden",),
            role="router",
            saves=(Tensor(name="router_in", dims=("tokens_moe", "hidden")),),
            output=Tensor(name="router_out", dims=("tokens_moe", "experts"), width="fp32"),
        ),
        Elementwise(
            name="routing",
            dims=("tokens_moe", "experts"),
            width="fp32",
            kernels=12,
            forward_moves=8.0,
            backward_moves=6.0,
            fused_forward_moves=4.0,
            fused_backward_moves=4.0,
            saves=(Tensor(name="scores", dims=("tokens_moe", "experts"), width="fp32"),),
        ),
        _permutation("permute", ()),
        Collective(name="dispatch", site="ep_exchange", tensor=Tensor(name="dispatched", dims=routed)),
        *(
            Gemm(
                name=name,
                rows=("tokens_per_expert",),
                cols=(width,),
                depth=("hidden",),
                batch=("experts_local",),
                role="expert",
                saves=(received,),
                output=Tensor(name=f"{name}_out", dims=("tokens_routed", width)),
            )
            for name, width in up
        ),
        _activation("expert", inner, model.mlp),
        Gemm(
            name="expert_w2",
            rows=("tokens_per_expert",),
            cols=("hidden",),
            depth=("expert_ffn",),
            batch=("experts_local",),
            role="expert",
            saves=(Tensor(name="expert_act", dims=inner, width="expert"),),
            output=Tensor(name="expert_w2_out", dims=routed),
        ),
        Collective(name="expert_sum", site="etp_exit", tensor=Tensor(name="expert_full", dims=routed)),
        Collective(name="combine", site="ep_exchange", tensor=Tensor(name="combined", dims=routed)),
        _permutation("unpermute", (Tensor(name="expert_out", dims=routed),)),
        *shared,
    )


def _permutation(name: str, saves: tuple[Tensor, ...]) -> Elementwise:
    return Elementwise(
        name=name,
        dims=("tokens_routed", "hidden"),
        kernels=6,
        saves=saves,
        forward_moves=4.0,
        backward_moves=4.0,
        fused_forward_moves=2.0,
        fused_backward_moves=2.0,
    )
