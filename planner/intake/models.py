"""Reads a model: a catalogue name, the path of a Hugging Face config.json, or an inline mapping.

Defaults of what is left out:
head_dim: hidden_size / num_attention_heads.
num_key_value_heads: num_attention_heads.
tie_word_embeddings: false.
The rest comes from `model_type` (`families`). In an inline mapping without model_type it
comes from the kind of MLP (families.generic_family: swiglu as Llama, gelu as GPT-3 with LayerNorm
and biases).
"""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from planner.catalog.models import model_keys, model_names
from planner.errors import Fault, SpecError, UnknownNameError
from planner.intake.huggingface.dialects import translated
from planner.intake.huggingface.families import (
    TEXT_PARTS,
    Family,
    family_names,
    family_of,
    generic_family,
)
from planner.intake.huggingface.missing_blocks import NAMED, REMEDY, refusal
from planner.intake.huggingface.model_document import MLA_ONLY, MOE_ONLY
from planner.intake.huggingface.model_keys import Keys, read_keys
from planner.intake.huggingface.network_keys import complete, network_fields, rope_faults
from planner.intake.near_files import with_near_file
from planner.specs.model import ModelSpec
from planner.specs.network import NETWORK_FIELDS
from planner.units import counted

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
AS_PUBLISHED = "give a config.json as published on Hugging Face"
MAX_CONFIG_BYTES = 10_000_000
# keys that only a published config.json has
PUBLISHED = frozenset({"architectures", "transformers_version", "text_config"})
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NULL_MEANS_NONE = frozenset({
    "sliding_window", "attention_chunk_size", "q_lora_rank", "kv_lora_rank", "n_shared_experts",
    "num_experts", "shared_expert_intermediate_size",
})  # fmt: skip
_GATED_ACTIVATIONS = frozenset({"silu", "swish", "swiglu", "geglu", "glu"})
_SQUARED_RELU = frozenset({"relu2", "squared-relu", "squared_relu"})
_WINDOWED_TYPES = frozenset({"sliding_attention", "chunked_attention"})
_LAYER_TYPES = _WINDOWED_TYPES | {"full_attention"}
# list of a value for each layer -> lists of layers that repeat with it
_OF_PATTERN = {"layer_types": (), "sliding_windows": (), "swiglu_limits": (),
    "mixers": ("mixer_only_layers", "dense_layers")}  # fmt: skip
# fields of ModelSpec that a config gives in the same words, or leaves to their defaults
_AS_WRITTEN = ModelSpec.model_fields.keys() - NETWORK_FIELDS - MOE_ONLY - MLA_ONLY - {
    "intermediate_size", "sliding_window", "sliding_mask", "v_head_dim",
}  # fmt: skip
_OTHER_PARTS = frozenset(
    f"{part}_config" for part in ("vision", "audio", "speech", "projector", "qformer", "image")
)
Values = dict[str, object]
T = TypeVar("T", int, str, bool)


def read_model(value: object, field: str = "model", allow_files: bool = True) -> ModelSpec:
    """The ModelSpec of a catalogue name, a path of a config.json, or a mapping.

    allow_files: pass False where the text comes from a network.
    Raises UnknownNameError, or SpecError with every fault.
    """
    if isinstance(value, ModelSpec):
        return value
    if isinstance(value, Mapping):
        if PUBLISHED & value.keys():
            return _from_config(
                {str(key): item for key, item in value.items()},
                field,
                str(value.get("_name_or_path") or value.get("model_type")),
            )
        return build_model(value, field=field)
    if isinstance(value, str) and value.strip():
        return _from_text(value.strip(), field, allow_files)
    remedy = "give a catalogue name, a path to a config.json, or a mapping"
    raise SpecError(Fault(field, value, "is neither a name, a path nor a mapping", remedy))


