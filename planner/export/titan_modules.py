"""Python modules of an export, for what TorchTitan's tables and flags cannot express.

They set model shapes, dtypes and converters.
Sources: torchtitan 0.2.2 protocols/train_spec.py (register_train_spec), models/*/model/args.py,
    config/manager.py (job.custom_config_module); 0.3.0 config/manager.py (--module),
    models/*/__init__.py, components/quantization.
"""

from collections.abc import Collection, Mapping, Sequence

from planner.export.base import imports_for
from planner.export.titan_network import (
    UNKNOWN_THETA,
    Pairs,
    adjusted_03,
    divides_scores,
    model_args_02,
    moe_args_02,
    own_rope_02,
    rope_class_02,
    scores,
)
from planner.specs.model import ModelSpec
from planner.trainers.titan_models import Flavor, class_for
from planner.trainers.titan_networks import ARGUMENTS, softmax_mscale

# written in the first line of a module that replaces FlexAttention
REPLACES_FLEX = "with SDPA, since context parallelism refuses FlexAttention"
MODEL_MODULE, CONFIG_MODULE, JOB_MODULE = "planner_model", "planner_config", "planner_job"

WIDER_REDUCE_02 = '''"""Lets TorchTitan 0.2 reduce gradients in bfloat16: its own config accepts float32 alone, its FSDP takes both."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Training:
    """The one field of torchtitan.config.job_config.Training that is widened; ConfigManager merges the rest."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"


@dataclass
class JobConfig:
    """What --job.custom_config_module looks for."""

    training: Training = field(default_factory=Training)
'''  # noqa: E501

_ARGS_CLASS = {
    "llama3": "TransformerModelArgs",
    "qwen3": "Qwen3ModelArgs",
    "deepseek_v3": "DeepSeekV3ModelArgs",
}
_TABLE_02 = {
    "llama3": "llama3_args", "qwen3": "qwen3_args", "deepseek_v3": "deepseekv3_args", "llama4":
    "llama4_args", "gpt_oss": "gptoss_configs",
}  # fmt: skip


def _lines(arguments: Sequence[tuple[str, object]], indent: int) -> str:
    return "\n".join(f"{' ' * indent}{name}={value!r}," for name, value in arguments)


def _pairs(model: ModelSpec, names: str, **own: object) -> Pairs:
    """Arguments for shapes, by TorchTitan's names: those given, else the model's fields."""
    return [
        (name, own[name] if name in own else getattr(model, ARGUMENTS[name]))
        for name in names.split()
    ]


def _shared(model: ModelSpec) -> int:
    """Shared experts as wide as a routed one."""
    return model.shared_expert_intermediate_size // model.moe_intermediate_size


def _moe_args(model: ModelSpec) -> str:
    names = "num_experts num_shared_experts top_k"
    pairs = _pairs(model, names, num_shared_experts=_shared(model)) + moe_args_02(model)
    return f"    moe_args=MoEArgs(\n{_lines(pairs, 8)}\n    ),\n"


_LATENT = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"


def _shape_args(model: ModelSpec) -> Pairs:
    kind, wide = class_for(model), model.intermediate_size or model.moe_intermediate_size
    pairs = _pairs(model, "dim n_layers n_heads vocab_size") + model_args_02(model, kind)
    if kind == "deepseek_v3":
        names = f"inter_dim moe_inter_dim n_dense_layers {_LATENT}"
        return pairs + _pairs(model, names, inter_dim=wide)
    pairs += _pairs(model, "n_kv_heads")
    # TorchTitan's width is int(multiplier * int(8 dim / 3)), rounded up to a multiple of
    # multiple_of. This multiplier gives one less than the wanted width, which is multiple_of.
    if kind == "llama3":
        multiplier = (model.intermediate_size - 0.5) / int(2 * 4 * model.hidden_size / 3)
        return [
            *pairs,
            ("ffn_dim_multiplier", multiplier),
            ("multiple_of", model.intermediate_size),
        ]
    names = "head_dim hidden_dim qk_norm enable_weight_tying moe_enabled"
    normed, moe = model.qk_norm == "head", model.is_moe
    pairs += _pairs(model, names, hidden_dim=wide, qk_norm=normed, moe_enabled=moe)
    return pairs + _pairs(model, "moe_inter_dim" * moe)


def register_02(model: ModelSpec, name: str) -> str:
    """Module for experimental.custom_import that registers the shapes.

    They become flavour `custom` of model `planner_model`.
    """
    kind, own = class_for(model), ""
    names = [_ARGS_CLASS[kind]]
    if model.rope_scaling is not None and own_rope_02(model, kind):
        own = rope_class_02(model.rope_scaling, kind)
        names.append({"llama3": "Transformer", "qwen3": "Qwen3Model"}[kind])
    routed = _moe_args(model) if model.is_moe else ""
    arguments = f"{_ARGS_CLASS[kind]}(\n{_lines(_shape_args(model), 4)}\n{routed})"
    says = f"registers its shapes as model {MODEL_MODULE}, flavour custom"
    return _registering(name, says, kind, names, arguments, own)


