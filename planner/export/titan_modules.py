"""Python modules an export carries where TorchTitan's own tables and flags do not reach: model shapes, dtypes, converters.

Sources: torchtitan 0.2.2 protocols/train_spec.py (register_train_spec), models/*/model/args.py, config/manager.py
(job.custom_config_module); 0.3.0 config/manager.py (--module), models/*/__init__.py, components/quantization.
"""

from collections.abc import Sequence

from planner.specs.model import ModelSpec
from planner.specs.titan_models import class_for

MODEL_MODULE, CONFIG_MODULE, JOB_MODULE = "planner_model", "planner_config", "planner_job"
ROPE_THETA = 500_000.0

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
'''

_ARGS_CLASS = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs", "deepseek_v3": "DeepSeekV3ModelArgs"}
_TABLE_02 = {"llama3": "llama3_args", "qwen3": "qwen3_args", "deepseek_v3": "deepseekv3_args"}


def _lines(arguments: Sequence[tuple[str, object]], indent: int) -> str:
    return "\n".join(f"{' ' * indent}{name}={value!r}," for name, value in arguments)


def _moe_args(model: ModelSpec) -> str:
    shared = model.shared_expert_intermediate_size // model.moe_intermediate_size
    score = "sigmoid" if model.router_correction_bias else "softmax"
    pairs = (
        ("num_experts", model.num_experts), ("num_shared_experts", shared), ("top_k", model.num_experts_per_tok), ("score_func", score),
        ("route_norm", True), ("score_before_experts", False),
    )  # fmt: skip
    return f"    moe_args=MoEArgs(\n{_lines(pairs, 8)}\n    ),\n"


def _shape_args(model: ModelSpec) -> list[tuple[str, object]]:
    """Constructor arguments of the 0.2 model class."""
    kind = class_for(model)
    pairs: list[tuple[str, object]] = [
        ("dim", model.hidden_size), ("n_layers", model.num_hidden_layers), ("n_heads", model.num_attention_heads),
        ("vocab_size", model.vocab_size), ("rope_theta", ROPE_THETA),
    ]  # fmt: skip
    if kind == "deepseek_v3":
        return [
            *pairs, ("inter_dim", model.intermediate_size or model.moe_intermediate_size), ("moe_inter_dim", model.moe_intermediate_size),
            ("n_dense_layers", model.first_k_dense_replace), ("q_lora_rank", model.q_lora_rank), ("kv_lora_rank", model.kv_lora_rank),
            ("qk_nope_head_dim", model.qk_nope_head_dim), ("qk_rope_head_dim", model.qk_rope_head_dim), ("v_head_dim", model.v_head_dim),
        ]  # fmt: skip
    pairs.append(("n_kv_heads", model.num_key_value_heads))
    if kind == "llama3":  # its width is int(multiplier * int(8 dim / 3)) rounded up to multiple_of: one short of the wanted width
        multiplier = (model.intermediate_size - 0.5) / int(2 * 4 * model.hidden_size / 3)
        return [*pairs, ("ffn_dim_multiplier", multiplier), ("multiple_of", model.intermediate_size)]
    pairs += [
        ("head_dim", model.head_dim), ("hidden_dim", model.intermediate_size or model.moe_intermediate_size),
        ("qk_norm", model.qk_norm == "head"), ("enable_weight_tying", model.tie_word_embeddings), ("moe_enabled", model.is_moe),
    ]  # fmt: skip
    return [*pairs, ("moe_inter_dim", model.moe_intermediate_size)] if model.is_moe else pairs


def register_02(model: ModelSpec, name: str) -> str:
    """Module for experimental.custom_import that registers the shapes as model `planner_model`, flavour `custom`."""
    kind = class_for(model)
    moe = "from torchtitan.models.moe import MoEArgs\n" if model.is_moe else ""
    return f'''"""{name} for TorchTitan 0.2: registers its shapes as model {MODEL_MODULE}, flavour custom."""

from dataclasses import replace

from torchtitan.models.{kind} import {_ARGS_CLASS[kind]}, get_train_spec
{moe}from torchtitan.protocols.train_spec import register_train_spec

ARGS = {_ARGS_CLASS[kind]}(
{_lines(_shape_args(model), 4)}
{_moe_args(model) if model.is_moe else ""})

register_train_spec("{MODEL_MODULE}", replace(get_train_spec(), model_args={{"custom": ARGS}}))
'''


def plain_attention_02(module: str, flavor: str) -> str:
    """Module for experimental.custom_import: a shipped flavour with SDPA instead of FlexAttention, which excludes CP."""
    return f'''"""TorchTitan 0.2's {module} {flavor} with SDPA: context parallelism refuses its FlexAttention."""

from dataclasses import replace

from torchtitan.models.{module} import {_TABLE_02[module]}, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

ARGS = replace({_TABLE_02[module]}["{flavor}"], attn_type="sdpa", attn_mask_type="causal")