def _from_text(text: str, field: str, allow_files: bool) -> ModelSpec:
    try:
        keys = model_keys(text)
    except UnknownNameError as unknown:
        if block := NAMED.get(text.lower()):
            rule = f"has {block}; our operations have no such block"
            raise SpecError(Fault(field, text, rule, REMEDY)) from None
        if not _looks_like_path(text, allow_files):
            raise _unknown_name(field, text, _instead_of(text, allow_files)) from unknown
        if not allow_files:
            remedy = "send the keys of the config.json as a mapping"
            raise SpecError(Fault(field, text, "files are not read here", remedy)) from None
        return _from_file(text, field)
    return build_model(keys, field=field)


def _unknown_name(field: str, name: str, also: str) -> SpecError:
    if Path(name).suffix in WEIGHTS:
        remedy = "give the config.json that stands beside them, or the folder of both"
        return SpecError(Fault(field, name, "is a file of weights", remedy))
    return UnknownNameError(field, name, model_names(), "model", also=also)


def _instead_of(name: str, allow_files: bool) -> str:
    """Remedy for a model that the catalogue does not have."""
    if not allow_files:
        return "send the keys of its config.json as a mapping"
    if HUB_ID.fullmatch(name):
        return f"download config.json of {name} from Hugging Face and pass its path"
    return "pass the path of its config.json as downloaded from Hugging Face"


def _looks_like_path(text: str, allow_files: bool) -> bool:
    if text.endswith(".json") or text.startswith(("/", "./", "../", "~")) or "\0" in text:
        return True
    try:
        return allow_files and Path(text).exists()
    except OSError:
        return False


# ---- config.json ---------------------------------------------------------------------------------


def _from_file(text: str, field: str) -> ModelSpec:
    path, config = _read_config(text, field)
    folder = path.resolve().parent.name
    name = folder if path.name == "config.json" and folder else path.stem
    return _from_config(config, field, name)


def _from_config(config: dict[str, object], field: str, name: str) -> ModelSpec:
    config = _language_part(config, field)
    model_type = config.get("model_type")
    if family_of(model_type) is None:
        rule = (
            "model_type is missing"
            if model_type is None
            else f"model_type {str(model_type)[:80]!r} is not supported"
        )
        raise SpecError(_unsupported(model_type, config, rule, field))
    return build_model(config, field=field, name=name, ignore_unknown=True)


def _unsupported(model_type: object, config: Mapping[str, object], rule: str, field: str) -> Fault:
    """The fault of a model type that we do not read.

    It names the missing block where we know it, else the nearest type that we read.
    """
    block = refusal(model_type, config) if isinstance(model_type, str) else ""
    if block:
        rule = f"{rule}: it has {block}; our operations have no such block"
        return Fault(f"{field}.model_type", model_type, rule, REMEDY)
    stem = _stem(str(model_type))
    kin = sorted(name for name in family_names() if stem and _stem(name) == stem)
    close = difflib.get_close_matches(str(model_type)[:80].lower(), kin, n=1, cutoff=0.0)
    nearest = f"the nearest type we read is {close[0]}; " if close else ""
    remedy = (
        f"{nearest}give model_type: TYPE where the layers are those of a type we read "
        f"({len(family_names())}, such as llama, qwen3_moe)"
    )
    remedy = f"{remedy}, or give the shapes inline without model_type"
    return Fault(f"{field}.model_type", model_type, rule, remedy)


def _stem(model_type: str) -> str:
    """The family's name without its number: "olmo" of olmo4 and olmo2_moe."""
    return re.split(r"[\d_.-]", model_type.lower(), maxsplit=1)[0]


