"""Rotary positions of a Hugging Face config: base, share, scaling, and faults in them."""

from collections.abc import Mapping

from pydantic import ValidationError

from planner.errors import Fault
from planner.specs.network import RopeScaling

Values = Mapping[str, object]

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
