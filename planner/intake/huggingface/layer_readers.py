"""Translates configs whose layers differ in heads, windows, clamps or in the keys they attend to.

Each function takes a config whose renamed keys already have their common names, like the readers in
`dialect_readers`. Sources: transformers 5.24, src/transformers/models/<model_type>/
configuration_*.py and modeling_*.py; Megatron-Bridge of 2026-08-22, models/stepfun and
models/exaone/exaone_moe, for what the class does not read.
"""

from collections.abc import Mapping

from planner.intake.huggingface.dialect import (
    MAX_LAYERS,
    MissingBlock,
    Values,
    count_of,
    list_of,
    without,
    words,
)
from planner.intake.huggingface.dialect_readers import exaone4
from planner.specs.mixers import SLIDING

_WINDOW, _FULL = "sliding_attention", "full_attention"
_BLOCKS, _INDEXED = "minimax_m3_sparse", "indexed_attention"
# kind of layer, its key by layer -> our key
_ROTARY = (
    (_FULL, "rope_theta", "rope_theta"),
    (_FULL, "partial_rotary_factors", "partial_rotary_factor"),
    (_WINDOW, "rope_theta", "rope_local_base_freq"),
)
_STEP_LISTS = words(
    "attention_other_setting moe_layers_enum mtp_layer_types partial_rotary_factors rope_theta"
)


def step(values: Values) -> Values:
    """Step 3.5: other numbers of heads in windowed layers, by a mapping or by a number.

    Lists go on to the layers of multi-token prediction, which are dense.
    """
    layers, kinds = values.get("num_hidden_layers"), list(list_of(values.get("layer_types")))
    found = without(values, *_STEP_LISTS)
    if not isinstance(layers, int):
        return values
    for key in ("layer_types", "swiglu_limits"):
        if list_of(values.get(key)):
            found[key] = list(list_of(values[key]))[:layers]
    other = values.get("attention_other_setting")
    if isinstance(other, Mapping):
        given = {**other, "num_key_value_heads": other.get("num_attention_groups")}
        found |= {
            own: given[key]
            for key, own in SLIDING.items()
            if given.get(key) not in (None, found.get(key))
        }
    listed = values.get("moe_layers_enum")
    if isinstance(listed, str):
        listed = [int(one) for one in listed.split(",") if one.strip().isdigit()]
    if list_of(listed):
        found["dense_layers"] = [i for i in range(layers) if i not in list_of(listed)]
    behind = list_of(values.get("mtp_layer_types")) or kinds[layers:]
    if behind:
        window = values.get("sliding_window") if behind[0] == _WINDOW else 0
        found |= {"mtp_dense": True, "mtp_window": window}
    return clamped({**found, **_rotary(values)})


def _rotary(values: Values) -> Values:
    """The base and the share of full layers, and the base of windowed ones, by layer or not."""
    kinds = list_of(values.get("layer_types"))
    found: Values = {}
    for kind, key, name in _ROTARY:
        value, first = values.get(key), kinds.index(kind) if kind in kinds else 0
        if len(list_of(value)) > first:
            found[name] = list_of(value)[first]
        elif isinstance(value, (int, float)) and kind == _FULL:
            found[name] = value
    return found


def clamped(values: Values) -> Values:
    """Clamps of SwiGLU by layer; one for all layers, or none, is one number."""
    given = list_of(values.pop("swiglu_limits", None))
    limits = [one if isinstance(one, (int, float)) else 0 for one in given]
    if len({*limits}) == 1:
        return values | ({"swiglu_limit": limits[0]} if limits[0] else {})
    return values | ({"swiglu_limits": limits} if limits else {})


def exaone_moe(values: Values) -> Values:
    """K-EXAONE: windows by layer, of several lengths in the second; full layers do not rotate.

    Layers of multi-token prediction are dense.
    """
    windows, later = (
        [one if isinstance(one, int) else 0 for one in list_of(values.pop(key, None))]
        for key in ("sliding_windows", "mtp_sliding_windows")
    )
    found = clamped(values)
    if windows:
        found["layer_types"] = [_WINDOW if one else _FULL for one in windows]
        found |= {"sliding_windows": windows, "sliding_window": max(windows)}
    if values.get("num_nextn_predict_layers"):
        found |= {"mtp_dense": True, **({"mtp_window": later[0]} if later else {})}
    return exaone4(found)


