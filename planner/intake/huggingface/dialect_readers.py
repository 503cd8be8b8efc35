"""Translates the switches of single families into the common keys, as their modeling code does.

Each function takes a config whose renamed keys already have their common names
(`dialects.DIALECTS`), and returns it in the common keys only. Sources: transformers,
src/transformers/models/<model_type>/configuration_*.py and modeling_*.py; for types that
transformers does not ship, the modeling file published beside the weights.
"""

from collections.abc import Mapping, Sequence

from planner.intake.huggingface.dialect import (
    MAX_LAYERS,
    MissingBlock,
    Values,
    count_of,
    dense_at,
    list_of,
    one_of_each_layer,
    take_count,
    take_flag,
    without,
)

ALIBI: Values = {"position_embedding": "none", "alibi": True}


def full_without_rope(values: Values) -> Values:
    """Layers with a window rotate, full ones do not: every fourth, where no key says which."""
    if kinds := list_of(values.get("layer_types")):
        return {**values, "no_rope_layers": [int(kind == "sliding_attention") for kind in kinds]}
    interval = count_of(values, "sliding_window_pattern") or 4
    return {**values, "no_rope_layer_interval": interval}


def cohere2_moe(values: Values) -> Values:
    """Parallel branches of experts; leading dense layers rotate whatever their window."""
    kinds, dense = values.get("layer_types"), values.get("first_k_dense_replace")
    by_force = values.pop("prefix_dense_sliding_window_pattern", 1) == 1
    found = full_without_rope(values)
    rotates = found.get("no_rope_layers")
    if isinstance(rotates, list) and isinstance(dense, int) and isinstance(kinds, Sequence):
        found["no_rope_layers"] = [
            int(rotated or (by_force and index < dense)) for index, rotated in enumerate(rotates)
        ]
    if values.get("rms_norm_eps") is not None:
        found |= {"norm": "rmsnorm"}
    return found


def laguna(values: Values) -> Values:
    """A gate for each head of attention, or for each element; every layer has as many heads."""
    found = one_of_each_layer(values, "num_attention_heads_per_layer")
    heads = found.pop("num_attention_heads_per_layer", None)
    if isinstance(heads, int):
        found["num_attention_heads"] = heads
    whole = found.pop("gating", True) == "per-element"
    return {**found, "attention_head_gate": not whole, "attention_output_gate": whole}


def granite_swa(values: Values) -> Values:
    """One rotary base a layer; 0 is a layer that does not rotate."""
    bases = values.get("layer_rope_theta")
    if not isinstance(bases, Sequence):
        return values
    rotating = {base for base in bases if base}
    if len(rotating) > 1:
        raise MissingBlock("layer_rope_theta", "rotary embeddings of several bases")
    return {
        **without(values, "layer_rope_theta", "rope_parameters"),
        "no_rope_layers": [int(bool(base)) for base in bases],
        "rope_theta": float(max(rotating, default=10_000.0)),
    }


def minicpm3(values: Values) -> Values:
    """Scales of embedding, branches and logits, each written in a way of its own."""
    layers, hidden = count_of(values, "num_hidden_layers"), count_of(values, "hidden_size")
    embedding, depth = values.pop("scale_emb", None), values.pop("scale_depth", None)
    base = values.pop("dim_model_base", None)
    if isinstance(embedding, (int, float)):
        values["embedding_multiplier"] = float(embedding)
    if isinstance(depth, (int, float)) and layers > 0:
        values["residual_multiplier"] = depth / layers**0.5
    if isinstance(base, int) and hidden > 0:
        values["logits_multiplier"] = base / hidden
    return values


def two_rows_more(values: Values) -> Values:
    """A learned table whose first two rows stand for padding."""
    rows = count_of(values, "max_position_embeddings")
    return {**values, **({"max_position_embeddings": rows + 2} if rows else {})}


