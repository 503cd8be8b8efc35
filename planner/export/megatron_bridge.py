"""Megatron-Bridge: Megatron-LM's arguments as overrides of a recipe, and the way back.

Sources: Megatron-Bridge 0.2 to 0.6 docs/megatron-lm-to-megatron-bridge.md,
    src/megatron/bridge/training/config.py, mixed_precision.py, scripts/training/run_recipe.py.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.catalog.bridge_recipes import YOURS, PretrainRecipe, recipe_of
from planner.columns import LayoutBatch
from planner.cost.layer.quantisation import stored_low
from planner.export.base import Draft, Export
from planner.export.bridge_precision import MixedPrecision, mixed_precision
from planner.export.commands import Launch, plain_value
from planner.export.megatron import MUON
from planner.export.megatron import write as write_core
from planner.export.megatron_read import Words, exported_words
from planner.export.megatron_settings import CAPACITY, KEYS, PADDED, TAKEN_BACK
from planner.specs.model import ModelSpec
from planner.trainers.megatron_models import has_provider, is_hybrid, lacking
from planner.trainers.muon import BRIDGED
from planner.trainers.registry import TRAINERS, release_of, version_under
from planner.trainers.release import Release

Overrides = Mapping[str, object]
NAME, ROOT = "megatron-bridge", "MEGATRON_BRIDGE_PATH"
REDUCED = "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"
# comm_overlap of a recipe is None or a configuration, which overwrites model's and ddp's fields.
_OVERLAPS = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_grad_reduce",
             "overlap_param_gather")  # fmt: skip
_OVERLAP_CLASS = "megatron.bridge.training.comm_overlap.CommOverlapConfig"
# Number formats of the optimizer's states, which recipes/deepseek and recipes/nemotronh lower.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
# Lists in TransformerConfig, of one value too. cuda_graph_scope was a text up to core 0.15.
_LISTS = ("recompute_modules", "cuda_graph_modules", "cuda_graph_scope")
# Defaults of recipes that Megatron-LM's differ from: recipes/common.py, perf_recipes/_common.py.
RECIPE: Words = {
    "bf16": (), "tp_comm_overlap": (), "use_distributed_optimizer": (), "overlap_grad_reduce": (),
    "overlap_param_gather": (), REDUCED[1]: (), "cross_entropy_loss_fusion": (),
    "cross_entropy_fusion_impl": ("te",), "moe_token_dispatcher_type": ("alltoall",),
    "moe_grouped_gemm": (), "expert_tensor_parallel_size": ("1",), "micro_batch_size": ("1",),
}  # fmt: skip
# training/optim.py takes `dist_muon` alone for sharded states, and recipes/kimi switches these off
SHARDED = (
    "use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_param_gather",
)  # fmt: skip
FULL_ATTENTION = (
    "Megatron-Bridge attends to all keys where MiniMax M3's indexer chooses blocks, and is priced "
    "so; the indexer's weights stay as they are."
)
DEV_BRANCH = (
    "DeepSeek V4 needs Megatron-LM's dev branch: no release has its compressed attention, nor has "
    "the commit that Megatron-Bridge pins (scripts/switch_mcore.sh dev, or a container with it)."
)
LLAMA_MAIN = (
    "Megatron-Bridge's main branch (August 2026) keeps Llama's settings under model.transformer "
    "and refuses these; 0.6 takes them."
)
_PREDICTION = (
    "The recipe's multi-token prediction (mtp_num_layers {}) is switched off, as it was priced: "
    "set mtp_num_layers of the model to train it."
)
_PLAIN = re.compile(r"[\w.+-]+")


def recipe_for(model: str, release: Release) -> PretrainRecipe | None:
    """The recipe of a model in the release; None where it has none."""
    found = recipe_of(model)
    return found if found is not None and not release.before(found.since) else None


def write(draft: Draft) -> Export:
    """The layout as overrides of a recipe: a YAML file, and arguments of run_recipe.py.

    They are Megatron-LM's arguments for the megatron-core that the release rests on.
    """
    layout, model, training = draft.layout, draft.model, draft.training
    asked = draft.asked or version_under(training, NAME)
    release = release_of(NAME, asked)
    core = write_core(Draft(layout, model, draft.cluster, training, release.number))
    words = exported_words(core)
    if layout.virtual_stages > 1 and layout.pp > 1:
        words["num_virtual_stages_per_pipeline_rank"] = [str(layout.virtual_stages)]
    if layout.tp > 1 and layout.sequence_parallel and training.overlap.tp and not model.uses_mla:
        words["tp_comm_overlap"] = []
    if training.optimizer == "muon" and "muon_tp_mode" in words:
        words["muon_tp_mode"] = [str(training.muon_tp_mode or BRIDGED.tp_mode)]
        words["optimizer"] = [MUON[layout.zero_stage > 0]]
        for name in SHARDED:
            words.pop(name, None)
    if stored_low(LayoutBatch.from_layouts([layout]), TRAINERS[NAME].recipes(asked)).any():
        words["fp8_param_gather"] = []  # as presets have it, and as it was priced
    if "cross_entropy_fusion_impl" not in words:
        words["cross_entropy_fusion_impl"] = ["native"]
    precision = mixed_precision(words, gathers_fp4=not release.before("0.18"))
    found = overrides(words, precision, _LISTS[: 2 if release.before("0.16") else 3])
    found |= _taken_back(words, model, release)
    if release.before("0.19"):  # seq_length is a property of GPTDatasetConfig there, no field
        found["dataset.sequence_length"] = found.pop("dataset.seq_length")
    recipe = recipe_for(model.name, release)
    name = recipe.name if recipe else YOURS
    # a name or null first: it removes a recipe's own configuration
    first = {"mixed_precision": precision.preset, "comm_overlap": None}
    arguments = tuple(
        f"{key}={_spelled(one)}"
        for key, value in found.items()
        for one in (*([first[key]] if key in first and value != first[key] else []), value)
    )
    program = ("scripts/training/run_recipe.py", "--recipe", name)
    launch = Launch(draft, program, arguments, root_variable=ROOT)
    gaps = core.gaps
    if not lacking(model, release):
        gaps = tuple(
            gap for gap in gaps if not (gap.blocking and gap.fault.field.startswith("model"))
        )
    own = {rests: release for release, rests in TRAINERS[NAME].ships.items()}.get(core.version, "")
    predicts = recipe.predicts if recipe and not model.mtp_num_layers else 0
    notes = (
        f"Written for Megatron-Bridge {own} on megatron-core {core.version}, as overrides of the "
        f"recipe {name}: take your own recipe's name where it is another."
        if recipe
        else f"Megatron-Bridge {own} on megatron-core {core.version} has no recipe that pretrains "
        f"{model.name}: write one, and its name for {YOURS}.",
        *([_PREDICTION.format(predicts)] * (predicts > 0)),
        *([precision.note] if precision.fields else ()),
        f"Set {ROOT} to the root of Megatron-Bridge, or run launch.sh there.",
        *(FULL_ATTENTION,) * ("msa" in model.mixers),
        *(DEV_BRANCH,) * model.compresses,
        *(LLAMA_MAIN,) * (release.since("0.20") and name.startswith("llama")),
    )
    return replace(
        core,
        trainer=NAME,
        version=own or core.version,
        files={**launch.files(), "overrides.yaml": _yaml(found)},
        command=launch.command(),
        arguments=arguments,
        notes=notes,
        gaps=gaps,
    )


def _taken_back(words: Words, model: ModelSpec, release: Release) -> dict[str, object]:
    """Overrides against values of a recipe that Megatron-LM's arguments have no word for."""
    # recipes/kimi has another value there than in ddp
    sharded = "use_distributed_optimizer" in words
    found: dict[str, object] = {"optimizer.use_distributed_optimizer": sharded}
    if is_hybrid(model):
        # HybridModelProvider.finalize() adds it to the pattern, and counts its layers
        found["model.mtp_hybrid_override_pattern"] = None
    if model.compresses and not model.mtp_num_layers:
        # recipes/deepseek: one of each layer, where deepseek_v4_bridge.py counts those of MTP too
        found["model.csa_compress_ratios"] = [model.entries(mixer)[0] for mixer in model.mixers]
    if model.uses_mla and "qk_clip" not in words and release.since("0.16"):  # recipes/kimi has it
        found["model.qk_clip"] = False
    if model.is_moe:
        found["model.moe_shared_expert_overlap"] = False  # recipes/deepseek and others have it
    if model.is_moe and CAPACITY not in words:  # recipes/nemotronh drops tokens
        found |= {KEYS[CAPACITY]: None, KEYS[PADDED]: False}
    found |= {f"optimizer.{name}": (words.get(name) or ["fp32"])[0] for name in _STATES}
    if release.before("0.17"):  # a text stays a text there (training/utils/omegaconf_utils.py)
        found |= {
            key: {"_target_": f"torch.{_DTYPES[str(value)]}", "_call_": False}
            for key, value in found.items()
            if key.endswith("_dtype")
        }
    return found | _graphs(words, release) | ({} if has_provider(model, release) else _fused(model))


