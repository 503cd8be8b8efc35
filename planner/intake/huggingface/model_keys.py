"""Keys by which a person or a config.json describes a model: other names, kinds and bounds.

`read_keys` turns raw keys into canonical ones and collects every fault on the way. Canonical keys
are Hugging Face's most common names plus the fields of `ModelSpec`.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import Any, Literal, get_args, get_origin

from pydantic import StrictBool

from planner.errors import Fault
from planner.intake.huggingface.families import NAMES
from planner.specs.model import ModelSpec, Size
from planner.specs.network import Count, Number, Weight
from planner.specs.validation import Name
from planner.units import to_float

MAX_NAME_LENGTH = 200
_TOKENS, _WIDTH, _SMALL = 2**31, 2**24, 2**16

# Type of each field of a model: what a key of that name may hold.
_HINTS = {
    name: hint
    for part in reversed(ModelSpec.__mro__)
    for name, hint in get_annotations(part).items()
    if name in ModelSpec.model_fields
}


def _fields(*kinds: Any) -> list[str]:
    """Fields of a model that have one of these types, or may be unset besides."""
    return [name for name, hint in _HINTS.items() if any(hint in (k, k | None) for k in kinds)]


# A size beyond the most counts as a typing error.
_MOST = {
    **dict.fromkeys((
        "hidden_size", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size",
        "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank", "o_lora_rank",
        "sliding_q_lora_rank", "sliding_kv_lora_rank", "moe_latent_size", "gated_norm_rank",
    ), _WIDTH),
    **dict.fromkeys((
        "attention_chunk_size", "max_position_embeddings", "original_max_position_embeddings",
        "sliding_window", "mtp_window", "mamba_chunk_size", "lightning_block_size",
        "index_block_size", "compress_rate_csa", "compress_rate_hca",
    ), _TOKENS),
    "vocab_size": 2**28, "vocab_size_per_layer_input": 2**28, "norms_per_layer": 8, "hc_mult": 64,
}  # fmt: skip
_POSITIVE = (
    *_fields(Size), "intermediate_size", "max_position_embeddings", "num_experts_per_tok",
    "moe_intermediate_size", "decoder_sparse_step", "interleave_moe_layer_step",
    "intermediate_size_mlp", "sliding_window_pattern", "attention_chunk_size", "expansion_ratio",
)  # fmt: skip
_NOT_NEGATIVE = (
    *_fields(Count), "max_window_layers", "no_rope_layer_interval",
    "original_max_position_embeddings",
)  # fmt: skip
SIZES: Mapping[str, tuple[int, int]] = {
    name: (int(name in _POSITIVE), _MOST.get(name, _SMALL)) for name in _NOT_NEGATIVE + _POSITIVE
}
"""Canonical key -> (least, most)."""
# Real numbers above 0, then those that may be 0.
NUMBERS = frozenset({
    *_fields(Number), "partial_rotary_factor", "query_pre_attn_scalar", "logits_scaling",
})  # fmt: skip
WEIGHTS = frozenset({
    *_fields(Weight), "attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop",
    "resid_pdrop", "embedding_dropout",
})  # fmt: skip
MAPPINGS = frozenset({"rope_scaling", "rope_parameters"})
BOOLEAN = frozenset({
    *_fields(StrictBool), "use_sliding_window", "use_qk_norm", "use_bias", "no_bias",
})  # fmt: skip
CHOICES = {name: get_args(hint) for name, hint in _HINTS.items() if get_origin(hint) is Literal}
TEXT = frozenset({*_fields(str, Name), "base", "model_type"})
LAYER_LISTS = frozenset({
    *(name for name, hint in _HINTS.items() if get_origin(hint) is tuple), "layer_types",
    "mlp_only_layers", "no_rope_layers",
}) - {"sliding_mask"}  # fmt: skip
ALIASES: Mapping[str, str] = NAMES["aliases"]
WITHOUT_BEARING, _OF_A_FILE = (frozenset(NAMES[one]) for one in ("without_bearing", "of_a_file"))
_OF_ATTENTION = frozenset({"alibi", "clip_qkv", "rope_theta"})

CANONICAL = frozenset({
    *SIZES, *NUMBERS, *WEIGHTS, *MAPPINGS, *BOOLEAN, *CHOICES, *TEXT, *LAYER_LISTS,
})  # fmt: skip
KNOWN = CANONICAL | ALIASES.keys() | WITHOUT_BEARING


@dataclass(frozen=True, slots=True)
class Keys:
    """Canonical keys with checked values, and the faults found.

    values: canonical key -> value; None where null was given.
    given_as: canonical key -> the name it was given by.
    """

    values: dict[str, object]
    given_as: dict[str, str]
    faults: list[Fault] = field(default_factory=list)

    def name_of(self, key: str) -> str:
        """The name that a canonical key was given by."""
        return self.given_as.get(key, key)


def read_keys(raw: Mapping[str, object], prefix: str, ignore_unknown: bool) -> Keys:
    """Canonical keys of one mapping.

    raw: keys as written.
    prefix: field of the mapping, such as "model".
    ignore_unknown: True for a config.json, whose unknown keys are listed in `unread_keys` where
        they are switched on; False for an inline mapping, where an unknown key is a fault that
        names the closest one.
    """
    keys = Keys({}, {})
    unread = []
    for key, value in _with_parts(raw).items():
        if not isinstance(key, str) or key not in KNOWN:
            if not ignore_unknown:
                keys.faults.append(_unknown_key(key, value, prefix))
            elif value and isinstance(key, str) and key not in _OF_A_FILE:
                unread.append(key[:MAX_NAME_LENGTH])
        elif key not in WITHOUT_BEARING:
            _add(keys, key, value, prefix)
    if unread:
        keys.values["unread_keys"] = sorted(unread)
    return keys


def _with_parts(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The keys with those of MPT's `attn_config` in place of it.

    A key of it that we do not know becomes `attn_config.key`.
    """
    part = raw.get("attn_config")
    if not isinstance(part, Mapping):
        return raw
    inner = {
        key if key in _OF_ATTENTION else f"attn_config.{key}": value for key, value in part.items()
    }
    return {**{key: value for key, value in raw.items() if key != "attn_config"}, **inner}


