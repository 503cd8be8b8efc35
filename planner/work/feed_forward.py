"""Feed-forward blocks as operations: MLP and mixture of experts.

A mixture has a router, permutation, exchange, grouped experts and shared experts.
"""

from dataclasses import replace

from planner.specs.model import ModelSpec
from planner.work.expert_path import PATHS, weighed_biases
from planner.work.ops import Collective, Dims, Elementwise, Gemm, Moves, Op, Tensor
from planner.work.pieces import (
    HIDDEN,
    HIDDEN_SP,
    SCATTERED,
    Code,
    norm,
    output_projection,
    product,
    projection,
    tp_exit,
)

ROUTED: Dims = ("tokens_routed", "expert_hidden")
SENT: Dims = ("tokens_sent", "expert_hidden")
GROUPED: Dims = ("tokens_grouped", "expert_hidden")
# torchtitan 0.2 models/moe/moe.py: casts, scores, top-k, gather, normalisation, counts, sort.
# Megatron-Core transformer/moe (moe_utils.py, token_dispatcher.py): the same with masks scattered
# and counted, counts exchanged and copied to the host, and the loss that balances load.
ROUTING_KERNELS, ROUTING_SINGLES = 20, 40
ROUTED_IN = "experts_in"
EXCHANGED = Tensor("exchanged", ("tokens_exchanged", "expert_hidden"))


def mlp(model: ModelSpec, width: str, prefix: str, normed: Tensor) -> tuple[Op, ...]:
    """A dense MLP of this width, sequence-parallel borders included."""
    source = Tensor(f"{prefix}_in", HIDDEN)
    inner: Dims = ("tokens", width)
    first = projection(f"{prefix}_w1", (width,), ("hidden",), source)
    up: tuple[Op, ...] = (first,)
    if model.mlp == "swiglu":
        up = (first, projection(f"{prefix}_w3", (width,), ("hidden",), source))
    activated = Tensor(f"{prefix}_act", inner, width="linear")
    return (
        Collective(
            name=f"{prefix}_in",
            site="tp_enter",
            tensor=Tensor(f"{prefix}_full", HIDDEN),
            reads=(normed,),
            makes=(source,),
            exchanged=(SCATTERED,),
        ),
        *up,
        activation(prefix, inner, model.mlp),
        output_projection(f"{prefix}_w2", (width,), activated),
        tp_exit(
            f"{prefix}_sum",
            f"{prefix}_w2_full",
            f"{prefix}_w2_out",
            Tensor(f"{prefix}_sum", HIDDEN_SP),
        ),
    )


def activation(prefix: str, dims: Dims, activation: str) -> Elementwise:
    """Operations between the first and the last GEMM."""
    first = Tensor(f"{prefix}_w1_out", dims)
    makes = (Tensor(f"{prefix}_act", dims),)
    if activation == "swiglu":
        gate = Tensor(f"{prefix}_w3_out", dims)
        return Elementwise(
            name=f"{prefix}_swiglu",
            dims=dims,
            kernels=2,
            saves=(first, gate, Tensor(f"{prefix}_silu", dims, eager_only=True)),
            moves=Moves(5.0, 9.0, 3.0, 5.0),
            reads=(first, gate),
            makes=makes,
        )
    # relu saves its output, and the square saves the same tensor; the square's backward makes a
    # scaled copy and a product. gelu saves its input.
    squares = tuple(
        Tensor(f"{prefix}_{name}", dims, eager_only=True) for name in ("scaled", "product")
    )
    squares = squares if activation == "squared-relu" else ()
    alone = activation == "gelu"
    return Elementwise(
        name=f"{prefix}_activation",
        dims=dims,
        kernels=1 if alone else 2,
        saves=(first,),
        moves=Moves(2.0 if alone else 4.0, 3.0 if alone else 8.0, 2.0, 3.0),
        reads=(first,),
        makes=makes,
        workspace=squares,
    )