register_train_spec("{MODEL_MODULE}", replace(get_train_spec(), model_args={{"custom": ARGS}}))
'''


_CONFIG_03 = {"llama3": "Llama3Model", "qwen3": "Qwen3Model", "deepseek_v3": "DeepSeekV3Model"}
_ROPE_03 = {"llama3": "ComplexRoPE", "qwen3": "CosSinRoPE", "deepseek_v3": "ComplexRoPE"}
_TABLE_03 = {"llama3": "llama3_configs", "qwen3": "qwen3_configs", "deepseek_v3": "deepseekv3_configs"}
_NORM_03 = {"qwen3": "family._qwen3_norm({dim})"}
_HEAD_INIT_03 = {"qwen3": "family._LINEAR_INIT"}


def _layer_args_03(model: ModelSpec, kind: str) -> tuple[str, list[tuple[str, object]]]:
    """Builder of the family's layers in 0.3, and the arguments that describe shapes."""
    pairs: list[tuple[str, object]] = [
        ("n_layers", model.num_hidden_layers), ("dim", model.hidden_size), ("n_heads", model.num_attention_heads),
    ]  # fmt: skip
    if kind == "deepseek_v3":
        shared = model.shared_expert_intermediate_size // model.moe_intermediate_size
        return "_build_dsv3_layers", [
            *pairs, ("n_dense_layers", model.first_k_dense_replace), ("q_lora_rank", model.q_lora_rank),
            ("kv_lora_rank", model.kv_lora_rank), ("qk_nope_head_dim", model.qk_nope_head_dim),
            ("qk_rope_head_dim", model.qk_rope_head_dim), ("v_head_dim", model.v_head_dim), ("mscale", 1.0),
            ("dense_hidden_dim", model.intermediate_size or model.moe_intermediate_size),
            ("moe_hidden_dim", model.moe_intermediate_size), ("num_experts", model.num_experts), ("num_shared_experts", shared),
            ("router_top_k", model.num_experts_per_tok), ("router_route_norm", True),
            ("router_score_func", "sigmoid" if model.router_correction_bias else "softmax"), ("non_blocking_capacity_factor", None),
        ]  # fmt: skip
    pairs.append(("n_kv_heads", model.num_key_value_heads))
    if kind == "llama3":
        return "_build_llama3_layers", [*pairs, ("hidden_dim", model.intermediate_size)]
    pairs.append(("head_dim", model.head_dim))
    if not model.is_moe:
        return "_build_qwen3_layers", [*pairs, ("hidden_dim", model.intermediate_size)]
    moe = [("moe_hidden_dim", model.moe_intermediate_size), ("num_experts", model.num_experts), ("top_k", model.num_experts_per_tok)]
    return "_build_qwen3_moe_layers", [*pairs, *moe]


def model_03(model: ModelSpec) -> tuple[str, str]:
    """(family, source of a function `custom_model` and its registration) for shapes that 0.3 does not ship."""
    kind = class_for(model)
    builder, pairs = _layer_args_03(model, kind)
    dim, vocab = model.hidden_size, model.vocab_size
    norm = _NORM_03.get(kind, "RMSNorm.Config(normalized_shape={dim}, param_init=family._NORM_INIT)").format(dim=dim)
    head_init = _HEAD_INIT_03.get(kind, f"family._output_linear_init({dim})")
    embedding_init = "family._EMBEDDING_SKIP_INIT" if model.tie_word_embeddings else "family._EMBEDDING_INIT"
    rotary = model.qk_rope_head_dim if model.uses_mla else model.head_dim
    moe = ", moe_comm_backend=moe_comm_backend" if model.is_moe else ""
    return kind, f'''
def custom_model(attn_backend, moe_comm_backend="standard", **kwargs):
    """The shapes, in the form of the tables in torchtitan/models/{kind}/__init__.py."""
    return family.{_CONFIG_03[kind]}.Config(
        dim={dim},
        vocab_size={vocab},
        enable_weight_tying={model.tie_word_embeddings},
        tok_embeddings=Embedding.Config(num_embeddings={vocab}, embedding_dim={dim}, param_init={embedding_init}),
        norm={norm},
        lm_head=Linear.Config(in_features={dim}, out_features={vocab}, param_init={head_init}),
        layers=family.{builder}(
{_lines(pairs, 12)}
            rope={_ROPE_03[kind]}.Config(dim={rotary}, max_seq_len=131072, theta={ROPE_THETA}),
            attn_backend=attn_backend{moe},
        ),
    )


family.{_TABLE_03[kind]}["custom"] = custom_model
'''


_WIDER_REDUCE_03 = '''
@dataclass(kw_only=True, slots=True)
class Training(TrainingConfig):
    """Also reduces gradients in bfloat16: the field's own type accepts float32 alone, FSDP takes both."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"

'''


def job_03(name: str, family: str, flavor: str, converters: Sequence[str], custom: str, *, wide_reduce: bool) -> str:
    """Module for `--module planner_job --config planner_job`; everything a flag can say is left to the flags."""
    names = sorted({converter.partition(".")[0] for converter in converters})
    quantization = f"from torchtitan.components.quantization import {', '.join(names)}\n" if names else ""
    if any("nvfp4_bf16_tail_fqns(" in converter for converter in converters):
        quantization += "from torchtitan.components.quantization.nvfp4 import nvfp4_bf16_tail_fqns\n"
    widths = "from dataclasses import dataclass\nfrom typing import Literal\n\n" if wide_reduce else ""
    layers = f"from torchtitan.models.common import {_ROPE_03[family]}, Embedding, Linear\n" if custom else ""
    norm = "from torchtitan.models.common.nn_modules import RMSNorm\n" if "RMSNorm" in custom else ""
    training = "Training()" if wide_reduce else "TrainingConfig()"
    listed = "".join(f"\n            {converter}," for converter in converters)
    return f'''"""{name} for TorchTitan 0.3: what the command line cannot say. The flags beside it say the rest."""

{widths}from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
{quantization}from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import {family} as family
{layers}{norm}from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

{_WIDER_REDUCE_03 if wide_reduce else ""}{custom}
def {JOB_MODULE}() -> Trainer.Config:
    """The job; choose learning rate, data set and tokenizer here."""
    model_spec = family.model_registry(
        "{flavor}",
        converters=[{listed}{chr(10) + " " * 8 if listed else ""}],
    )
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))),
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        training={training},
    )
'''
