"""Model families by `model_type`, one row each of planner/catalog/huggingface/families.yaml."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

from planner.catalog.files import document, parsed, text_of

Keys = Mapping[str, object]
NAMES = document("huggingface", "names")  # types without a row, and keys; its comments say how
SAME_NETWORK: Mapping[str, str] = NAMES["same_network"]
TEXT_PARTS: Mapping[str, str] = NAMES["text_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type: what its code sets beyond its config.json, and how it writes that.

    gated: its MLP has a gate whatever the activation.
    bias_on_output: `attention_bias` also applies to the output projection.
    expert_width_key, dense_width_key: the keys for the width of an expert and of a dense MLP.
    needs_experts: it is always MoE.

    Canonical keys:
    defaults: for what a config leaves out, by its configuration class or hard-wired in its code.
    code: numbers of the network that its modeling code sets whatever the config says.
    assumed: numbers of the network that its configuration class assumes where a *published* config
        leaves them out. They do not complete an inline mapping: a key that a person did not write
        is unknown.
    part: defaults of its configuration class, which a `text_config` leaves out.

    How it writes its keys:
    renames: its name of a key -> the common one.
    parts: nested mappings whose keys belong to the model itself.
    inert: keys that do not affect work or memory, or that repeat another key.
    fixed: keys that hold whatever the config says.
    switches: a switch -> its default, and the keys that it stands for where it is on and off; a
        later one overrides an earlier one.
    prepare: the reader that translates the rest, on renamed keys; "" for none.
    """

    gated: bool = True
    bias_on_output: bool = True
    expert_width_key: str = "moe_intermediate_size"
    dense_width_key: str = "intermediate_size"
    needs_experts: bool = False
    defaults: Keys = field(default_factory=dict)
    code: Keys = field(default_factory=dict)
    assumed: Keys = field(default_factory=dict)
    part: Keys = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    parts: Collection[str] = ()
    inert: Collection[str] = ()
    fixed: Keys = field(default_factory=dict)
    switches: Mapping[str, tuple[bool, Keys, Keys]] = field(default_factory=dict)
    prepare: str = ""


@cache
def _rows() -> Mapping[str, str]:
    """Text of each family's row; reading all as YAML would take longer than most commands."""
    rows = re.split(r"^(?=\w)", text_of("huggingface/families.yaml"), flags=re.MULTILINE)
    return {row.partition(":")[0]: row for row in rows[1:]}


@cache
def _family(name: str) -> Family:
    return Family(**parsed(_rows()[name])[name])


def family_names() -> Collection[str]:
    return _rows().keys()


def family_of(model_type: object) -> Family | None:
    """The family of this type, or of another with the same network; None where none is known."""
    if not isinstance(model_type, str):
        return None
    name = SAME_NETWORK.get(model_type, model_type)
    return _family(name) if name in _rows() else None


def generic_family(mlp: str) -> Family:
    """Family of an inline mapping without model_type.

    swiglu: as Llama (RMSNorm, no biases, RoPE).
    gelu: as GPT-3 (LayerNorm and biases on every projection).
    squared-relu: as Nemotron-4 (LayerNorm, no other biases).
    Positions are RoPE unless `position_embedding: learned` and `max_position_embeddings` are given:
    the size of a table is not guessed. Experts are as wide as `moe_intermediate_size`, else as
    `intermediate_size`. A gelu MLP without a width is 4 hidden sizes wide, as in GPT-2.
    """
    if mlp == "swiglu":
        return Family(expert_width_key="intermediate_size")
    if mlp == "gelu":
        biased = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
        return Family(
            gated=False,
            expert_width_key="intermediate_size",
            defaults={"norm": "layernorm", **biased, "expansion_ratio": 4},
        )
    return Family(gated=False, expert_width_key="intermediate_size", defaults={"norm": "layernorm"})