def from_second_row(values: Values) -> Values:
    """`two_rows_more`, and embeddings scaled by width."""
    hidden = count_of(values, "hidden_size") or count_of(values, "d_model")
    if take_flag(values, "scale_embedding", True) and hidden > 0:
        values["embedding_multiplier"] = hidden**0.5
    return two_rows_more(values)


def sinusoidal(values: Values) -> Values:
    """Positions by sines, which have no weights."""
    return without(from_second_row(values), "max_position_embeddings")


def rotated(values: Values) -> Values:
    """Replaces `rotary_dim` by its share of a head's width."""
    width = take_count(values, "rotary_dim")
    hidden = count_of(values, "hidden_size") or count_of(values, "n_embd")
    heads = count_of(values, "num_attention_heads") or count_of(values, "n_head")
    head = count_of(values, "head_dim") or (hidden // heads if heads > 0 else 0)
    return {**values, **({"partial_rotary_factor": width / head} if 0 < width <= head else {})}


def falcon(values: Values) -> Values:
    """One KV head (7B), groups of them (40B, 180B, 11B) or as many as heads (RW).

    One or two norms stand before parallel branches.
    """
    new = take_flag(values, "new_decoder_architecture", False)
    parallel = take_flag(values, "parallel_attn", True)
    heads = values.get("num_attention_heads")
    grouped = values.pop("num_kv_heads", None) or heads
    alone = 1 if take_flag(values, "multi_query", True) else heads
    given = values.pop("num_ln_in_parallel_attn", None)
    norms = (given or 2) if new else (1 if parallel else 2)
    return {
        **values,
        "num_key_value_heads": grouped if new else alone,
        "norms_per_layer": norms,
        "parallel_residual": new or parallel,
    }


def dbrx(values: Values) -> Values:
    """The activation is in a mapping of its own."""
    activation = values.pop("ffn_act_fn", None)
    named = activation.get("name", "silu") if isinstance(activation, Mapping) else "silu"
    return {**values, "hidden_act": named}


def ernie_moe(values: Values) -> Values:
    """Every n-th layer between a first and a last one has experts; the others are dense."""
    if any(
        isinstance(values.get(key), Sequence) for key in ("num_experts", "moe_intermediate_size")
    ):
        raise MissingBlock("moe_num_experts", "experts of two kinds (text and vision)")
    layers = min(count_of(values, "num_hidden_layers"), MAX_LAYERS)
    interval = take_count(values, "moe_layer_interval") or 1
    first = take_count(values, "moe_layer_start_index")
    last = values.pop("moe_layer_end_index", None)
    last = last if isinstance(last, int) and last >= 0 else layers - 1
    dense = [i for i in range(layers) if not (first <= i <= last and (i + 1) % interval == 0)]
    return {**values, **dense_at(dense)}


def minimax_m2(values: Values) -> Values:
    """In `attn_type_list`, 1 is softmax attention and 0 is lightning attention."""
    kinds = values.pop("attn_type_list", None)
    if isinstance(kinds, Sequence) and any(kind != 1 for kind in kinds):
        linear = sum(kind != 1 for kind in kinds)
        raise MissingBlock(
            "attn_type_list", f"lightning (linear) attention in {linear} of {len(kinds)} layers"
        )
    width = "full" if values.pop("qk_norm_type", "per_layer") == "per_layer" else "head"
    normed = take_flag(values, "use_qk_norm", True)
    return {**rotated(values), "qk_norm": width if normed else "none"}


def gpt_neo(values: Values) -> Values:
    """Every other layer has a window; `attention_types` is a shorter form of the same list."""
    kinds, short = values.pop("attention_layers", None), values.pop("attention_types", None)
    named = {"global": "full_attention", "local": "sliding_attention"}
    if not isinstance(kinds, Sequence):
        pairs = [pair for pair in short if _is_pair(pair)] if isinstance(short, Sequence) else []
        kinds = [kind for part, times in pairs for _ in range(times) for kind in part]
    if not kinds:
        raise MissingBlock("attention_types", "windows in an order that cannot be read")
    types = [named.get(str(kind), str(kind)) for kind in kinds]
    return {**values, "layer_types": types}


def _is_pair(value: object) -> bool:
    """Whether this is a list of kinds with the number of times it repeats."""
    if not isinstance(value, Sequence) or len(value) != 2:
        return False
    return isinstance(value[0], Sequence) and isinstance(value[1], int) and value[1] <= MAX_LAYERS


def opt(values: Values) -> Values:
    """Positions start at 2.

    The 350M model is refused: it projects its embedding and has no final norm, since its norms
    stand behind the branches.
    """
    narrow = values.pop("word_embed_proj_dim", None)
    if narrow not in (None, values.get("hidden_size")):
        raise MissingBlock(
            "word_embed_proj_dim",
            f"an embedding of {narrow} with projections into and out of the hidden size",
        )
    before = take_flag(values, "do_layer_norm_before", True)
    if take_flag(values, "_remove_final_layer_norm", False) or not before:
        raise MissingBlock("do_layer_norm_before", "a network without a final norm")
    if not take_flag(values, "layer_norm_elementwise_affine", True):
        raise MissingBlock("layer_norm_elementwise_affine", "norms without weights")
    return two_rows_more(values)


def exaone4(values: Values) -> Values:
    """The pattern of windows may be written "LLLG".

    Where some layers have windows, full layers do not rotate.
    """
    pattern = values.get("sliding_window_pattern")
    found = dict(values)
    if isinstance(pattern, str):
        if not pattern.endswith("G") or "G" in pattern[:-1]:
            raise MissingBlock("sliding_window_pattern", f"windows in the order {pattern}")
        found["sliding_window_pattern"] = len(pattern)
    return full_without_rope(found) if found.get("sliding_window") else found


def hunyuan_dense(values: Values) -> Values:
    """Dense, although its config counts one expert."""
    return without(values, "num_experts", "use_mla")


def hunyuan_moe(values: Values) -> Values:
    """One value per layer, all equal; the shared expert is as wide as a routed one."""
    if take_flag(values, "use_mla", False):
        raise MissingBlock("use_mla", "a latent attention of its own")
    if take_count(values, "moe_layer_num_skipped"):
        raise MissingBlock("moe_layer_num_skipped", "leading dense layers of an unknown width")
    widths = ("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "num_experts")
    return one_of_each_layer({"n_shared_experts": 1, **values}, *widths)


def qwen(values: Values) -> Values:
    """The first Qwen: `intermediate_size` counts gate and up together.

    Only queries, keys and values have biases.
    """
    width = count_of(values, "intermediate_size")
    if width % 2:
        raise MissingBlock("intermediate_size", "a gate and an up projection of different widths")
    return {
        **without(values, "no_bias"),
        "intermediate_size": width // 2,
        "attention_bias": True,
        "attention_output_bias": False,
    }


def chatglm(values: Values) -> Values:
    """ChatGLM2 and later: groups of KV heads; only queries, keys and values have biases."""
    several = take_flag(values, "multi_query_attention", False)
    groups, ratio = values.pop("multi_query_group_num", None), values.pop("rope_ratio", None)
    behind = take_flag(values, "apply_residual_connection_post_layernorm", False)
    if not take_flag(values, "rmsnorm", True) or behind:
        raise MissingBlock("rmsnorm", "GLM's first layers (LayerNorm, residual behind the norm)")
    if not take_flag(values, "post_layer_norm", True):
        raise MissingBlock("post_layer_norm", "a network without a final norm")
    theta = {"rope_theta": 10_000.0 * ratio} if isinstance(ratio, (int, float)) else {}
    heads = {"num_key_value_heads": groups} if several and groups else {}
    return {**values, **theta, **heads}


def baichuan(values: Values) -> Values:
    """The 13B models have ALiBi and no `max_position_embeddings`."""
    return values if "max_position_embeddings" in values else {**values, **ALIBI}
