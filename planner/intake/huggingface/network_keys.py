"""Turns keys of a config.json into fields of `Network`: rotary positions, router, multipliers.

They are completed by what each family's code fixes or its class assumes (`families`).
"""

import math
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from planner.errors import Fault
from planner.intake.huggingface.dialect import words
from planner.intake.huggingface.families import NAMES, Family
from planner.specs.network import NETWORK_FIELDS, RopeScaling

Values = Mapping[str, object]
_RESIDUAL_DROPOUTS = ("hidden_dropout", "resid_pdrop", "residual_dropout")
_DROPOUTS = (
    *_RESIDUAL_DROPOUTS,
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
)

ACTIVATIONS: Mapping[str, str] = NAMES["activations"]
_MOE_ONLY = words(
    "scoring_func norm_topk_prob routed_scaling_factor topk_method router_aux_loss_coef "
    "router_z_loss_coef seq_aux router_jitter_noise moe_apply_router_weight_on_input"
)


def complete(given: Values, family: Family, *, published: bool) -> dict[str, object]:
    """The keys, completed by what the family's code fixes and its configuration class assumes.

    given: canonical keys as written.
    published: whether this is a published config; the configuration class counts only for those.
    A key given as null overrides the configuration class, as in transformers. It does not override
    what the code fixes.
    """
    stated = dict(given)
    if "rope_parameters" in stated:
        stated.setdefault("rope_scaling", None)
    if given.get("model_type") == "llama4_text" and stated.get("use_qk_norm") is not None:
        stated.setdefault("qk_l2_norm", stated["use_qk_norm"])
    assumed = family.assumed if published else {}
    if any(key in stated for key in _DROPOUTS):
        assumed = {key: value for key, value in assumed.items() if key != "dropout"}
    fixed = {key: value for key, value in family.code.items() if stated.get(key) is None}
    return {**family.defaults, **assumed, **stated, **fixed}


def _rates(values: Values, keys: Iterable[str]) -> list[float]:
    found = (values.get(key) for key in keys)
    return [float(rate) for rate in found if isinstance(rate, (int, float))]


def network_fields(values: Values) -> dict[str, object]:
    """Fields of `Network` from checked canonical keys that `complete` returned."""
    rope = rope_fields(values)
    values = {**values, **rope}
    moe = bool(values.get("num_experts"))
    fields = {
        key: values[key]
        for key in NETWORK_FIELDS - {"n_group", "topk_group"}
        if values.get(key) is not None and (moe or key not in _MOE_ONLY)
    }
    scaling = rope.get("rope_scaling")
    fields["rope_scaling"] = None if scaling is None else RopeScaling.model_validate(scaling)
    fields |= _multipliers(values)
    groups = values.get("n_group")
    if moe and isinstance(groups, int) and groups > 1:
        fields |= {"n_group": groups, "topk_group": values.get("topk_group") or 0}
    act = values.get("hidden_act")
    if isinstance(act, str):
        fields["hidden_act"] = ACTIVATIONS.get(act, act)
    fields["dropout"] = max(_rates(values, (*_DROPOUTS, "dropout")), default=0.0)
    behind_branches = _rates(values, _RESIDUAL_DROPOUTS) or _rates(values, ("dropout",))
    fields["residual_dropout"] = max(behind_branches, default=0.0)
    fields["rope_mask"] = rope_mask(values)
    for key in ("swiglu_limits", "unread_keys", "left_out"):
        named = values.get(key)
        fields[key] = tuple(named) if isinstance(named, (list, tuple)) else ()
    if values.get("position_embedding", "rope") != "rope":
        return {
            key: value
            for key, value in fields.items()
            if not key.startswith(("rope_", "partial_rotary"))
        }
    return fields


def _multipliers(values: Values) -> dict[str, object]:
    fields: dict[str, object] = {}
    asked = values.get("query_pre_attn_scalar")
    own = values.get("attention_multiplier") is not None
    if not own and isinstance(asked, (int, float)) and asked != values.get("head_dim"):
        fields["attention_multiplier"] = asked**-0.5
    if values.get("embedding_multiplier") == "sqrt(hidden_size)":
        hidden = values.get("hidden_size")
        fields["embedding_multiplier"] = math.sqrt(hidden) if isinstance(hidden, int) else 1.0
    divisor, own = values.get("logits_scaling"), values.get("logits_multiplier") is not None
    if not own and isinstance(divisor, (int, float)) and divisor:
        fields["logits_multiplier"] = 1 / divisor
    return fields