def _read_config(text: str, field: str) -> tuple[Path, dict[str, object]]:
    def fault(rule: str, remedy: str) -> SpecError:
        return SpecError(Fault(field, text, rule, remedy))

    try:
        path = Path(text).expanduser()
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                remedy = "give a folder or file as downloaded from Hugging Face"
                raise fault("this folder holds no config.json", remedy)
        if not path.is_file():
            remedy = "give an existing config.json or a catalogue name"
            raise fault("no such file", with_near_file(remedy, path))
        if path.stat().st_size > MAX_CONFIG_BYTES:
            rule = "this file is over 10 MB, too large for a config.json"
            raise fault(rule, "give the config.json, not the weights or tokenizer")
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise fault("this file is not text (UTF-8)", "give a config.json") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise fault(f"this file cannot be read ({error})", "give a readable config.json") from error
    try:
        config = json.loads(content)  # with Infinity, as Python's json writes
    except (ValueError, RecursionError) as error:
        raise fault(f"this file is not valid JSON ({error})", AS_PUBLISHED) from None
    if not isinstance(config, dict):
        raise fault("this file holds no JSON object", AS_PUBLISHED)
    return path, config


def _language_part(config: dict[str, object], field: str) -> dict[str, object]:
    """The language model's own keys: in a multimodal config, those under `text_config`.

    Keys that a `text_config` omits get the defaults of its configuration class. `left_out` lists
    the other parts of the config.
    """
    text = config.get("text_config")
    parts = sorted(
        key
        for key, part in config.items()
        if key.endswith("_config") and key in _OTHER_PARTS and part
    )
    beside = {"left_out": parts} if parts else {}
    if not isinstance(text, dict):
        return {**config, **beside}
    outer = config.get("model_type")
    inner_type = text.get("model_type") or (
        TEXT_PARTS.get(outer) if isinstance(outer, str) else None
    )
    if inner_type is None:
        rule = f"model_type {str(outer)[:80]!r} with a text_config is not supported"
        raise SpecError(
            Fault(f"{field}.model_type", outer, rule, f"supported: {', '.join(sorted(TEXT_PARTS))}")
        )
    key = "tie_word_embeddings"
    shared = {key: config[key]} if key in config else {}
    # transformers 5 asks the whole config whether to tie, earlier ones the text's part
    outer_decides = str(config.get("transformers_version")).split(".")[0] not in ("None", "3", "4")
    return {
        **beside,
        **shared,
        **(family_of(inner_type) or Family()).part,
        **text,
        **(shared if outer_decides else {}),
        "model_type": inner_type,
    }


# ---- keys to fields ------------------------------------------------------------------------------


def build_model(
    raw: Mapping[str, object],
    *,
    field: str = "model",
    name: str = "custom",
    ignore_unknown: bool = False,
) -> ModelSpec:
    """The ModelSpec of Hugging Face keys.

    raw: keys as written, and our own `base`, `name` and `mlp`.
    name: used where raw has none.
    ignore_unknown: True for a config.json, whose unknown keys are no faults.
    Raises SpecError with every fault found.
    """
    keys = read_keys(translated(raw, field), field, ignore_unknown)
    values = _with_base(keys, field)
    family = _family(values, keys, field)
    whole = complete(values, family, published=ignore_unknown)
    values = {**family.defaults, **{k: v for k, v in values.items() if v is not None}}
    clashing = [*_missing_and_clashing(values, family, keys, field, ignore_unknown)]
    keys.faults.extend([*clashing, *rope_faults(whole, field)])
    if keys.faults:
        raise SpecError(keys.faults)
    values["topk_method"] = whole.get("topk_method")
    fields = {**_fields(values, family, name), **network_fields(whole)}
    draft = ModelSpec.model_construct(None, **fields)
    faults = [_as_given(fault, keys, field) for fault in draft.clashes(field)]
    faults = faults or [*_layer_list_faults(values, field)]
    if faults:
        raise SpecError(faults)
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise SpecError(_pydantic_faults(error, field)) from None


def _pydantic_faults(error: ValidationError, field: str) -> list[Fault]:
    remedy = "see the catalogue's models for examples"
    return [
        Fault(".".join([field, *map(str, one["loc"])]), one["input"], one["msg"], remedy)
        for one in error.errors()
    ]


