"""Blocks of published models that we have no operations for; a message refuses them by name.

Source: planner/catalog/huggingface/names.yaml.
"""

from collections.abc import Mapping, Sequence

from planner.errors import SpecError, fault
from planner.intake.huggingface.families import NAMES

REMEDY = (
    "give the shapes of a transformer of softmax attention and MLP or expert layers inline, "
    "without model_type, where a rough bound will do"
)

NO_OPERATIONS, NAMED = (
    {name: block for block, names in NAMES[section].items() for name in names}
    for section in ("refused", "named")
)
"""Model type, or name of a published model, -> the block that we have no operations for."""


def refusal(model_type: str, config: Mapping[str, object]) -> str:
    """Blocks of a type that we cannot price, in how many layers; empty if nothing is known."""
    block = NO_OPERATIONS.get(model_type, "")
    return f"{block}{_share(config)}" if block else ""


def _share(config: Mapping[str, object]) -> str:
    """In how many layers: from a list of kinds, a pattern of letters or an interval."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    pattern, interval, layers = (
        config.get(key)
        for key in ("hybrid_override_pattern", "full_attention_interval", "num_hidden_layers")
    )
    attention = config.get("attn_type_list")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str) and kinds:
        other, total = sum(kind in _OTHER_KINDS for kind in kinds), len(kinds)
    elif isinstance(attention, Sequence) and attention:
        other, total = sum(kind == 0 for kind in attention), len(attention)
    elif isinstance(pattern, str) and pattern:
        other, total = pattern.count("M"), len(pattern)
    elif isinstance(interval, int) and isinstance(layers, int) and interval > 0:
        other, total = layers - layers // interval, layers
    else:
        return ""
    return f" in {other} of {total} layers" if other else ""


_OTHER_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "m"})


def check_blocks(raw: Mapping[str, object], prefix: str) -> None:
    """Raises SpecError where the config switches on a key for a block that we lack.

    In an inline mapping of ours, `mixers` gives the sizes their meaning.
    """
    if "mixers" in raw:
        return
    model_type = raw.get("model_type")
    for key, (block, types) in NAMES["blocks"].items():
        if raw.get(key) and model_type not in types:
            raise missing(prefix, key, raw[key], f"{block}{_share(raw)}")


def missing(prefix: str, key: str, value: object, block: str) -> SpecError:
    """The error for a config whose `key` asks for this block."""
    return fault(
        f"{prefix}.{key}", value, f"stands for {block}; our operations have no such block", REMEDY
    )