_ROPE_FIELDS = frozenset(RopeScaling.model_fields)
# mrope: sections for images; text positions are plain
_NOT_SCALED = frozenset({"default", "none", "mrope"})
_NAMES_OF_TYPES = {"su": "longrope", "ntk": "dynamic"}
_BY_LAYER = ("full_attention", "sliding_attention")


def rope_mask(values: Values) -> tuple[bool, ...]:
    """Which layers rotate; empty where all do.

    `no_rope_layers` is 1 for a layer that rotates. Where it is empty, every n-th layer does not.
    """
    layers = values.get("num_hidden_layers")
    given, interval = values.get("rope_mask"), values.get("no_rope_layer_interval")
    if isinstance(given, (list, tuple)) and given:
        mask = tuple(bool(item) for item in given)
    elif isinstance(values.get("no_rope_layers"), (list, tuple)) and values["no_rope_layers"]:
        mask = tuple(bool(item) for item in values["no_rope_layers"])  # type: ignore[attr-defined]
    elif isinstance(interval, int) and isinstance(layers, int) and interval > 0:
        mask = tuple((index + 1) % interval != 0 for index in range(layers))
    else:
        return ()
    return () if all(mask) else mask


def rope_fields(values: Values) -> dict[str, object]:
    """rope_theta, rope_local_base_freq, partial_rotary_factor and rope_scaling.

    They are read from either form of the config.
    """
    found: dict[str, object] = {}
    scaling, parameters = values.get("rope_scaling"), values.get("rope_parameters")
    if isinstance(parameters, Mapping):
        scaling = parameters
        if any(kind in parameters for kind in _BY_LAYER):
            scaling = parameters.get("full_attention") or {}
            local = parameters.get("sliding_attention")
            if isinstance(local, Mapping) and "rope_theta" in local:
                found["rope_local_base_freq"] = local["rope_theta"]
    if isinstance(scaling, Mapping):
        found |= {
            key: scaling[key] for key in ("rope_theta", "partial_rotary_factor") if key in scaling
        }
        found["rope_scaling"] = _scaling(scaling, values)
    return found


def _scaling(given: Values, values: Values) -> dict[str, object] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind in _NOT_SCALED:
        return None
    named = ((key, given[key]) for key in given if key in _ROPE_FIELDS)
    read = {key: _plain(value) for key, value in named if value is not None}
    read["rope_type"] = _NAMES_OF_TYPES.get(kind, kind)
    if not read.get("original_max_position_embeddings"):
        whole = ("original_max_position_embeddings", "max_position_embeddings")
        read[whole[0]] = values.get(whole[0]) or values.get(whole[1]) or 0
    longest = values.get("max_position_embeddings")
    before = read["original_max_position_embeddings"]
    stretched = kind in ("longrope", "su")
    if stretched and isinstance(longest, int) and isinstance(before, int) and before:
        read.setdefault("factor", longest / before)
    return read


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def rope_faults(values: Values, field: str) -> list[Fault]:
    """Faults inside rope_scaling or rope_parameters; empty where they can be read."""
    newer = isinstance(values.get("rope_parameters"), Mapping)
    where = f"{field}.rope_{'parameters' if newer else 'scaling'}"
    scaling = rope_fields(values).get("rope_scaling")
    if not isinstance(scaling, dict):
        return []
    needed: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
    kind, remedy = str(scaling["rope_type"]), "give it as in the model's config.json"
    faults = [
        Fault(f"{where}.{name}", None, f"is needed by {kind} scaling", remedy)
        for name in needed.get(kind, ())
        if name not in scaling
    ]
    try:
        RopeScaling.model_validate(scaling)
    except ValidationError as error:
        for item in error.errors():
            name, rule = ".".join(map(str, item["loc"])), item["msg"].lower()
            faults.append(Fault(f"{where}.{name}", item["input"], rule, "give a number above 0"))
    return faults
