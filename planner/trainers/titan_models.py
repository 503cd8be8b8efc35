"""Which of TorchTitan's own models a ModelSpec is, found by shape and not by name.

A `line` of its releases is "0.2" or "0.3".
Sources: planner/catalog/torchtitan/flavors.yaml, and where its head says its rows come from;
    torchtitan 0.2.2 models/*/__init__.py (`pipelining_fn`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.catalog.files import document
from planner.specs.model import ModelSpec
from planner.specs.network import RopeScaling
from planner.trainers.release import Release
from planner.trainers.titan_networks import OWN_WAY, lacks

# Fields by which a shipped model is found -> the value where its row leaves one out
SHAPE: Mapping[str, object] = {
    "hidden_size": 0, "num_hidden_layers": 0, "num_attention_heads": 0, "num_key_value_heads": 0,
    "head_dim": 0, "tie_word_embeddings": False, "vocab_size": 0, "intermediate_size": 0,
    "num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0, "first_k_dense_replace": 0, "moe_layer_freq": 1,
    "qk_norm": "none",
}  # fmt: skip
Shape = tuple[object, ...]
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """One model that TorchTitan ships.

    module, flavor: its names there.
    facts: the values that it has in fields of `network.Network`.
    versions: the lines that ship it.
    config: function of the 0.3 registry that sets nothing that a flag cannot undo; None where there
        is none, or where it has a float8 converter built in.
    flex: 0.2 runs it with FlexAttention, which excludes CP there.
    num_layers: of a model that differs from it in nothing else; None as shipped.
    """

    module: str
    flavor: str
    facts: Facts
    versions: Collection[str] = ("0.2", "0.3")
    config: str | None = None
    flex: bool = False
    long_context: str | None = None
    num_layers: int | None = None


def _shipped(name: str, row: Mapping[str, Any]) -> tuple[Shape, Flavor]:
    module, flavor = name.split("/")
    scaling = row["facts"].get("rope_scaling")
    facts = {**row["facts"], **({"rope_scaling": RopeScaling(**scaling)} if scaling else {})}
    own = {key: value for key, value in row.items() if key not in ("shape", "facts")}
    return tuple({**SHAPE, **row["shape"]}.values()), Flavor(
        module=module, flavor=flavor, facts=facts, **own
    )


FLAVORS: Mapping[Shape, Flavor] = dict(
    _shipped(name, row) for name, row in document("torchtitan", "flavors").items()
)
# Classes that no model is registered with from its shapes alone (`class_for`). A copy of a shipped
# flavor still takes another n_layers (0.2.2 models/{llama4,gpt_oss}/model/args.py), as in the runs
# of Llama 4 Scout cut to 2 layers in torchao's prototype/moe_training/README.md.
SHIPPED_ALONE = frozenset({"llama4", "gpt_oss"})
_OF_ANY_DEPTH = {
    (shape[0], *shape[2:]): flavor
    for shape, flavor in FLAVORS.items()
    if flavor.module in SHIPPED_ALONE and "0.2" in flavor.versions
}
WITH_PIPELINE = {
    "0.2": frozenset({"llama3", "llama4", "deepseek_v3"}),
    "0.3": frozenset({"llama3", "qwen3", "deepseek_v3", "gpt_oss"}),
}
# 0.2.2 models/gpt_oss/model/args.py update_from_config: "CP support for gpt-oss model is still in
# progress"; 0.3 has it.
WITHOUT_CONTEXT_PARALLEL = {"0.2": frozenset({"gpt_oss"}), "0.3": frozenset[str]()}


def line_of(release: Release) -> str:
    """The line whose models and settings a release of TorchTitan has: "0.2" or "0.3".

    Older releases are taken as 0.2.
    """
    return "0.3" if release.since("0.3") else "0.2"


def shape_of(model: ModelSpec) -> Shape:
    """Values of the fields in SHAPE, in its order."""
    own = {
        "num_key_value_heads": 0 if model.uses_mla else model.num_key_value_heads,
        "head_dim": model.qk_head_dim,
        "intermediate_size": model.intermediate_size if model.num_dense_layers > 0 else 0,
        "moe_layer_freq": model.moe_layer_freq if model.is_moe else 1,
    }
    return tuple(own.get(name, getattr(model, name)) for name in SHAPE)


def find_flavor(model: ModelSpec, line: str) -> Flavor | None:
    """The model that TorchTitan ships with these shapes; None where there is none.

    Its other numbers may differ (`titan_networks.differences`), and in 0.2 the layers of some
    (`SHIPPED_ALONE`); an export then changes them. It does not count where the given model has
    something that no setting can express (`titan_networks.lacks`), unless TorchTitan's own form of
    it lacks that too (`OWN_WAY`).
    """
    shape = shape_of(model)
    flavor = FLAVORS.get(shape)
    if flavor is None and line == "0.2" and (whole := _OF_ANY_DEPTH.get((shape[0], *shape[2:]))):
        flavor = replace(whole, num_layers=model.num_hidden_layers)
    if flavor is None or line not in flavor.versions:
        return None
    exotic = (
        model.attention_sinks != (flavor.module == "gpt_oss")
        or model.mlp != "swiglu"
        or model.norm != "rmsnorm"
        or bool(model.unusual)
    )
    own = OWN_WAY.get(flavor.module, frozenset())
    lost = any(field not in own for field, _ in lacks(model, flavor.module, line))
    return None if exotic or lost else flavor


def unsupported(model: ModelSpec, line: str = "0.2") -> list[str]:
    """Parts that no TorchTitan model class has; empty for a model that can be registered."""
    biases = (model.attention_bias, model.attention_output_bias, model.mlp_bias, model.lm_head_bias)
    between = model.moe_layer_freq != 1 or bool(model.dense_layers)
    leading = model.first_k_dense_replace > 0
    rows = (
        (model.mlp != "swiglu", f"{model.mlp} MLP"),
        (model.norm != "rmsnorm", "LayerNorm"),
        (any(biases), "biases"),
        (model.parallel_residual, "parallel residual"),
        (model.position_embedding != "rope", f"{model.position_embedding} positions"),
        (model.norms_per_layer != 2 or model.embedding_norm, "other norms than two a layer"),
        (model.qk_norm == "full", "query-key norm over the whole projection"),
        (model.attention_sinks, "attention sinks"),
        (model.shared_expert_gate, "gate on the shared expert"),
        (model.router_bias or model.expert_bias, "biased router or experts"),
        (model.uses_mla and not model.is_moe, "MLA without experts"),
        (model.uses_mla and model.tie_word_embeddings, "tied embedding with MLA"),
        (model.is_moe and between, "dense layers between MoE layers"),
        (model.is_moe and leading and not model.uses_mla, "leading dense layers without MLA"),
    )
    found = [words for broken, words in rows if broken] + model.unusual
    return found + [words for _, words in lacks(model, class_for(model), line)]


def class_for(model: ModelSpec) -> str:
    """TorchTitan's model class that takes the shapes.

    llama3 where it suffices, since it can be pipelined in 0.2.
    """
    if model.uses_mla:
        return "deepseek_v3"
    plain = (
        model.head_dim * model.num_attention_heads == model.hidden_size and model.qk_norm == "none"
    )
    return "llama3" if plain and not model.is_moe and not model.tie_word_embeddings else "qwen3"


def lacking(model: ModelSpec, line: str) -> list[str]:
    """Parts that no model class of this line of TorchTitan has, in words.

    Empty for a model that it ships or that can be registered. 0.3 builds the layers of a registered
    model with each family's own function, and those functions lack some things.
    """
    if find_flavor(model, line) is not None:
        return []
    words = unsupported(model, line)
    if words or line == "0.2" or class_for(model) != "qwen3":
        return words
    found = ["this head width, tying or experts without query-key norm"] * (model.qk_norm != "head")
    return found + ["shared experts without MLA"] * (model.shared_expert_intermediate_size > 0)


def module_of(model: ModelSpec, line: str) -> str:
    """The TorchTitan module that would train these shapes.

    Its own for a model that it ships, else the class that takes them.
    """
    flavor = find_flavor(model, line)
    return flavor.module if flavor else class_for(model)


def pipelines(model: ModelSpec, line: str) -> bool:
    """Whether TorchTitan can split the model for these shapes into pipeline stages."""
    return module_of(model, line) in WITH_PIPELINE[line]


def cuts_sequences(model: ModelSpec, line: str) -> bool:
    """Whether TorchTitan's model for these shapes takes context parallelism."""
    return module_of(model, line) not in WITHOUT_CONTEXT_PARALLEL[line]


