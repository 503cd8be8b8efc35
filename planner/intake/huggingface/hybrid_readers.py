"""Translates configs whose layers differ in their mixer: patterns, intervals and lists of kinds.

Each function takes a config whose renamed keys already have their common names, like the
readers in `dialect_readers`. Sources: transformers 5.24, src/transformers/models/<model_type>/
configuration_*.py and modeling_*.py.
"""

from collections.abc import Mapping, Sequence

from planner.intake.huggingface.dialect import (
    MAX_LAYERS,
    MissingBlock,
    Values,
    count_of,
    list_of,
    take_count,
    without,
)
from planner.intake.huggingface.dialect_readers import rotated

_RECURRENT = frozenset({"linear_attention", "mamba", "mamba2"})
_BESIDE = frozenset({"conv", "hybrid"})
_ATTENTION = frozenset({"attention", "full_attention", "sliding_attention"})
# letters of `hybrid_override_pattern`
_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "full_attention_interval")


def delta(values: Values) -> Values:
    """Gated DeltaNet in three of four layers, or as `layer_types` says."""
    every = max(count_of(values, "full_attention_interval"), 0) or 4
    return _mixed(values, "gated-delta", _listed(values) or _every(values, every))


def olmo_hybrid(values: Values) -> Values:
    """Heads of the recurrence are as many as attention's, and their widths follow, unless given."""
    found, heads = dict(values), values.get("num_attention_heads")
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        found[key] = found.get(key) or heads
    hidden, keys = found.get("hidden_size"), found["linear_num_key_heads"]
    if found.get("linear_key_head_dim") is None and isinstance(hidden, int):
        found["linear_key_head_dim"] = int(0.75 * hidden / keys) if isinstance(keys, int) else None
    width = found["linear_key_head_dim"]
    if found.get("linear_value_head_dim") is None and isinstance(width, int):
        found["linear_value_head_dim"] = 2 * width
    return delta(found)


def kimi_linear(values: Values) -> Values:
    """Kimi Delta Attention with heads of one width; layers by number, from one, or as a list.

    Its latent attention has no positions.
    """
    part = values.pop("linear_attn_config", None)
    own = part if isinstance(part, Mapping) else {}
    heads = own.get("num_heads", values.pop("linear_num_heads", 32))
    width = own.get("head_dim", values.pop("linear_head_dim", 128))
    full = list_of(own.get("full_attn_layers"))
    numbered = [
        "full_attention" if i + 1 in full else "linear_attention" for i in range(_layers(values))
    ]
    found = _mixed(values, "kimi-delta", _listed(values) or numbered)
    return {
        **found,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
        "linear_conv_kernel_dim": own.get(
            "short_conv_kernel_size", values.get("linear_conv_kernel_dim", 4)
        ),
    }


def bailing_hybrid(values: Values) -> Values:
    """Ling 3: as Kimi Linear, with full gates, rotary positions and full attention at intervals.

    A config.json as published gives the recurrence's width as `head_dim`, a saved one by name.
    """
    every = max(take_count(values, "layer_group_size"), 0) or 6
    names = ("linear_num_heads", "num_attention_heads"), ("linear_head_dim", "head_dim")
    given = {own: values.get(own, values.get(other)) for own, other in names}
    taps = values.get("linear_conv_kernel_dim", values.pop("short_conv_kernel_size", 4))
    kinds = _listed(values) or _every(values, every)
    found = kimi_linear({**values, **given, "linear_conv_kernel_dim": taps, "layer_types": kinds})
    return without(found, "head_dim")


def mamba(values: Values) -> Values:
    """Mamba-2 where `layer_types` says it, a head's width "auto" by `mamba_expand`."""
    expand, hidden = values.pop("mamba_expand", 2), values.get("hidden_size")
    heads = values.get("mamba_num_heads")
    automatic = values.get("mamba_head_dim") in ("auto", None)
    if automatic and isinstance(expand, int) and isinstance(hidden, int) and isinstance(heads, int):
        values["mamba_head_dim"] = expand * hidden // heads
    return _mixed(values, "mamba2", _listed(values) or ["mamba"] * _layers(values))