def moe(model: ModelSpec, normed: Tensor, code: Code) -> tuple[Op, ...]:
    """Router, permutation, dispatch over EP, grouped experts, combine, and any shared expert."""
    if code.expert_path == "torch" and model.moe_apply_router_weight_on_input:
        code = replace(code, expert_path="torch-scores-first")
    inner: Dims = ("tokens_grouped", "expert_ffn")
    received = Tensor("expert_in", GROUPED)
    shared: tuple[Op, ...] = (
        mlp(model, "shared_ffn", "shared", normed) if model.shared_expert_intermediate_size else ()
    )
    source = Tensor("shared_in" if shared else normed.name, ("tokens_moe", "hidden"))
    weighed = source
    if model.moe_branch_norms:
        weighed, source = (Tensor(name, source.dims) for name in ("router_in", ROUTED_IN))
    scores = Tensor("scores", ("tokens_moe", "experts"), width="fp32")
    scaled = Tensor("routed_fp32", ROUTED, width="fp32", eager_only=True)
    combined, output = (Tensor("expert_out", SENT), Tensor("moe_sum", HIDDEN_SP))
    entering, leaving = _latent(source, output) if model.moe_latent_size else ((), ())
    routed = entering[0].output if entering else source
    summed = leaving[0].reads[0] if leaving else output
    routed_out = Tensor("expert_w2_out", GROUPED)
    # Routed rows before the experts, behind them, back in the tokens' order, and the gradient for
    # which all this is recomputed; then the shared output.
    held = (Tensor("held", ROUTED),) * 4 + (
        (Tensor("shared_out", ("tokens_moe", "hidden")),) if shared else ()
    )
    order = Tensor("sort_index", ("tokens_routed",), width="index")
    up = [("expert_w1", "expert_ffn")] + (
        [("expert_w3", "expert_ffn")] if model.mlp == "swiglu" else []
    )
    return (
        *_at_border("tp_enter", bool(shared), code),
        product(
            "router",
            ("tokens_moe",),
            ("hidden",),
            ("experts",),
            weighed,
            saves=(_router_input(model, weighed),),
            role="router",
        ),
        Elementwise(
            name="routing",
            dims=("tokens_moe", "experts"),
            width="fp32",
            kernels=ROUTING_KERNELS,
            singles=ROUTING_SINGLES,
            waits=1,
            moves=Moves(8.0, 6.0, 4.0, 4.0),
            saves=(scores, *_routing_tables(code)),
            reads=(Tensor("router_out", ("tokens_moe", "experts"), width="fp32"),),
            makes=(scores,),
        ),
        *entering,
        _permutation(
            "gather", code, (scaled,) if code.scores_first else (), (routed,), (received,)
        ),
        Collective(
            name="dispatch",
            site="ep_exchange",
            tensor=Tensor("dispatched", SENT),
            exchanged=(EXCHANGED,),
        ),
        *_over_cut_experts("etp_enter", code),
        _moved("regroup", code),
        *(_of_experts(name, "expert_hidden", width, received) for name, width in up),
        activation("expert", inner, model.mlp),
        _of_experts("expert_w2", "expert_ffn", "expert_hidden", Tensor("expert_act", inner)),
        *weighed_biases(model, code),
        _moved("ungroup", code),
        *_over_cut_experts("etp_exit", code),
        Collective(
            name="combine",
            site="ep_exchange",
            tensor=Tensor("combined", SENT),
            exchanged=(EXCHANGED,),
        ),
        *shared,
        _permutation(
            "scatter",
            code,
            (order, combined) if code.saves_outputs else (order,),
            (routed_out,),
            (summed,),
            held,
            (summed, output) if shared else (summed,),
        ),
        *_identities(model, source),
        *leaving,
        *_at_border("tp_exit", bool(shared), code),
    )


def _of_experts(name: str, depth: str, cols: str, source: Tensor) -> Gemm:
    """A grouped product; rows are padded in what it saves and makes."""
    return product(
        name,
        ("tokens_per_expert",),
        (depth,),
        (cols,),
        source,
        Tensor(f"{name}_out", ("tokens_grouped", cols)),
        saves=(replace(source, width="expert"),),
        batch=("experts_local",),
        role="expert",
    )


def _router_input(model: ModelSpec, weighed: Tensor) -> Tensor:
    """The tensor that the router saves: LongCat-Flash, with zero experts, casts it to fp32."""
    cast = Tensor("router_fp32", weighed.dims, width="fp32")
    return cast if model.zero_expert_num else weighed


def _identities(model: ModelSpec, source: Tensor) -> tuple[Elementwise, ...]:
    """Zero experts: a token times the sum of its scores for them, added to the others' outputs.

    They need no permutation or exchange. Source: transformers 5.24 models/longcat_flash, which
    loops over them as over the others.
    """
    op = Elementwise(
        name="zero_experts",
        dims=source.dims,
        kernels=4,
        moves=Moves(5.0, 6.0, 3.0, 4.0),
        saves=(source,),
    )
    return (op,) * (model.zero_expert_num > 0)


