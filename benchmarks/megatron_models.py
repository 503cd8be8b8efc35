"""Builds every model that we export to Megatron-LM with the real megatron-core, weights counted.

    python benchmarks/megatron_models.py                    every model of the catalogue
    python benchmarks/megatron_models.py llama3-8b gpt2     these models alone, also as JSON
    python benchmarks/megatron_models.py --arguments        JSON lines of arguments, from stdin

The arguments of an export become a TransformerConfig, whose `__post_init__` judges them, and a
GPTModel of Megatron-core's own modules on the meta device (no memory). `equal` is the same number
of weights to the last one, `WRONG` a bug, `refused` one that the export refuses, with its reason.
With `--arguments` each line is judged and answered with its layers of each stage.
Needs megatron-core 0.16 and torch: `PYTHONPATH=.venv/megatron`, which `make test-slow` sets up.
"""

import copy
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core import utils as megatron_utils
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models import backends
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.catalog.megatron_arguments import argument
from planner.export import export
from planner.export.commands import read_flags
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.trainers.registry import resolve_layout

RELEASE = "0.16"
ENGINE = "2.10"  # Transformer Engine beside it, by megatron-core's own requirements
# Arguments whose field of TransformerConfig has another name; `not` is before one they switch off.
# Source: core 0.16 megatron/training/arguments.py (dest, core_transformer_config_from_args).
FIELDS = {
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "disable_bias_linear": "not add_bias_linear",
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "fp8_param_gather": "fp8_param",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "no_overlap_p2p_communication": "not overlap_p2p_comm",
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
# Defaults of the parser that are not TransformerConfig's, and what pretrain_gpt.py sets.
DEFAULTS = {
    "normalization": "LayerNorm", "attention_softmax_in_fp32": False, "overlap_p2p_comm": True,
    "q_lora_rank": None, "kv_lora_rank": 32, "rotary_scaling_factor": 1.0,
    "multi_latent_attention": False, "cuda_graph_scope": [], "deallocate_pipeline_outputs": True,
    "perform_initialization": False,  # weights are counted, not drawn
}  # fmt: skip
EVALUATED = (
    "linear_attention_freq",
    "moe_layer_freq",
    "no_rope_freq",
    "window_attn_skip_freq",
    "window_size",
)
SINGLE = {"cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff"}  # a list of one
KINDS = {"int": int, "float": float, "-": str}
VIRTUAL, LAYOUT = "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"


class Norm(torch.nn.Module):
    """Apex's and Transformer Engine's norms as far as they have weights."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(hidden_size))


class Attention(torch.nn.Module):
    """Transformer Engine's attention as far as it has weights: its sinks."""

    def __init__(self, config: Any, *_: object, **__: object) -> None:
        super().__init__()
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(config.num_attention_heads))


def one_of(build: Any) -> Any:
    """Builds one of a layer's experts, which are all alike, and notes how many others there are."""

    def build_one(experts: Any, number: int, *given: Any, **more: Any) -> None:
        build(experts, 1, *given, **more)
        experts.others = number - 1

    return build_one


def prepare() -> None:
    """Stands in for kernels that need a GPU, and for the processes of a run."""
    backends.WrappedTorchNorm = backends.LNImpl = gpt_layer_specs.LNImpl = Norm
    grouped_gemm_util.grouped_gemm = SimpleNamespace(ops=None)
    backends.DotProductAttention = Attention
    SequentialMLP.__init__ = one_of(SequentialMLP.__init__)
    multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = type(None)
    gated_delta_net.HAVE_FLA = True
    megatron_utils._te_version = Version(ENGINE)
    torch.cuda.current_device = lambda: "meta"
    torch.cuda.Stream = SimpleNamespace
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Values of arguments as Megatron's parser makes them, by names of its TransformerConfig."""
    found: dict[str, Any] = {}
    for flag, words in read_flags(arguments).items():
        name, row = flag.removeprefix("--").replace("-", "_"), argument(flag, RELEASE)
        if row is None:
            raise ValueError(f"{flag} is no argument of {RELEASE}")
        values = [eval(word) if name in EVALUATED else KINDS[row.kind](word) for word in words]
        field = FIELDS.get(name, name)
        off = field.startswith("not ")
        value = values if row.values not in ("0", "1") else values[0] if values else not off
        found[field.removeprefix("not ")] = value
    return found