def module_names(split: tuple[int, ...], head: str) -> list[list[str]]:
    """Modules of each pipeline stage.

    split: layers of each stage.
    head: name of the output layer.
    """
    stages: list[list[str]] = []
    first = 0
    for count in split:
        stages.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", head]
    return stages


def even_split(
    num_layers: int, num_stages: int, first: int = 1, last: int = 1
) -> tuple[int, ...] | None:
    """Layers per stage as TorchTitan splits them; None where it refuses, as a stage would be empty.

    The embedding counts as `first` layers and the head as `last`. The first stages take what is
    left.
    Source: torchtitan 0.2.2 distributed/pipeline_parallel.py generate_llm_fqn_per_model_part.
    """
    each, extra = divmod(num_layers + first + last, num_stages)
    if each < max(1, first, last):
        return None
    if num_stages == 1:
        return (num_layers,)
    split = [each + (stage < extra) for stage in range(num_stages)]
    split[0] -= first
    split[-1] -= last
    return tuple(split)


def uniform_layers_per_stage(num_layers: int, num_stages: int) -> int | None:
    """The pipeline_parallel_layers_per_stage with which TorchTitan builds this many stages.

    None where no value does. It builds ceil((layers + 2) / value) stages.
    Source: torchtitan 0.2.2 distributed/pipeline_parallel.py pipeline_llm.
    """
    value = -(-(num_layers + 2) // num_stages)
    return value if -(-(num_layers + 2) // value) == num_stages else None