def _as_given(fault: Fault, keys: Keys, field: str) -> Fault:
    """Renames a fault to the name that the person used for the key."""
    key = fault.field.removeprefix(f"{field}.")
    return replace(fault, field=f"{field}.{keys.name_of(key)}")


def _with_base(keys: Keys, field: str) -> Values:
    """The user's values over those of `base`.

    A null means "none" where that is a meaning of the key, else "unset".
    """
    own = {k: (0 if v is None and k in _NULL_MEANS_NONE else v) for k, v in keys.values.items()}
    base = own.pop("base", None)
    if not isinstance(base, str):
        return own
    try:
        found = read_keys(translated(model_keys(base), f"{field}.base"), f"{field}.base", False)
    except UnknownNameError as unknown:
        raise _unknown_name(
            f"{field}.base", base, "leave base out and write the keys of its config.json"
        ) from unknown
    inherited = dict(found.values)
    layers = own.get("num_hidden_layers")
    for key in _OF_PATTERN:
        kinds = inherited.get(key)
        if isinstance(kinds, list) and isinstance(layers, int):
            inherited[key] = [kinds[i % len(kinds)] for i in range(layers)]
            for name in _OF_PATTERN[key]:
                chosen = inherited.get(name)
                if isinstance(chosen, list):
                    inherited[name] = [i for i in range(layers) if i % len(kinds) in chosen]
    experts, groups = own.get("num_experts"), inherited.get("n_group")
    if isinstance(experts, int) and isinstance(groups, int) and groups > 0 and experts % groups:
        # the groups divide the base's experts; where they do not divide the new number of
        # experts, the model has none
        inherited = {
            key: value for key, value in inherited.items() if key not in ("n_group", "topk_group")
        }
    inherited["name"] = (
        f"{inherited.get('name', base)}-variant" if len(own) else inherited.get("name", base)
    )
    return {**inherited, **own}


def _family(values: Values, keys: Keys, field: str) -> Family:
    model_type = values.get("model_type")
    known = family_of(model_type)
    if known is not None:
        return known
    if isinstance(model_type, str):
        keys.faults.append(_unsupported(model_type, values, "is not a supported model type", field))
    return generic_family(_mlp_kind(values, gated=False))


def _mlp_kind(values: Values, gated: bool) -> str:
    """The given `mlp`, else the kind that the activation implies.

    Without either, a gated MLP: nearly all models since 2023 have one.
    """
    given, activation = values.get("mlp"), values.get("hidden_act")
    if isinstance(given, str):
        return given
    if gated or not isinstance(activation, str) or activation in _GATED_ACTIVATIONS:
        return "swiglu"
    return "squared-relu" if activation in _SQUARED_RELU else "gelu"


def _missing_and_clashing(
    values: Values, family: Family, keys: Keys, field: str, published: bool
) -> Iterator[Fault]:
    """Faults that show before fields are derived: missing keys, and pairs that contradict."""
    for key in (*_REQUIRED, "num_experts") if family.needs_experts else _REQUIRED:
        if key not in values and keys.values.get(key) is None and _not_faulty(key, keys, field):
            remedy = f"give {key} as in the model's config.json"
            yield Fault(f"{field}.{key}", None, "is required", remedy)
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    derived = "head_dim" not in values and not values.get("kv_lora_rank")
    # transformers cuts the width of a published config down; a person's own is a typing error
    derived = derived and not published
    if derived and isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        rule = f"{counted(heads, 'head')} do not divide hidden_size {hidden}"
        yield Fault(f"{field}.{keys.name_of('num_attention_heads')}", heads, rule, "give head_dim")
    yield from _pair_faults(values, keys, field)


