"""Attention as operations: projections, rotary embedding, and the core.

Grouped-query or multi-head latent attention; the core is fused or not.
"""

from dataclasses import replace

from planner.specs.model import ModelSpec
from planner.work.heads import projects_gate
from planner.work.ops import Attention, Collective, Dims, Elementwise, Gemm, Moves, Op, Tensor
from planner.work.pieces import (
    ATTENTION_IN,
    Code,
    norm,
    norm_saves,
    output_projection,
    product,
    projection,
    upcast,
)

# Width of a head in Transformer Engine's fused kernels; wider ones run unfused (pytorch/attention/
# dot_product_attention/utils.py, get_attention_backend; common/fused_attn/fused_attn.cpp).
WIDEST_FUSED = 256
UNFUSED = "softmax_out"


def attention(
    model: ModelSpec,
    window: int,
    flash: bool,
    code: Code,
    chosen: tuple[Op, ...] = (),
    own_keys: bool = True,
) -> tuple[Op, ...]:
    """Softmax attention, from its input to the output projection.

    chosen: operations that choose the keys of each query.
    own_keys: False where a layer before gives keys and values, and saves them. Where both
        layers are recomputed they stay besides, below 3% of all that does: not counted.
    """
    flash = flash and not (code.own_mixers and model.qk_head_dim > WIDEST_FUSED)
    attended = Tensor("attention_out", ("tokens", "heads", "v_dim"))
    gate = output_gate(model, attended)
    gated = Tensor("attention_gated", attended.dims) if gate else attended
    return (
        *(mla(model, code) if model.uses_mla else gqa(model, code, own_keys)),
        Collective(
            name="context_in", site="cp_enter", tensor=Tensor("kv_full", ("tokens", "kv_width"))
        ),
        *chosen,
        *(
            _masked_core(model, code)
            if chosen and model.attention_sinks
            else attention_core(window, flash, model, code, own_keys)
        ),
        Collective(name="context_out", site="cp_exit", tensor=Tensor("qo", ("tokens", "qo_width"))),
        *gate,
        output_projection("wo", ("heads", "v_dim"), gated),
    )


def gqa(model: ModelSpec, code: Code, own_keys: bool) -> tuple[Op, ...]:
    """Projections of queries, and of own keys and values, and the rotary embedding."""
    width = "q_dim" if model.attention_output_gate else "qk_dim"
    wq = projection("wq", ("heads", width), ("hidden",), ATTENTION_IN)
    if not own_keys:
        statistics = (wq.output, _head_statistics(model)[0])
        queries = rotary(
            ("tokens", "heads", "qk_dim"),
            model.qk_norm != "none",
            model.position_embedding == "rope",
            reads=(wq.output,),
            makes=_attention_gradients(model, code)[:1],
            saves=() if model.qk_norm == "none" else statistics,
        )
        return wq, queries
    wk = projection("wk", ("kv_heads", "qk_dim"), ("hidden",), ATTENTION_IN)
    name = "" if code.repeats_kv or model.value_norm else "v"
    wv = projection("wv", ("kv_heads", "v_dim"), ("hidden",), ATTENTION_IN, name)
    values = (wk if model.attention_k_eq_v else wv).output
    behind = (_value_norm(model, values, code),) if model.value_norm else ()
    normed = () if model.qk_norm == "none" else (wq.output, wk.output, *_head_statistics(model))
    makes = _attention_gradients(model, code)
    values = behind[0].makes[0] if behind else values
    turned = rotary(
        ("tokens", "heads_and_kv", "qk_dim"),
        model.qk_norm != "none",
        model.position_embedding == "rope",
        reads=(wq.output, wk.output, values) if code.repeats_kv else (wq.output, wk.output),
        makes=makes if code.repeats_kv else makes[:2],
        saves=normed,
    )
    return (wq, wk, *(() if model.attention_k_eq_v else (wv,)), *behind, turned)


def _value_norm(model: ModelSpec, values: Tensor, code: Code) -> Elementwise:
    """A norm without weights of each head of values (transformers 5.24 models/gemma4)."""
    made = Tensor("wv_out" if code.repeats_kv else "v", values.dims)
    return replace(norm(model, "value_norm", values, code), output=made, makes=(made,))