def changed_flavor_02(
    model: ModelSpec,
    name: str,
    flavor: Flavor,
    fields: Collection[str],
    version: str,
    *,
    plain_attention: bool,
) -> str:
    """Module for experimental.custom_import: a shipped flavour with the model's own numbers.

    fields: the numbers that differ.
    plain_attention: whether SDPA replaces FlexAttention, which excludes CP.
    """
    module, table = flavor.module, _TABLE_02[flavor.module]
    shipped = f'{table}["{flavor.flavor}"]'
    pairs = model_args_02(model, module, fields)
    if "num_hidden_layers" in fields:
        pairs.append(("n_layers", model.num_hidden_layers))
    moe = moe_args_02(model, fields) if model.is_moe else []
    if plain_attention:
        pairs += [("use_flex_attn", False)] if version == "0.2.0" else [("attn_type", "sdpa")]
        pairs.append(("attn_mask_type", "causal"))
    routed = f"    moe_args=replace(\n        {shipped}.moe_args,\n{_lines(moe, 8)}\n    ),\n"
    why = [REPLACES_FLEX] * plain_attention
    why += ["with the numbers of the model's own config.json"] * bool(fields)
    says = f"its {module} {flavor.flavor}, {' and '.join(why)}"
    arguments = f"replace(\n    {shipped},\n{_lines(pairs, 4)}\n{routed if moe else ''})"
    return _registering(name, says, module, [table], arguments)


def _registering(
    name: str, says: str, module: str, names: Sequence[str], arguments: str, own: str = ""
) -> str:
    """A module that registers a model of 0.2 with these arguments.

    names: what it imports from TorchTitan's module.
    own: source of a class `ScaledModel` that stands in for TorchTitan's.
    """
    math, torch = "import math\n" * ("math." in own), "import torch\n" * bool(own)
    replaced = ", model_cls=ScaledModel" * bool(own)
    modules = {
        **dict.fromkeys([*names, "get_train_spec"], f"torchtitan.models.{module}"),
        "RoPEScalingArgs": f"torchtitan.models.{module}.model.args",
        "MoEArgs": "torchtitan.models.moe",
    }
    return f'''"""{name} for TorchTitan 0.2: {says}."""

{math}from dataclasses import replace

{torch}{imports_for(f"get_train_spec {own} {arguments}", modules)}from torchtitan.protocols.train_spec import register_train_spec

{own}{chr(10) * bool(own)}ARGS = {arguments}

register_train_spec("{MODEL_MODULE}", replace(get_train_spec(), model_args={{"custom": ARGS}}{replaced}))
'''  # noqa: E501


_CONFIG_03 = {"llama3": "Llama3Model", "qwen3": "Qwen3Model", "deepseek_v3": "DeepSeekV3Model"}
_ROPE_03 = {"llama3": "ComplexRoPE", "qwen3": "CosSinRoPE", "deepseek_v3": "ComplexRoPE"}
_TABLE_03 = {
    "llama3": "llama3_configs",
    "qwen3": "qwen3_configs",
    "deepseek_v3": "deepseekv3_configs",
    "gpt_oss": "gptoss_configs",
}
_NORM_03 = {"qwen3": "family._qwen3_norm({dim})"}
_HEAD_INIT_03 = {"qwen3": "family._LINEAR_INIT"}


def _layer_args_03(model: ModelSpec, kind: str) -> tuple[str, Pairs]:
    """(0.3's function that builds the family's layers, its arguments for shapes)."""
    names = "n_layers dim n_heads"
    if kind == "deepseek_v3":
        names += (
            f" n_dense_layers {_LATENT} mscale dense_hidden_dim moe_hidden_dim num_experts "
            "num_shared_experts router_top_k router_route_norm router_score_func "
            "non_blocking_capacity_factor"
        )
        scaling = model.rope_scaling
        return "_build_dsv3_layers", _pairs(
            model,
            names,
            mscale=1.0 if scaling is None else softmax_mscale(scaling),
            dense_hidden_dim=model.intermediate_size or model.moe_intermediate_size,
            num_shared_experts=_shared(model),
            router_route_norm=divides_scores(model),
            router_score_func=scores(model),
            non_blocking_capacity_factor=None,
        )
    if kind == "llama3":
        return "_build_llama3_layers", _pairs(model, f"{names} n_kv_heads hidden_dim")
    names += " n_kv_heads head_dim"
    if not model.is_moe:
        return "_build_qwen3_layers", _pairs(model, f"{names} hidden_dim")
    return "_build_qwen3_moe_layers", _pairs(model, f"{names} moe_hidden_dim num_experts top_k")