def _pair_faults(values: Values, keys: Keys, field: str) -> Iterator[Fault]:
    """Pairs of keys that contradict each other.

    ModelSpec.clashes finds the first two as well, but only once all keys are sound.
    """
    heads, kv = values.get("num_attention_heads"), values.get("num_key_value_heads")
    experts, chosen = values.get("num_experts"), values.get("num_experts_per_tok")
    if keys.faults and isinstance(heads, int) and isinstance(kv, int) and heads % kv:
        rule = f"does not divide {heads} attention heads"
        remedy = "give a divisor of num_attention_heads"
        yield Fault(f"{field}.num_key_value_heads", kv, rule, remedy)
    if keys.faults and isinstance(experts, int) and isinstance(chosen, int) and chosen > experts:
        rule = f"is more than the {counted(experts, 'expert')}"
        yield Fault(f"{field}.num_experts_per_tok", chosen, rule, f"give 1 to {experts}")
    if "num_experts" in values or not _not_faulty("num_experts", keys, field):
        return
    for key in ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"):
        if key in keys.given_as and values.get(key):
            rule = "is given without a number of experts"
            remedy = "give n_routed_experts, num_local_experts or num_experts"
            yield Fault(f"{field}.{keys.name_of(key)}", values[key], rule, remedy)


def _not_faulty(key: str, keys: Keys, field: str) -> bool:
    """Whether the key is not yet reported, under the name it was given by."""
    return all(fault.field != f"{field}.{keys.name_of(key)}" for fault in keys.faults)


def _layer_list_faults(values: Values, field: str) -> Iterator[Fault]:
    kinds, layers = values.get("layer_types"), _get(values, "num_hidden_layers", 0)
    if not isinstance(kinds, list):
        return
    named = f"{field}.layer_types"
    if len(kinds) != layers:
        rule = f"must name each of {counted(layers, 'layer')}"
        yield Fault(named, len(kinds), rule, "give as many as num_hidden_layers")
    odd = [kind for kind in kinds if kind not in _LAYER_TYPES]
    if odd:
        remedy = f"supported: {', '.join(sorted(_LAYER_TYPES))}"
        yield Fault(named, odd[0], "is not a supported kind of layer", remedy)


def _get(values: Values, key: str, default: T) -> T:
    """The value of a checked key, in the type of its default."""
    value = values.get(key, default)
    return value if isinstance(value, type(default)) else default