def only_mamba(values: Values) -> Values:
    """Mamba-2 in every layer and nothing else.

    Heads of attention, which no layer has, repeat it. A residual stream in fp32 is not priced.
    """
    layers, heads = _layers(values), values.get("mamba_num_heads")
    return {
        **_mixed(values, "mamba2", ["mamba"] * layers),
        "mixer_only_layers": list(range(layers)),
        "num_attention_heads": heads,
        "head_dim": values.get("mamba_head_dim"),
    }


def mamba1(values: Values) -> Values:
    """Mamba, the first: in all layers and nothing else, or all but some of Jamba's."""
    hidden, expand = values.get("hidden_size"), values.pop("mamba_expand", 2)
    rank, layers = values.get("mamba_dt_rank", "auto"), _layers(values)
    width = values.pop("mamba_width", None)
    if isinstance(hidden, int) and isinstance(expand, int):
        values["mamba_num_heads"] = width or expand * hidden
        values["mamba_dt_rank"] = -(-hidden // 16) if rank == "auto" else rank
    period, offset = (values.pop(f"attn_layer_{key}", None) for key in ("period", "offset"))
    if not isinstance(period, int) or not isinstance(offset, int):
        only = {"mixer_only_layers": list(range(layers)), "num_attention_heads": 1}
        return {**values, "mixers": ["mamba"] * layers, "mamba_head_dim": 1, "mamba_norm": False,
            "head_dim": hidden, **only}  # fmt: skip
    kinds = ["attention" if i % period == offset else "mamba" for i in range(layers)]
    if values.get("num_experts", 16) == 1:
        values = {key: value for key, value in values.items() if "expert" not in key}
    return {**_mixed(values, "mamba", _listed(values) or kinds), "mamba_head_dim": 1}


def falcon_h1(values: Values) -> Values:
    """Mamba-2 and attention on one input in every layer."""
    width, heads = values.pop("mamba_d_ssm", None), values.get("mamba_num_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        values["mamba_head_dim"] = width // heads
    if bool(values.get("mamba_proj_bias")) != bool(values.pop("projectors_bias", None)):
        raise MissingBlock("projectors_bias", "biases of one of Mamba-2's projections")
    return {**mamba(values), "mixers": ["attention-mamba2"] * _layers(values)}


def short_conv(values: Values) -> Values:
    """LFM2: gated short convolutions where `layer_types` says "conv", a width that it rounds."""
    full = list_of(values.pop("full_attn_idxs", None))
    kinds = _listed(values) or [
        "full_attention" if i in full or not full else "conv" for i in range(_layers(values))
    ]
    found = _mixed(values, "short-conv", kinds)
    width = found.pop("intermediate_size", None)
    if isinstance(width, int) and values.get("block_auto_adjust_ff_dim"):
        times, unit = values.get("block_ffn_dim_multiplier"), values.get("block_multiple_of", 256)
        width = int(2 * width / 3)
        width = int(times * width) if isinstance(times, (int, float)) else width
        width = -(-width // unit) * unit if isinstance(unit, int) and unit > 0 else width
    rest = {key: one for key, one in found.items() if not key.startswith("block_")}
    return {**rest, "intermediate_size": width}


def lightning(values: Values) -> Values:
    """MiniMax-01: lightning attention in every second layer, by name or by 0 in a list."""
    numbered = [
        "full_attention" if kind == 1 else "linear_attention"
        for kind in list_of(values.pop("attn_type_list", None))
    ]
    layers = range(_layers(values))
    every = ["linear_attention" if i % 2 else "full_attention" for i in layers]
    heads = values.get("num_attention_heads")
    hidden, width = values.get("hidden_size"), values.get("head_dim")
    found = rotated(values)
    if width is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        width = hidden // heads
    return {
        **_mixed(found, "lightning", _listed(values) or numbered or every),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
    }


def granite_hybrid(values: Values) -> Values:
    """Granite 4: Mamba-2 in most layers, or in none.

    Without experts, the MLP is the one that the config calls shared.
    """
    positions = values.pop("position_embedding_type", None)
    if positions in ("nope", None) and "mamba" in _listed(values):
        values["position_embedding"] = "none"
    if not values.get("num_local_experts"):
        values["intermediate_size"] = values.pop("shared_expert_intermediate_size", None)
        values = without(values, "num_local_experts", "num_experts_per_tok")
    return mamba(values)


def bamba(values: Values) -> Values:
    """Attention in the layers that `attn_layer_indices` lists."""
    places = list_of(values.pop("attn_layer_indices", None))
    kinds = ["attention" if i in places else "mamba" for i in range(_layers(values))]
    return mamba({**values, "layer_types": _listed(values) or kinds})


def nemotron_h(values: Values) -> Values:
    """A mixer or a feed-forward a layer: Mamba-2, attention, MLP or experts, by letter or by name.

    Attention has no positions and no biases.
    """
    kinds = _listed(values)
    if not kinds:
        raise MissingBlock("hybrid_override_pattern", "layers of an unknown pattern")
    found = _mixed({**values, "num_hidden_layers": len(kinds)}, "mamba2", kinds)
    feeding = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in ("mlp", "moe")}
    found["mixers"] = [
        "none" if kind in feeding else mixer
        for kind, mixer in zip(kinds, list_of(found["mixers"]), strict=True)
    ]
    found["mixer_only_layers"] = [i for i, kind in enumerate(kinds) if kind not in feeding]
    if feeding["moe"]:
        return {**found, "dense_layers": feeding["mlp"], "topk_method": "noaux_tc"}
    experts = ("num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    shared = ("n_shared_experts", "shared_expert_intermediate_size", "n_group", "topk_group")
    return without(found, *experts, *shared)


def indexed(values: Values, every: int = 1) -> Values:
    """DeepSeek sparse attention in every layer; GLM-5.2's share the tokens of a layer before.

    Which do is a list or pattern, or every layer but one in `index_topk_freq` from an offset on.
    every: that number, where the config has none.
    """
    spelled = {"F": "full", "S": "shared"}
    given = values.get("indexer_types") or values.get("index_topk_pattern")
    listed = given if isinstance(given, str) else list_of(given)
    kinds = [spelled.get(str(kind), str(kind)) for kind in listed]
    freq, offset = values.get("index_topk_freq") or every, values.get("index_skip_topk_offset", 2)
    if not kinds and isinstance(freq, int) and isinstance(offset, int):
        behind = (max(i - offset + 1, 0) % max(freq, 1) for i in range(_layers(values)))
        kinds = ["shared" if steps else "full" for steps in behind]
    if odd := set(kinds) - {"full", "shared"}:
        raise MissingBlock("indexer_types", f"indexers of the kind {min(odd)[:40]!r}")
    inert = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    return {
        **without(values, *inert, *_LISTS),
        "mixers": ["dsa" if kind == "full" else "dsa-shared" for kind in kinds],
    }


def indexed_every_fourth(values: Values) -> Values:
    """Hy-V4: an indexer in every fourth layer, unless the config has another number."""
    return indexed(values, every=4)


def _layers(values: Values) -> int:
    layers = count_of(values, "num_hidden_layers")
    return layers if 0 < layers < MAX_LAYERS else 0


def _every(values: Values, interval: int) -> list[str]:
    """Full attention in every n-th layer."""
    kinds = ("linear_attention", "full_attention")
    return [kinds[(i + 1) % interval == 0] for i in range(_layers(values))]


def _listed(values: Values) -> list[str]:
    """Kinds of the layers, from a list or a pattern of letters; empty where neither is given."""
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        kinds = values.get(key)
        if isinstance(kinds, str):
            if odd := set(kinds) - _LETTERS.keys():
                raise MissingBlock(key, f"layers of the kind {min(odd)!r}")
            return [_LETTERS[letter] for letter in kinds]
        if list_of(kinds):
            return [str(kind) for kind in list_of(kinds)]
    return []


def _mixed(values: Values, recurrent: str, kinds: Sequence[str]) -> Values:
    """The config with a mixer for each layer, and `layer_types` for its windows."""
    others = _RECURRENT | _BESIDE
    known = others | _ATTENTION | {"mlp", "moe"}
    if odd := next((kind for kind in kinds if kind not in known), None):
        raise MissingBlock("layer_types", f"layers of the kind {odd[:40]!r}")
    windows = [kind if kind == "sliding_attention" else "full_attention" for kind in kinds]
    return {
        **without(values, *_LISTS),
        "mixers": [recurrent if kind in others else "attention" for kind in kinds],
        **({"layer_types": windows} if "sliding_attention" in windows else {}),
    }