def model_03(model: ModelSpec) -> tuple[str, str]:
    """(family, source of a function `custom_model` with its registration) for shapes not in 0.3."""
    kind = class_for(model)
    builder, pairs = _layer_args_03(model, kind)
    dim, vocab = model.hidden_size, model.vocab_size
    norm = _NORM_03.get(
        kind, "RMSNorm.Config(normalized_shape={dim}, param_init=family._NORM_INIT)"
    ).format(dim=dim)
    head_init = _HEAD_INIT_03.get(kind, f"family._output_linear_init({dim})")
    embedding_init = (
        "family._EMBEDDING_SKIP_INIT" if model.tie_word_embeddings else "family._EMBEDDING_INIT"
    )
    rotary = model.qk_rope_head_dim if model.uses_mla else model.head_dim
    moe = ", moe_comm_backend=moe_comm_backend" if model.is_moe else ""
    return (
        kind,
        f'''{adjusted_03(model, kind)}
def custom_model(attn_backend, moe_comm_backend="standard", **kwargs):
    """The shapes, in the form of the tables in torchtitan/models/{kind}/__init__.py."""
    config = family.{_CONFIG_03[kind]}.Config(
        dim={dim},
        vocab_size={vocab},
        enable_weight_tying={model.tie_word_embeddings},
        tok_embeddings=Embedding.Config(num_embeddings={vocab}, embedding_dim={dim}, param_init={embedding_init}),
        norm={norm},
        lm_head=Linear.Config(in_features={dim}, out_features={vocab}, param_init={head_init}),
        layers=family.{builder}(
{_lines(pairs, 12)}
            rope={_ROPE_03[kind]}.Config(dim={rotary}, max_seq_len=131072, theta={model.rope_theta or UNKNOWN_THETA}),
            attn_backend=attn_backend{moe},
        ),
    )
    return adjusted(config)


family.{_TABLE_03[kind]}["custom"] = custom_model
''',  # noqa: E501
    )


def changed_flavor_03(model: ModelSpec, flavor: Flavor, fields: Collection[str]) -> str:
    """Source that registers a shipped flavour, with the model's own numbers, as `custom`.

    fields: the numbers that differ.
    """
    table = f"family.{_TABLE_03[flavor.module]}"
    return f'''{adjusted_03(model, flavor.module, fields)}
def custom_model(**kwargs):
    """TorchTitan's {flavor.flavor} with the numbers of the model's own config.json."""
    return adjusted({table}["{flavor.flavor}"](**kwargs))


{table}["custom"] = custom_model
'''


_WIDER_REDUCE_03 = '''
@dataclass(kw_only=True, slots=True)
class Training(TrainingConfig):
    """Also reduces gradients in bfloat16: the field's own type accepts float32 alone, FSDP takes both."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"

'''  # noqa: E501


# name in a module for 0.3 -> where TorchTitan has it
_MODULES_03 = {
    **dict.fromkeys(("ChunkedLossWrapper", "CrossEntropyLoss"), "torchtitan.components.loss"),
    "default_adamw": "torchtitan.components.optimizer",
    "nvfp4_bf16_tail_fqns": "torchtitan.components.quantization.nvfp4",
    "TrainingConfig": "torchtitan.config",
    "HuggingFaceTextDataLoader": "torchtitan.hf_datasets.text_datasets",
    **dict.fromkeys(("ComplexRoPE", "CosSinRoPE", "Embedding", "Linear"),
                    "torchtitan.models.common"),
    "decoder_vocab_size": "torchtitan.models.common.config_utils",
    "TokenChoiceTopKRouter": "torchtitan.models.common.moe",
    "RMSNorm": "torchtitan.models.common.nn_modules",
    "RoPE": "torchtitan.models.common.rope",
    "Attention": "torchtitan.models.deepseek_v3.model",
    "Trainer": "torchtitan.trainer",
}  # fmt: skip


def job_03(
    name: str,
    family: str,
    flavor: str,
    converters: Sequence[str],
    custom: str,
    *,
    wide_reduce: bool,
    chunked_loss: bool,
    backends: Mapping[str, object],
) -> str:
    """Module for `--module planner_job --config planner_job`.

    It leaves everything that a flag can set to the flags.
    backends: further arguments of the family's `model_registry`.
    """
    training = "Training()" if wide_reduce else "TrainingConfig()"
    listed = "".join(f"\n            {converter}," for converter in converters)
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    if chunked_loss:
        loss = f"ChunkedLossWrapper.Config(loss_fn={loss})"
    more = "".join(f"\n        {name}={value!r}," for name, value in backends.items())
    body = f'''{_WIDER_REDUCE_03 if wide_reduce else ""}{custom}
def {JOB_MODULE}() -> Trainer.Config:
    """The job; choose learning rate, data set and tokenizer here."""
    model_spec = family.model_registry(
        "{flavor}",{more}
        converters=[{listed}{chr(10) + " " * 8 if listed else ""}],
    )
    return Trainer.Config(
        loss={loss},
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        training={training},
    )
'''
    own = {one.partition(".")[0]: "torchtitan.components.quantization" for one in converters}
    imports = (
        imports_for(body, _MODULES_03 | own) + f"from torchtitan.models import {family} as family\n"
    )
    widths = "from dataclasses import dataclass\nfrom typing import Literal\n\n" * wide_reduce
    return f'''"""{name} for TorchTitan 0.3: what the command line cannot say. The flags beside it say the rest."""

{widths}{"".join(sorted(imports.splitlines(keepends=True)))}
{body}'''  # noqa: E501