def _fields(values: Values, family: Family, name: str) -> Values:
    """Fields of ModelSpec; required keys are present and every value has the right kind."""
    hidden, heads = _get(values, "hidden_size", 0), _get(values, "num_attention_heads", 0)
    return {
        "name": name,
        "num_key_value_heads": heads,
        "head_dim": max(hidden // heads, 1),
        "tie_word_embeddings": False,
        **_written(values, _AS_WRITTEN),
        "mlp": _mlp_kind(values, family.gated),
        **_bias_fields(values, family),
        **_norm_fields(values),
        **_mla_fields(values),
        **_moe_fields(values, family),
        **_window_fields(values),
    }


def _written(values: Values, keys: Collection[str]) -> Values:
    """These of the keys, with tuples for lists."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key in keys
    }


def _bias_fields(values: Values, family: Family) -> Values:
    if {"use_bias", "no_bias"} & values.keys():
        everywhere = _get(values, "use_bias", not _get(values, "no_bias", True))
        return dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), everywhere)
    follows = _get(values, "attention_bias", False) and family.bias_on_output
    return {"attention_output_bias": _get(values, "attention_output_bias", follows)}


def _norm_fields(values: Values) -> Values:
    biased = _get(values, "norm_bias", True)
    biased = not _get(values, "no_bias", True) if "no_bias" in values else biased
    by_flag = "head" if _get(values, "use_qk_norm", False) else "none"
    return {
        "norm_bias": values.get("norm") == "layernorm" and biased,
        "qk_norm": _get(values, "qk_norm", by_flag),
    }


def _mla_fields(values: Values) -> Values:
    if _get(values, "kv_lora_rank", 0) == 0:
        rank = _get(values, "q_lora_rank", 0) if _get(values, "o_groups", 0) else 0
        return {"v_head_dim": _get(values, "v_head_dim", 0), "q_lora_rank": rank}
    nope, rope = _get(values, "qk_nope_head_dim", 0), _get(values, "qk_rope_head_dim", 0)
    return {**_written(values, {*MLA_ONLY, "v_head_dim"}), "head_dim": max(nope + rope, 1)}


def _moe_fields(values: Values, family: Family) -> Values:
    """Widths and placement of experts; a dense model gets its MLP width only."""
    default_width = _get(values, "expansion_ratio", 0) * _get(values, "hidden_size", 0)
    dense_width = _get(values, family.dense_width_key, default_width)
    if not values.get("num_experts"):
        return {"intermediate_size": _get(values, "intermediate_size", default_width)}
    width = _get(values, "moe_intermediate_size", _get(values, family.expert_width_key, 0))
    num_shared = _get(values, "n_shared_experts", 0)
    shared_width = _get(values, "shared_expert_intermediate_size", num_shared * width)
    fields: Values = {
        **_written(values, MOE_ONLY),
        "moe_intermediate_size": width,
        "n_shared_experts": num_shared or int(shared_width > 0),
        "shared_expert_intermediate_size": shared_width,
        "router_correction_bias": _get(
            values, "router_correction_bias", values.get("topk_method") == "noaux_tc"
        ),
        **_moe_placement(values),
    }
    return {**fields, "intermediate_size": dense_width if _has_dense_layers(fields, values) else 0}


def _moe_placement(values: Values) -> Values:
    """Which layers are MoE.

    Qwen and Llama 4 count layers from one (the n-th, 2n-th, ... is MoE), DeepSeek from zero.
    """
    from_one = _get(values, "decoder_sparse_step", _get(values, "interleave_moe_layer_step", 0))
    listed = [values.get(key, ()) for key in ("dense_layers", "mlp_only_layers")]
    return {
        "first_k_dense_replace": _get(values, "first_k_dense_replace", 0),
        "moe_layer_freq": from_one or _get(values, "moe_layer_freq", 1),
        "moe_layer_offset": from_one - 1 if from_one else _get(values, "moe_layer_offset", 0),
        "dense_layers": tuple(
            sorted({i for layers in listed if isinstance(layers, (list, tuple)) for i in layers})
        ),
    }


def _has_dense_layers(fields: Values, values: Values) -> bool:
    layers = _get(values, "num_hidden_layers", 0)
    listed = values.get("mixer_only_layers")
    single = listed if isinstance(listed, list | tuple) else ()
    draft = ModelSpec.model_construct(None, **fields, num_hidden_layers=layers)
    return not all(draft.is_moe_layer(i) or i in single for i in range(layers))


def _window_fields(values: Values) -> Values:
    """sliding_window and the layers that it holds for; a window that no layer uses is dropped."""
    windows = values.get("sliding_windows")
    if isinstance(windows, list) and windows:
        several = {"sliding_windows": tuple(windows)} if len({*windows} - {0}) > 1 else {}
        mask, window = tuple(map(bool, windows)), max(windows)
        return {"sliding_windows": (), "sliding_mask": mask, "sliding_window": window, **several}
    window = _get(values, "sliding_window", _get(values, "attention_chunk_size", 0))
    if window == 0 or not _get(values, "use_sliding_window", True):
        return {}
    layers, kinds = _get(values, "num_hidden_layers", 0), values.get("layer_types")
    pattern, first = _get(values, "sliding_window_pattern", 0), _get(values, "max_window_layers", 0)
    if isinstance(kinds, (list, tuple)):
        mask = tuple(kind in _WINDOWED_TYPES for kind in kinds)
    elif pattern:
        mask = tuple((i + 1) % pattern != 0 for i in range(layers))
    else:
        mask = tuple(i >= first for i in range(layers))
    return {"sliding_window": window, "sliding_mask": mask} if any(mask) else {}


@lru_cache(maxsize=256)
def load_model(name: str) -> ModelSpec:
    """The model of a catalogue name or alias, in any case.

    Raises UnknownNameError naming the closest.
    """
    return build_model(model_keys(name), field="model")
