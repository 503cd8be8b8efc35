"""Which of TorchTitan's own models a ModelSpec is, found by shape and not by name.

A `line` of its releases is "0.2" or "0.3".
Sources: torchtitan 0.2.2 models/{llama3,llama4,qwen3,deepseek_v3,gpt_oss}/__init__.py (the `*_args`
    tables and `pipelining_fn`); 0.3.0 models/*/__init__.py (`*_configs`) and
    models/*/config_registry.py (functions for --config).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from planner.specs.model import ModelSpec
from planner.specs.network import RopeScaling
from planner.trainers.release import Release
from planner.trainers.titan_networks import OWN_WAY, lacks

# (hidden, layers, heads, kv heads (0: MLA), head dim, tied, vocabulary, dense width, experts,
# experts per token, expert width, shared width, first dense layers, n where every n-th layer is
# MoE, query-key norm)
Shape = tuple[int, int, int, int, int, bool, int, int, int, int, int, int, int, int, str]
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
    versions: tuple[str, ...] = ("0.2", "0.3")
    config: str | None = None
    flex: bool = False
    long_context: str | None = None
    num_layers: int | None = None


def _yarn(mscale: float) -> RopeScaling:
    return RopeScaling(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _stretched(factor: float, high: float) -> RopeScaling:
    return RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=high,
        original_max_position_embeddings=8192,
    )


_OSS = RopeScaling(
    rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
)
_LLAMA3: Facts = {"rope_theta": 5e5, "rope_scaling": _stretched(8.0, 4.0), "norm_eps": 1e-5}
_QWEN3: Facts = {"rope_theta": 1e6, "rope_scaling": None, "norm_eps": 1e-6}
_QWEN3_MOE: Facts = {
    **_QWEN3, "scoring_func": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "n_group": 0,
}  # fmt: skip
_DEEPSEEK: Facts = {
    "rope_theta": 1e4, "rope_scaling": _yarn(1.0), "norm_eps": 1e-5, "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 0, "topk_group": 0,
}  # fmt: skip
_DEEPSEEK_671B: Facts = {
    **_DEEPSEEK, "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_LLAMA4: Facts = {
    "rope_theta": 5e5, "norm_eps": 1e-5, "scoring_func": "sigmoid", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "n_group": 0, "moe_apply_router_weight_on_input": True,
}  # fmt: skip
_GPT_OSS: Facts = {
    "rope_theta": 150_000.0, "rope_scaling": _OSS, "norm_eps": 1e-5, "scoring_func": "softmax",
    "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
_llama3 = partial(Flavor, module="llama3", facts=_LLAMA3)
_qwen3 = partial(Flavor, module="qwen3", facts=_QWEN3)
_deepseek = partial(Flavor, module="deepseek_v3", facts=_DEEPSEEK, flex=True)
_llama4 = partial(Flavor, module="llama4", versions=("0.2",))
_gpt_oss = partial(Flavor, module="gpt_oss", facts=_GPT_OSS)


def _llama(
    hidden: int, layers: int, heads: int, width: int, *, head_dim: int = 128, tied: bool = False
) -> Shape:
    return (hidden, layers, heads, 8, head_dim, tied, 128256, width, 0, 0, 0, 0, 0, 1, "none")


def _qwen(hidden: int, layers: int, heads: int, width: int, *, tied: bool = False) -> Shape:
    return (hidden, layers, heads, 8, 128, tied, 151936, width, 0, 0, 0, 0, 0, 1, "head")


FLAVORS: Mapping[Shape, Flavor] = {
    _llama(2048, 16, 32, 8192, head_dim=64, tied=True): _llama3(flavor="1B", versions=("0.3",)),
    _llama(3072, 28, 24, 8192, tied=True): _llama3(flavor="3B", versions=("0.3",)),
    _llama(4096, 32, 32, 14336): _llama3(flavor="8B", config="llama3_8b"),
    _llama(8192, 80, 64, 28672): _llama3(flavor="70B", config="llama3_70b"),
    _llama(16384, 126, 128, 53248): _llama3(flavor="405B"),
    _qwen(1024, 28, 16, 3072, tied=True): _qwen3(flavor="0.6B", config="qwen3_0_6b"),
    _qwen(2048, 28, 16, 6144, tied=True): _qwen3(flavor="1.7B", config="qwen3_1_7b"),
    _qwen(2560, 36, 32, 9728, tied=True): _qwen3(flavor="4B"),
    _qwen(4096, 36, 32, 12288): _qwen3(flavor="8B"),
    _qwen(5120, 40, 40, 17408): _qwen3(flavor="14B", config="qwen3_14b"),
    _qwen(5120, 64, 64, 25600): _qwen3(flavor="32B", config="qwen3_32b"),
    (2048, 48, 32, 4, 128, False, 151936, 0, 128, 8, 768, 0, 0, 1, "head"): _qwen3(
        flavor="30B-A3B", config="qwen3_30b_a3b", facts=_QWEN3_MOE
    ),
    (4096, 94, 64, 4, 128, False, 151936, 0, 128, 8, 1536, 0, 0, 1, "head"): _qwen3(
        flavor="235B-A22B", facts={**_QWEN3_MOE, "rope_theta": 5e6}
    ),
    (2048, 27, 16, 0, 192, False, 102400, 10944, 64, 6, 1408, 2816, 1, 1, "none"): _deepseek(
        flavor="16B", config="deepseek_v3_16b", facts={**_DEEPSEEK, "rope_scaling": _yarn(0.70)}
    ),
    (5120, 60, 128, 0, 192, False, 102400, 12288, 160, 6, 1536, 3072, 1, 1, "none"): _deepseek(
        flavor="236B",
        facts={**_DEEPSEEK, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    ),
    (7168, 61, 128, 0, 192, False, 129280, 18432, 256, 8, 2048, 2048, 3, 1, "none"): _deepseek(
        flavor="671B", config="deepseek_v3_671b", facts=_DEEPSEEK_671B
    ),
    (5120, 48, 40, 8, 128, False, 202048, 0, 16, 1, 8192, 8192, 0, 1, "none"): _llama4(
        flavor="17bx16e",
        facts={**_LLAMA4, "rope_scaling": _stretched(16.0, 1.0)},
        long_context="17bx16e_irope",
    ),
    (5120, 48, 40, 8, 128, False, 202048, 16384, 128, 1, 8192, 8192, 0, 2, "none"): _llama4(
        flavor="17bx128e", facts={**_LLAMA4, "rope_scaling": None}, long_context="17bx128e_irope"
    ),
    (2880, 24, 64, 8, 64, False, 201088, 0, 32, 4, 2880, 0, 0, 1, "none"): _gpt_oss(
        flavor="20b", config="gpt_oss_20b"
    ),
    (2880, 36, 64, 8, 64, False, 201088, 0, 128, 4, 2880, 0, 0, 1, "none"): _gpt_oss(
        flavor="120b", config="gpt_oss_120b"
    ),
}

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
    has_dense = model.num_dense_layers > 0
    return (
        model.hidden_size,
        model.num_hidden_layers,
        model.num_attention_heads,
        0 if model.uses_mla else model.num_key_value_heads,
        model.qk_head_dim,
        model.tie_word_embeddings,
        model.vocab_size,
        model.intermediate_size if has_dense else 0,
        model.num_experts,
        model.num_experts_per_tok,
        model.moe_intermediate_size,
        model.shared_expert_intermediate_size,
        model.first_k_dense_replace,
        model.moe_layer_freq if model.is_moe else 1,
        model.qk_norm,
    )


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