def _graphs(words: Words, release: Release) -> dict[str, object]:
    """Graphs of a recipe that a layout has not, and settings that its own graphs ask for."""
    found: dict[str, object] = {}
    if "cuda_graph_impl" not in words and release.since("0.15"):
        found["model.cuda_graph_impl"] = "none"
    if "cuda_graph_impl" in words and release.since("0.18"):
        # "full" in most recipes, which TransformerConfig refuses beside cuda_graph_modules
        found["model.cuda_graph_scope"] = None
        if "cuda_graph_modules" not in words:  # recipes/nemotronh names some
            found["model.cuda_graph_modules"] = []
    if "no_check_for_nan_in_loss_and_grad" in words:
        found["rerun_state_machine.check_for_nan_in_loss"] = False
        found["ddp.check_for_nan_in_grad"] = False
    if "moe_paged_stash" in words:  # TransformerConfig reads a list there, and finds None
        found["model.offload_modules"] = []
    return found


def _fused(model: ModelSpec) -> dict[str, bool]:
    """Kernels that Megatron-LM fuses by default, and most of Bridge's recipes do not.

    RoPE's is not for sparse attention, and only with YaRN for latent attention (core 0.18
    transformer_config.py).
    """
    yarn = model.rope_scaling is not None and model.rope_scaling.rope_type == "yarn"
    found = {"model.bias_dropout_fusion": True}
    if model.mlp == "swiglu" and model.hidden_act in (None, "silu"):
        found["model.bias_activation_fusion"] = True
    if not model.indexed and (yarn or not model.uses_mla):
        found["model.apply_rope_fusion"] = True
    return found