def output_gate(model: ModelSpec, attended: Tensor) -> tuple[Op, ...]:
    """Attention's output times the sigmoid of the other half of the query projection (Qwen3-Next).

    With one gate a head (LFM3), or MLA (HY 4), times the sigmoid of a projection of its own. The
    product saves both, in fp32 where the latent of queries has the gate (A.X K2); of the sigmoid
    nothing else stays.
    Source: transformers 5.24 models/qwen3_next (Qwen3NextAttention), models/lfm3 (Lfm3Attention),
        models/hy_v4 (HYV4Attention), models/axk2 (AXK2Attention).
    """
    if not model.gates_attention:
        return ()
    own: tuple[Gemm, ...] = ()
    width: Dims = () if model.attention_head_gate else ("v_dim",)
    share = Tensor("attention_gate", (*attended.dims[:2], *width))
    latent = model.fused_query_gate
    source = Tensor("wq_b_out" if latent else "wq_out", ("tokens", "heads", "q_dim"))
    if projects_gate(model):
        own = (projection("wg", ("heads", *width), ("hidden",), ATTENTION_IN),)
        source = own[0].output
    return (
        *own,
        Elementwise(
            name="attention_gate",
            dims=attended.dims,
            kernels=3,
            moves=Moves(7.0, 10.0, 3.0, 5.0),
            saves=(attended, *(upcast(share) if latent else (share,))),
            reads=(attended, source),
            makes=(Tensor("attention_gated", attended.dims),),
        ),
    )


def _head_statistics(model: ModelSpec) -> tuple[Tensor, ...]:
    per_head = model.qk_norm == "head"
    return tuple(
        Tensor(f"{name}_rstd", ("tokens", width) if per_head else ("tokens",), width="fp32")
        for name, width in (("q_norm", "heads"), ("k_norm", "kv_heads"))
    )