def config_of(values: Mapping[str, Any]) -> Any:
    """The TransformerConfig of arguments; what Megatron asserts of it raises.

    Source: core 0.16 megatron/training/arguments.py (validate_args,
    core_transformer_config_from_args).
    """
    kind = MLATransformerConfig if "multi_latent_attention" in values else TransformerConfig
    dtype = torch.bfloat16 if "bf16" in values else torch.half if "fp16" in values else torch.float
    fields = {**DEFAULTS, "params_dtype": dtype, "pipeline_dtype": dtype, **values}
    fields["attention_backend"] = AttnBackend[values["attention_backend"]]
    fields["batch_p2p_comm"] = not fields["overlap_p2p_comm"]
    if "swiglu" in values:
        fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    elif "quick_geglu" in values:
        fields |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    elif "squared_relu" in values:
        fields["activation_func"] = squared_relu
    for name in SINGLE & values.keys():
        fields[name] = values[name][0] if len(values[name]) == 1 else values[name]
    if LAYOUT in values:
        count = PipelineParallelLayerLayout.get_num_stages_from_str(values[LAYOUT])
        stages = count // values["pipeline_model_parallel_size"]
        fields[VIRTUAL] = stages if stages > 1 else None
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})


def stages(values: Mapping[str, Any]) -> list[int]:
    """Layers of each pipeline stage, in the order of the layers."""
    config, found = config_of(values), []
    parallel_state.set_virtual_pipeline_model_parallel_world_size(getattr(config, VIRTUAL))
    for virtual in range(getattr(config, VIRTUAL) or 1):
        stage = virtual if getattr(config, VIRTUAL) else None
        for rank in range(config.pipeline_model_parallel_size):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            found.append(get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank))
    return found


def mixed(layer: Any) -> Any:
    """A layer whose attention is a gated DeltaNet, of Megatron-core's own modules."""
    other = copy.deepcopy(layer)
    other.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
        ),
    )
    return other


def weights(values: Mapping[str, Any]) -> int:
    """Weights of the GPTModel that pretrain_gpt.py builds, on the meta device."""
    if "disable_bias_linear" not in values:  # its experts without Transformer Engine have none
        values = {name: one for name, one in values.items() if name != "moe_grouped_gemm"}
    config = config_of(values)
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    if config.experimental_attention_variant == "gated_delta_net":
        layers.layer_specs = [
            mixed(layer) if linear else layer
            for layer, linear in zip(
                layers.layer_specs, get_linear_attention_pattern(config), strict=True
            )
        ]
    mtp = config.mtp_num_layers and gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=False
    )
    with torch.device("meta"):
        built = GPTModel(
            config,
            layers,
            mtp_block_spec=mtp or None,
            vocab_size=values["vocab_size"] + 1,  # NullTokenizer's end of a document, up to 0.17
            max_sequence_length=values["max_position_embeddings"],
            share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in values,
            position_embedding_type=values["position_embedding_type"],
        )
    counted = [*built.parameters()]
    for layer in built.modules():
        if isinstance(layer, SequentialMLP):
            counted += layer.others * [*layer.parameters()]
    counted += [one for name, one in built.named_buffers() if name.endswith("expert_bias")]
    return sum(one.numel() for one in counted)


def judge(name: str) -> tuple[str, str]:
    """(verdict, detail) of a model, with the layout of a single rank."""
    model = read_model(json.loads(name) if name.startswith("{") else name)
    training = read_training({"seq_len": 1024, "global_batch_size": 8, "trainer": "megatron"})
    layout = resolve_layout({}, trainer="megatron", num_gpus=1)
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 1})
    made = export(layout, model, cluster, training, to="megatron", version=RELEASE)
    if made.blockers:
        return "refused", "; ".join(one.rule for one in made.blockers)
    try:
        built, ours = weights(parsed(made.arguments)), model.total_parameters()
    except Exception as error:  # whatever Megatron raises is its refusal
        return "WRONG", f"Megatron refuses it: {type(error).__name__}: {error}"
    if built == ours:
        return "equal", f"{ours:,}"
    return "WRONG", f"{ours:,} read, {built:,} built ({ours - built:+,})"


def judge_arguments() -> None:
    """Answers each line of arguments: the layers of its stages, or what Megatron refuses."""
    for line in sys.stdin:
        try:
            print(json.dumps(stages(parsed(json.loads(line)))), flush=True)
        except Exception as error:  # as above
            print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)


def main() -> int:
    """Prints the table; 1 where a model is built otherwise than we count it."""
    prepare()
    if sys.argv[1:] == ["--arguments"]:
        judge_arguments()
        return 0
    folder = files("planner").joinpath("catalog/models")
    names = sorted(one.name.removesuffix(".yaml") for one in folder.iterdir())
    counts: Counter[str] = Counter()
    for name in sys.argv[1:] or names:
        verdict, detail = judge(name)
        counts[verdict] += 1
        print(f"{verdict:8} {name:20} {detail}"[:160], flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