def overrides(
    words: Words, precision: MixedPrecision | None = None, lists: Sequence[str] = _LISTS
) -> dict[str, object]:
    """Override -> its value, of Megatron-LM's arguments and against those that a recipe keeps.

    The arguments of the model are the recipe's.
    precision: of the words, unless given.
    lists: arguments that become lists whatever they hold.
    """
    found: dict[str, object] = {}
    for name, key in KEYS.items():
        if key.startswith("mixed_precision."):
            continue
        if name in words:
            value = _value(words[name])
            found[key] = [value] if name in lists and not isinstance(value, list) else value
        elif name in TAKEN_BACK:
            found[key] = TAKEN_BACK[name]
    if "cpu_offloading_num_layers" in words:
        found["model.cpu_offloading"] = True
    precision = precision or mixed_precision(words)
    found["mixed_precision"] = precision.fields or precision.preset
    found["ddp.grad_reduce_in_fp32"] = REDUCED[0] in words
    overlaps = {name: name in words for name in _OVERLAPS}
    found["comm_overlap"] = {"_target_": _OVERLAP_CLASS, **overlaps, "delay_wgrad_compute": False}
    if "seq_length" in words:
        found["dataset.seq_length"] = found["model.seq_length"]
    return found


def arguments_of(given: Overrides) -> dict[str, list[str]]:
    """Megatron-LM's arguments, named with _, that overrides and their recipe's defaults mean."""
    given = {"mixed_precision.grad_reduce_in_fp32": given.get("ddp.grad_reduce_in_fp32"), **given}
    for name in ("dataset.seq_length", "dataset.sequence_length"):
        if name in given:
            given = {"model.seq_length": given[name], **given}
    words = {name: list(values) for name, values in RECIPE.items()}
    for name, key in KEYS.items():
        value = given.get(key)
        if key in given and (value is None or value is False) and name != REDUCED[0]:
            words.pop(name, None)
        elif value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else () if value is True else (value,)
            words[name] = [str(one) for one in values]
    if given["mixed_precision.grad_reduce_in_fp32"] is True:
        del words[REDUCED[1]]
    return words


def _value(words: object) -> object:
    """True for a flag, a number or a text for one value, else the list of them."""
    assert isinstance(words, list | tuple)
    values = [plain_value(str(one)) for one in words]
    return True if not values else values[0] if len(values) == 1 else values


def _spelled(value: object) -> str:
    """A value as Hydra's override grammar reads it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_spelled(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_spelled, value))}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    return json.dumps(value)


def _yaml(found: Overrides) -> str:
    sections: dict[str, dict[str, object]] = {}
    lines = []
    for key, value in found.items():
        section, _, name = key.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value
        elif isinstance(value, Mapping):
            sections[section] = {**value}
        else:
            lines.append(f"{section}: {json.dumps(value)}")
    for section, values in sections.items():
        lines += [f"{section}:", *(f"  {name}: {json.dumps(one)}" for name, one in values.items())]
    return "\n".join(lines) + "\n"