def mla(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """DeepSeek-V2's low-rank attention: narrow projections of queries and keys/values, then up."""
    query, down = latents(model, code)
    normed = _rotated_norm(model, down.output, code)
    latent = normed[0].makes[0] if normed else down.output
    up = _up_projection("wkv_b", "kv_lora", ("heads", "kv_up"), latent, (model, code))
    turned = rotary(
        ("tokens", "heads_and_kv", "qk_dim"),
        True,
        True,
        reads=(query[-1].output, up.output),
        makes=_attention_gradients(model, code),
    )
    return *query, down, *normed, up, turned


def _rotated_norm(model: ModelSpec, down: Tensor, code: Code) -> tuple[Elementwise, ...]:
    """The norm of the key's rotated part, if any; it is a view of the product, the rest a copy.

    Source: transformers 5.24 models/dots3_note (Dots3NoteTextAttention).
    """
    rotated = Tensor("k_rope", ("tokens", "qk_rope"))
    one, latent = norm(model, "k_rope_norm", rotated, code), ("tokens", "kv_lora")
    saves = (replace(t, dims=down.dims) if t.name == rotated.name else t for t in one.saves)
    makes = (Tensor("kv_latent", latent), *one.makes)
    return (replace(one, saves=tuple(saves), reads=(down,), makes=makes),) * model.k_rope_norm


def latents(model: ModelSpec, code: Code) -> tuple[tuple[Gemm, ...], Gemm]:
    """Projections to the queries, and down to the latent of keys and values."""
    heads: Dims = ("heads", "q_dim" if model.fused_query_gate else "qk_dim")
    query: tuple[Gemm, ...] = (projection("wq", heads, ("hidden",), ATTENTION_IN),)
    if model.q_lora_rank:
        down = projection("wq_a", ("q_lora",), ("hidden",), ATTENTION_IN)
        query = (down, _up_projection("wq_b", "q_up", heads, down.output, (model, code)))
    return query, projection("wkv_a", ("kv_lora_rope",), ("hidden",), ATTENTION_IN)


def _up_projection(
    name: str, rank: str, cols: Dims, down: Tensor, style: tuple[ModelSpec, Code]
) -> Gemm:
    """A linear layer behind a norm of the narrow activations.

    The norm saves the whole narrow projection.
    """
    model, code = style
    narrow = Tensor(f"{name}_in", ("tokens", rank), width="linear")
    saves = (narrow, *norm_saves(model, f"{name}_norm", down, code.composite_norm))
    return product(name, ("tokens",), (rank,), cols, down, saves=saves)


def rotary(
    dims: Dims,
    normed: bool,
    rope: bool,
    *,
    reads: tuple[Tensor, ...],
    makes: tuple[Tensor, ...],
    saves: tuple[Tensor, ...] = (),
) -> Elementwise:
    """The rotary embedding of queries and keys, with the norm of both where there is one."""
    extra = 6.0 if normed else 0.0
    base = 8.0 if rope else 0.5
    return Elementwise(
        name="rotary",
        dims=dims,
        kernels=6 if rope else 1,
        moves=Moves(base + extra, base + extra, 2.0 if rope else 0.0, 2.0 if rope else 0.0),
        saves=saves,
        reads=reads,
        makes=makes,
    )


def _attention_inputs(model: ModelSpec, code: Code) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as autograd saves them.

    MLA's value is a view of the projection that also holds the keys.
    """
    keys = "heads" if model.uses_mla else "kv_heads_repeated" if code.repeats_kv else "kv_heads"
    value = "kv_up" if model.uses_mla else "v_dim"
    return (
        Tensor("q", ("tokens", "heads", "qk_dim")),
        Tensor("k", ("tokens", keys, "qk_dim")),
        Tensor("v", ("tokens", keys, value)),
    )


def _attention_gradients(model: ModelSpec, code: Code) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the same three, as attention's backward returns them.

    The gradient of a view has its own size.
    """
    q, k, v = _attention_inputs(model, code)
    return q, k, Tensor("v", (*v.dims[:2], "v_dim"))


def attention_core(
    window: int, flash: bool, model: ModelSpec, code: Code, own_keys: bool = True
) -> tuple[Op, ...]:
    """From queries, keys and values to the attended values."""
    out = Tensor("attention_out", ("tokens", "heads", "v_dim"))
    inputs = _attention_inputs(model, code)
    saved = inputs if own_keys else inputs[:1]
    if flash:
        statistics = Tensor("log_sum_exp", ("tokens", "heads"), width="fp32")
        return (
            Attention(
                name="attention",
                window=window,
                saves=(*saved, out, statistics, Tensor("ring_out", ("tokens_ring", *out.dims[1:]))),
                output=out,
                statistics=statistics,
                reads=_attention_gradients(model, code),
                workspace=(*_flash_workspace(model), *_ring_workspace(inputs)),
            ),
        )
    # Korthikanti et al. 2022: softmax output 2, dropout mask 1, dropout output 2 bytes per element
    # of heads x seq x seq.
    square: Dims = ("tokens", "heads", "context")
    softmax = Tensor(UNFUSED, square)
    probabilities = Tensor("probabilities", square)
    mask = Tensor("dropout_mask", square, width="byte")
    gradients = (Tensor("probabilities_gradient", square), Tensor("scores_gradient", square))
    core = Attention(
        name="attention",
        window=window,
        saves=(*saved, out, softmax, probabilities, mask),
        output=out,
        statistics=softmax,
        reads=_attention_gradients(model, code),
        workspace=gradients,
    )
    moves = Elementwise(
        name="softmax_dropout", dims=square, kernels=3, moves=Moves(6.0, 8.0, 6.0, 8.0)
    )
    return core, moves


def _masked_core(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """The core of attention with a mask and sinks, which no fused kernel has."""
    out = Tensor("attention_out", ("tokens", "heads", "v_dim"))
    core = Attention(
        name="attention",
        window=0,
        saves=_attention_inputs(model, code),
        output=out,
        statistics=out,
        reads=_attention_gradients(model, code),
    )
    return with_sinks(core, ("tokens", "heads", "context"))


def with_sinks(core: Attention, square: Dims) -> tuple[Op, ...]:
    """Eager scores of all keys, a mask, sinks beside them, a softmax, as five squares.

    Source: transformers 5.24 models/gpt_oss (eager_attention_forward).
    """
    softmax = Tensor(UNFUSED, square)
    top = Tensor("top_scores", ("tokens", "heads"), width="index")
    squares = Elementwise(
        name="softmax_dropout",
        dims=square,
        kernels=8,
        moves=Moves(13.0, 13.0, 5.0, 5.0),
        forward_workspace=(softmax,) * 2,
    )
    saves = (*core.saves, softmax, top)
    return replace(core, saves=saves, statistics=softmax, workspace=(softmax,) * 3), squares


def _ring_workspace(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Backward buffers of torch's ring over CP.

    Gradients are in fp32, those of keys and values five times (summed, of a step, packed, received,
    added). The merged output is laid out by heads, so the next GEMM saves a copy (`ring_out`).
    Source: torch/distributed/tensor/experimental/_attention.py (_templated_ring_attention_backward,
    _AllGatherRotater).
    """
    query, *pair = inputs
    summed = Tensor("ring_dq", ("tokens_ring", *query.dims[1:]), width="fp32")
    passed = tuple(
        Tensor(f"ring_d{t.name}", ("tokens_ring", *t.dims[1:]), width="fp32") for t in pair
    )
    here = tuple(Tensor(f"ring_{t.name}", ("tokens_ring_all", *t.dims[1:])) for t in pair)
    return summed, *passed * 5, *here


def _flash_workspace(model: ModelSpec) -> tuple[Tensor, ...]:
    """Backward buffers of flash attention: query gradients summed in fp32, and row sums.

    Under GQA also the key and value gradients of every query head, before they are summed.
    Source: flash-attention csrc/flash_attn/flash_api.cpp, mha_bwd (dq_accum, softmax_d,
        dk_expanded, dv_expanded).
    """
    summed = Tensor("dq_accum", ("tokens", "heads", "qk_dim"), width="fp32")
    rows = Tensor("softmax_d", ("tokens", "heads"), width="fp32")
    if model.uses_mla or model.num_key_value_heads == model.num_attention_heads:
        return summed, rows
    expanded = tuple(
        Tensor(f"{name}_expanded", ("tokens", "heads", width))
        for name, width in (("dk", "qk_dim"), ("dv", "v_dim"))
    )
    return summed, rows, *expanded