def mimo(values: Values) -> Values:
    """MiMo-V2-Flash: twice as many key heads in windowed layers, and sinks only there."""
    kv = values.get("num_key_value_heads")
    kinds = [_WINDOW if one else _FULL for one in list_of(values.get("hybrid_layer_pattern"))]
    given = {key: values.get(f"swa_{key}") for key in SLIDING}
    if isinstance(kv, int):
        given["num_key_value_heads"] = given["num_key_value_heads"] or 2 * kv
    found = without(values, *_MIMO_KEYS)
    found |= {SLIDING[key]: one for key, one in given.items() if one not in (None, values.get(key))}
    found |= {"layer_types": kinds} if kinds else {}
    return {**found, **_dense(values)}


def gemma4(values: Values) -> Values:
    """Gemma 4: full layers have wider and fewer key heads, which may be values as well.

    Its config names the heads of windowed layers first. A dense MLP stands beside the experts. The
    last layers may share the keys and values of those before them.
    """
    found = without(values, *_GEMMA4_SWITCHES)
    layers, kinds = values.get("num_hidden_layers"), values.get("layer_types")
    if not kinds and isinstance(layers, int):
        found["layer_types"] = [_FULL if (i + 1) % 6 == 0 else _WINDOW for i in range(layers)]
    found |= _sharing(values)
    if not values.get("hidden_size_per_layer_input"):
        found.pop("vocab_size_per_layer_input", None)
    shared = bool(values.get("attention_k_eq_v"))
    full: Values = {
        "head_dim": values.get("global_head_dim", 512),
        "num_key_value_heads": values.get("num_global_key_value_heads") if shared else None,
    }
    full |= _of_some_layers(values)
    for key in ("head_dim", "num_key_value_heads"):
        if full[key] not in (None, values.get(key)):
            found[key], found[SLIDING[key]] = full[key], values.get(key)
    parameters = values.get("rope_parameters")
    if isinstance(parameters, Mapping):
        found["rope_parameters"] = {
            kind: {key: one for key, one in part.items() if one != "proportional"}
            for kind, part in parameters.items()
            if isinstance(part, Mapping)
        }
    if values.get("use_bidirectional_attention") == "all":
        raise MissingBlock("use_bidirectional_attention", "attention both ways (an encoder)")
    if not values.get("enable_moe_block"):
        return without(found, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return {
        **without(found, "intermediate_size"),
        "shared_expert_intermediate_size": values.get("intermediate_size"),
        "moe_branch_norms": True,
    }


def _of_some_layers(values: Values) -> Values:
    """Sizes of the layers that differ from the rest, which are of one kind."""
    saved = values.get("per_layer_config")
    own = list(saved.values()) if isinstance(saved, Mapping) else []
    if any(one != own[0] for one in own):
        raise MissingBlock("per_layer_config", "heads of more than two kinds of layers")
    return dict(own[0]) if own and isinstance(own[0], Mapping) else {}


def dots3(values: Values) -> Values:
    """dots3: an indexer in layers without a window, and other heads and latents in the others.

    A config.json as published says so by `use_dsa` and `swa_` keys, a saved one by layer.
    """
    layers, known = values.get("num_hidden_layers"), values.get("per_layer_config") is not None
    kinds = list(list_of(values.get("layer_types"))) or [
        _WINDOW if values.get("use_sliding_window", True) and i > 1 and i % 4 != 1 else _FULL
        for i in range(min(layers, MAX_LAYERS) if isinstance(layers, int) else 0)
    ]
    finds = values.get("use_dsa", None if known else True)
    chosen = {_INDEXED: finds is not False, _FULL: bool(finds)}
    bases, shared = values.get("rope_parameters"), "shared_experts_intermediate_size"
    found = {key: one for key, one in values.items() if not key.startswith(_DOTS_KEYS)}
    if list_of(values.get("moe_layer_freq")):
        found |= {**_dense(values), "moe_layer_freq": 1}
    if isinstance(bases, Mapping) and _WINDOW in bases:
        own = bases.get(_INDEXED, bases.get(_FULL))
        share = "partial_rotary_factor"  # of MLA's rotated part in a head
        whole = without(dict(own), share) if isinstance(own, Mapping) else {}
        found["rope_parameters"] = {_FULL: whole, _WINDOW: bases[_WINDOW]}
    else:
        found["rope_local_base_freq"] = values.get("swa_rope_theta", 50_000.0)
    if width := count_of(values, shared):
        found["shared_expert_intermediate_size"] = width * count_of(values, "n_shared_experts")
    return {
        **found,
        **(_windowed_latents(values, known) if _WINDOW in kinds else {}),
        "sliding_window": values.get("sliding_window") or 512,
        "mixers": ["dsa" if chosen.get(str(kind)) else "attention" for kind in kinds],
        "layer_types": [_FULL if kind == _INDEXED else kind for kind in kinds],
    }


def _windowed_latents(values: Values, known: bool) -> Values:
    """Heads and latents of MLA with a window, where they differ from the others' (dots3)."""
    full: Values = {key: values.get(key) for key in SLIDING}
    other = {**full, **_of_some_layers(values)}
    if not known:
        other = {key: values.get(f"swa_{key}", usual) for key, usual in _DOTS_WINDOWED.items()}
        other["qk_rope_head_dim"] = count_of(other, "head_dim") - count_of(other, _UNROTATED)
    for sizes in (full, other):
        sizes["head_dim"] = count_of(sizes, _UNROTATED) + count_of(sizes, "qk_rope_head_dim")
    return {SLIDING[key]: one for key, one in other.items() if one != full[key]}


def _dense(values: Values) -> Values:
    """The layers without experts, of which a list of a number for each layer has 0."""
    dense = [i for i, one in enumerate(list_of(values.get("moe_layer_freq"))) if not one]
    return {"dense_layers": dense} if dense else {}


def _sharing(values: Values) -> Values:
    """The mixers of a model whose last `num_kv_shared_layers` layers have no keys of their own."""
    layers, sharing = (values.get(key) for key in ("num_hidden_layers", "num_kv_shared_layers"))
    if not (isinstance(layers, int) and isinstance(sharing, int) and sharing):
        return {}
    if not 0 < sharing < layers:
        raise MissingBlock("num_kv_shared_layers", "keys and values of another model's layers")
    return {"mixers": ["attention"] * (layers - sharing) + ["attention-shared"] * sharing}


def longcat(values: Values) -> Values:
    """LongCat-Flash: layers of two attentions and two MLPs, the first beside the experts."""
    layers = values.pop("num_layers", None)
    if values.pop("zero_expert_type", "identity") != "identity":
        raise MissingBlock("zero_expert_type", "zero experts that are not their input")
    return {
        **values,
        **({"num_hidden_layers": 2 * layers} if isinstance(layers, int) else {}),
        "moe_layer_freq": 2,
        "shared_expert_intermediate_size": values.get("intermediate_size"),
        "moe_shortcut": True,
    }


def minimax_m3(values: Values) -> Values:
    """MiniMax M3: an indexer that chooses blocks in the layers of a list, by name or by number."""
    part = values.get("sparse_attention_config")
    given = part if isinstance(part, Mapping) else {}
    sizes = {name: given.get(other, values.get(name)) for name, other in _BLOCK_SIZES.items()}
    blocks, width = sizes.pop("index_topk_blocks"), sizes["index_block_size"]
    numbered = [_BLOCKS if one else _FULL for one in list_of(given.get("sparse_attention_freq"))]
    kinds = list(list_of(values.get("layer_types"))) or numbered
    rotated, head = values.get("rotary_dim"), values.get("head_dim")
    found = without(values, *_MINIMAX_KEYS)
    if isinstance(rotated, int) and isinstance(head, int) and head > 0:
        found["partial_rotary_factor"] = rotated / head
    if _BLOCKS in kinds:
        chosen = blocks * width if isinstance(blocks, int) and isinstance(width, int) else None
        found |= {**sizes, "index_topk": chosen}
        found["mixers"] = ["msa" if kind == _BLOCKS else "attention" for kind in kinds]
    return {**found, **_dense(values)}


def deepseek_v4(values: Values) -> Values:
    """DeepSeek-V4: attention by name of its layer or by tokens of an entry, and two rotary bases.

    A list of tokens goes on to the layers of multi-token prediction. Leading layers are hashed.
    """
    layers = values.get("num_hidden_layers")
    numbers = range(min(layers, MAX_LAYERS) if isinstance(layers, int) else 0)
    given = values.get("compress_rates")
    rates = {**_RATES, **(given if isinstance(given, Mapping) else {})}
    by_rate = {rate: kind for kind, rate in rates.items()} | {0: _WINDOW}
    listed = [by_rate.get(rate, str(rate)) for rate in list_of(values.get("compress_ratios"))]
    every = [_ENTRIES[1] if i < 2 or i % 2 == 0 else _ENTRIES[0] for i in numbers]
    kinds = (list(list_of(values.get("layer_types"))) or listed or every)[: len(numbers)]
    odd = next((kind for kind in kinds if kind not in _COMPRESSED), None)
    if odd is not None:
        raise MissingBlock("layer_types", f"attention of the kind {str(odd)[:40]!r}")
    found = without(values, *_DEEPSEEK_V4_KEYS)
    width, rotated = values.get("head_dim"), values.get("qk_rope_head_dim")
    if isinstance(width, int) and isinstance(rotated, int) and width > 0:
        found["partial_rotary_factor"] = rotated / width
    bases = values.get("rope_parameters")
    if isinstance(bases, Mapping) and "compress" in bases:
        found["rope_parameters"] = {_FULL: bases["compress"], _WINDOW: bases.get("main")}
    else:
        base = values.get("compress_rope_theta", 160_000.0)
        found |= {"rope_theta": base, "rope_local_base_freq": values.get("rope_theta", 10_000.0)}
    return {
        **found,
        "mixers": [_COMPRESSED[str(kind)] for kind in kinds],
        "layer_types": [_WINDOW] * len(kinds),
        **{f"compress_rate_{_COMPRESSED[kind]}": rates[kind] for kind in _ENTRIES},
    }


# tokens of a compressed entry, where a config does not say
_RATES: Mapping[str, int] = {
    "compressed_sparse_attention": 4, "heavily_compressed_attention": 128,
}  # fmt: skip
_ENTRIES = tuple(_RATES)
_COMPRESSED: Mapping[str, str] = {_WINDOW: "shared-kv", _ENTRIES[0]: "csa", _ENTRIES[1]: "hca"}
_DEEPSEEK_V4_KEYS = words(
    "compress_rates compress_ratios compress_rope_theta hc_eps layer_types qk_rope_head_dim"
)
_GEMMA4_SWITCHES = frozenset({
    "enable_moe_block", "global_head_dim", "num_global_key_value_heads",
    "per_layer_config", "use_bidirectional_attention", "num_kv_shared_layers",
})  # fmt: skip
# sizes of a layer with a window, where a config gives none
_DOTS_WINDOWED: Mapping[str, int] = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024,
    "kv_lora_rank": 1024, "head_dim": 256, "qk_nope_head_dim": 192, "v_head_dim": 128,
}  # fmt: skip
_UNROTATED = "qk_nope_head_dim"
_DOTS_KEYS = ("swa_", "use_dsa", "per_layer_config", "layer_types", "shared_experts_inter")
# our name -> that of `sparse_attention_config`
_BLOCK_SIZES: Mapping[str, str] = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
}  # fmt: skip
_MINIMAX_KEYS = frozenset({
    *_BLOCK_SIZES, "sparse_attention_config", "layer_types", "moe_layer_freq", "rotary_dim",
    "index_local_blocks", "swiglu_alpha", "use_qk_norm", "qk_norm_type", "use_routing_bias",
    "use_gemma_norm", "num_mtp_modules", "mtp_transformer_layers", "n_shared_experts",
})  # fmt: skip
_MIMO_KEYS = frozenset({
    "add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_value_scale",
    "hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size", "swa_head_dim",
    "swa_num_attention_heads", "swa_num_key_value_heads", "swa_rope_theta", "swa_v_head_dim",
})  # fmt: skip
