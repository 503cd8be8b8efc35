"""Turns keys of a config.json into fields of `Network`.

They are completed by what each family fixes or assumes (`network_families`).
"""

import math
from collections.abc import Iterable, Mapping

from planner.intake.huggingface.network_families import ASSUMED_BY_CLASS, FIXED_BY_CODE
from planner.intake.huggingface.rope_keys import rope_fields, rope_mask
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

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "geglu": "gelu",
    "gelu_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "xielu": "xielu",
    "squared-relu": "relu2", "squared_relu": "relu2",
}  # fmt: skip
_MOE_ONLY = frozenset({
    "scoring_func", "norm_topk_prob", "routed_scaling_factor", "topk_method",
    "router_aux_loss_coef", "router_z_loss_coef", "seq_aux", "router_jitter_noise",
    "moe_apply_router_weight_on_input",
})  # fmt: skip


def complete(given: Values, family_defaults: Values, *, published: bool) -> dict[str, object]:
    """The keys, completed by what the family's code fixes and its configuration class assumes.

    given: canonical keys as written.
    family_defaults: `Family.defaults`.
    published: whether this is a published config; the configuration class counts only for those.
    A key given as null overrides the configuration class, as in transformers. It does not override
    what the code fixes.
    """
    model_type = str(given.get("model_type"))
    stated = dict(given)
    if "rope_parameters" in stated:
        stated.setdefault("rope_scaling", None)
    if model_type == "llama4_text" and stated.get("use_qk_norm") is not None:
        stated.setdefault("qk_l2_norm", stated["use_qk_norm"])
    defaults = ASSUMED_BY_CLASS.get(model_type, {}) if published else {}
    if any(key in stated for key in _DROPOUTS):
        defaults = {key: value for key, value in defaults.items() if key != "dropout"}
    fixed = {
        key: value
        for key, value in FIXED_BY_CODE.get(model_type, {}).items()
        if stated.get(key) is None
    }
    return {**family_defaults, **defaults, **stated, **fixed}


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
    limits = values.get("swiglu_limits")
    fields["swiglu_limits"] = tuple(limits) if isinstance(limits, (list, tuple)) else ()
    for key in ("unread_keys", "left_out"):
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