def _add(keys: Keys, key: str, value: object, prefix: str) -> None:
    canonical = ALIASES.get(key, key)
    if (
        canonical in keys.values
        and value is not None
        and keys.values[canonical] not in (None, value)
    ):
        # StarCoder2 and Gemma publish two that differ: the common name counts
        if canonical == "hidden_act":
            keys.values[canonical] = value if key == canonical else keys.values[canonical]
            return
        other = keys.given_as[canonical]
        rule = f"is another name of {other}, which says {keys.values[canonical]!r}"
        keys.faults.append(Fault(f"{prefix}.{key}", value, rule, f"give one of {key} and {other}"))
        return
    problem = None if value is None else check_value(canonical, value)
    if problem is not None:
        keys.faults.append(Fault(f"{prefix}.{key}", value, *problem))
    elif value is not None or keys.values.get(canonical) is None:
        keys.values[canonical] = value
    keys.given_as.setdefault(canonical, key)


def _unknown_key(key: object, value: object, prefix: str) -> Fault:
    close = difflib.get_close_matches(str(key), sorted(KNOWN - WITHOUT_BEARING), n=1, cutoff=0.5)
    remedy = (
        f"did you mean {close[0]}?"
        if close
        else "use the keys of a Hugging Face config.json, or base, name, mlp"
    )
    return Fault(f"{prefix}.{str(key)[:MAX_NAME_LENGTH]}", value, "no such model key", remedy)


def check_value(key: str, value: object) -> tuple[str, str] | None:
    """(rule, remedy) where `value` is not allowed for `key`; None where it is."""
    if key in SIZES:
        return _check_size(value, *SIZES[key])
    if key in NUMBERS or key in WEIGHTS:
        return _check_number(key, value)
    if key in LAYER_LISTS:
        return _check_list(key, value)
    if key in MAPPINGS and not isinstance(value, Mapping):
        return "must be a mapping", "give it as in the model's config.json, or null"
    if key in BOOLEAN and not isinstance(value, bool):
        return "must be true or false", "give true or false without quotes"
    if key in CHOICES and value not in CHOICES[key]:
        return f"must be one of {', '.join(CHOICES[key])}", f"give {CHOICES[key][0]}"
    if key not in TEXT:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH:
        return "must be a text", f"give 1 to {MAX_NAME_LENGTH} characters"
    return None


def _check_size(value: object, least: int, most: int) -> tuple[str, str] | None:
    if isinstance(value, bool) or not isinstance(value, int):
        remedy = f"give {least} to {most} without quotes, point or exponent"
        return "must be a whole number", remedy
    if least <= value <= most:
        return None
    small = "must be positive" if least else "must not be negative"
    return small if value < least else "is implausibly large", f"give {least} to {most}"


def _check_number(key: str, value: object) -> tuple[str, str] | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, (int, float)) or not known or not math.isfinite(to_float(value)):
        return "must be a number", "give it without quotes"
    if value < 0 or (value == 0 and key in NUMBERS):
        return (
            "must be positive" if key in NUMBERS else "must not be negative"
        ), "give it as in the model's config.json"
    if key == "partial_rotary_factor" and value > 1:
        return "must be a fraction", "give more than 0 and at most 1"
    return None


def _check_list(key: str, value: object) -> tuple[str, str] | None:
    kind, what = (
        (str, "texts")
        if key in ("layer_types", "mixers", "unread_keys", "left_out")
        else ((int, float), "numbers")
        if key == "swiglu_limits"
        else (int, "layer numbers" if key != "sliding_windows" else "windows")
    )
    flags = key in ("no_rope_layers", "rope_mask")
    if isinstance(value, (list, tuple)) and all(
        isinstance(v, kind) and (flags or not isinstance(v, bool)) for v in value
    ):
        return None
    return f"must be a list of {what}", "see the model's config.json for an example"