def routed_norms(model: ModelSpec, stream: Tensor, code: Code) -> tuple[Elementwise, ...]:
    """Norms that the router and the routed experts read the residual stream through, each its own.

    The router's has no weights, but a scale for each input. Source: transformers 5.24 models/gemma4
    (Gemma4TextRouter, Gemma4TextDecoderLayer).
    """
    if not model.moe_branch_norms:
        return ()
    weighed, routed = (norm(model, name, stream, code) for name in ("router_norm", "experts_norm"))
    made = Tensor("router_in", stream.dims)
    scaled = Tensor("router_normed", stream.dims)
    return (
        replace(
            weighed,
            kernels=weighed.kernels + 1,
            moves=weighed.moves._replace(
                forward=weighed.moves.forward + 2.0, backward=weighed.moves.backward + 4.0
            ),
            saves=(*weighed.saves, scaled),
            output=made,
            makes=(made,),
        ),
        replace(routed, output=(out := Tensor(ROUTED_IN, stream.dims)), makes=(out,)),
    )


def _latent(source: Tensor, output: Tensor) -> tuple[tuple[Gemm], tuple[Gemm]]:
    """Projections of every token to the experts' latent and back, which TP does not divide.

    Source: transformers 5.24 models/nemotron_h (NemotronHMoE); Megatron-LM core 0.16
    transformer/moe/moe_layer.py (fc1_latent_proj, fc2_latent_proj).
    """
    summed = Tensor("latent_sum", ("tokens_moe", "expert_hidden"))
    rows: Dims = ("tokens_moe",)
    into = product("latent_in", rows, ("hidden",), ("expert_hidden",), source)
    out = product("latent_out", rows, ("expert_hidden",), ("hidden",), summed, output)
    return (into,), (out,)


def _at_border(site: str, shared: bool, code: Code) -> tuple[Collective, ...]:
    """Where the experts' block gathers its tokens over TP, or sums over TP and scatters.

    TorchTitan does both for the block as a whole (models/llama4/infra/parallelize.py,
    apply_moe_ep_tp: replicated input, partial output); a shared expert's borders are the same ones.
    Megatron's ranks route their own tokens.
    """
    if shared or code.expert_path == "fused":
        return ()
    return (
        Collective(
            name=f"experts_{site}",
            site=site,
            tensor=Tensor(f"experts_{site}", HIDDEN),
            linear=False,
        ),
    )


def _over_cut_experts(site: str, code: Code) -> tuple[Collective, ...]:
    """Routed rows gathered over the ranks that cut an expert, or their sums (Megatron)."""
    if code.expert_path != "fused":
        return ()
    return (Collective(name=site, site=site, tensor=Tensor(site, ROUTED)),)


def _routing_tables(code: Code) -> tuple[Tensor, ...]:
    """Indices (int64) that gather, sort and permute routed rows.

    If scores are applied first, also their sorted scores and the padded order.
    Source: torchtitan 0.2.2 models/moe/moe.py and utils.py.
    """
    tables = tuple(
        Tensor(f"{name}_index", ("tokens_routed",), width="index")
        for name in ("gather", "sort", "source")
    )
    if not code.scores_first:
        return tables
    more = (
        ("scores_sorted", "tokens_routed"),
        ("padded_index", "tokens_grouped"),
        ("offsets", "experts_local"),
    )
    return (*tables, *(Tensor(name, (rows,), width="fp32") for name, rows in more))


def _moved(name: str, code: Code) -> Elementwise:
    """Received rows into the order of the local experts, or back: nothing that autograd keeps."""
    moves, kernels, singles = PATHS[code.expert_path][name]
    return Elementwise(
        name=name,
        dims=("tokens_regrouped", "expert_hidden"),
        kernels=kernels,
        singles=singles,
        compiles=code.compiles_exchange,
        moves=moves,
    )


def _permutation(
    name: str,
    code: Code,
    saves: tuple[Tensor, ...],
    reads: tuple[Tensor, ...],
    makes: tuple[Tensor, ...],
    held: tuple[Tensor, ...] = (),
    results: tuple[Tensor, ...] = (),
) -> Elementwise:
    """Rows put into the experts' order or back, scaled by their scores or not.

    Scaling by scores in fp32 has three gradients at once in backward: the incoming one, and its
    products with score and row.
    results: of it and of the shared expert, while that is held.
    held: what recomputation holds here besides all that it saves. Where rows are put back, their
        gradient is moved twice.
    """
    moved = (Tensor("moved", ROUTED, eager_only=True),) * 2 if held else ()
    scaled = saves[0] if saves and saves[0].width == "fp32" else None
    moves, kernels, singles = PATHS[code.expert_path][name]
    return Elementwise(
        name=name,
        dims=("tokens_unsorted" if name == "scatter" else "tokens_copied", "expert_hidden"),
        kernels=kernels,
        singles=singles,
        compiles=code.compiles_exchange,
        saves=saves,
        moves=moves,
        reads=reads,
        makes=makes,
        workspace=(scaled,) * 3 if scaled else moved,
        casts=scaled is not None,
        forward_workspace=held,
        forward_results=results,
    )
