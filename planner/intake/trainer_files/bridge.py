"""Reads overrides of Megatron-Bridge, in YAML or behind run_recipe.py, as Megatron-LM's arguments.

Source: Megatron-Bridge 0.2 to 0.6 scripts/training/run_recipe.py, training/mixed_precision.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import yaml

from planner.catalog.bridge_recipes import beginnings
from planner.catalog.models import model_names
from planner.errors import fault
from planner.export.base import flatten
from planner.export.megatron_bridge import NAME, arguments_of
from planner.export.megatron_read import FP8_RECIPES
from planner.export.megatron_settings import DEGREES, KEYS
from planner.intake.trainer_files.flags import commands_of
from planner.intake.trainer_files.megatron import StatedMegatron
from planner.intake.trainer_files.megatron_judge import LAYOUT_TEXT
from planner.intake.trainer_files.statement import Machine, Run, StatedModel, machine_of
from planner.specs.job import CurrentSpec
from planner.specs.model import ModelSpec

SECTIONS = ("model", "train", "ddp", "optimizer", "mixed_precision", "dataset", "comm_overlap",
            "checkpoint")  # fmt: skip
LOW = ("mxfp8", "nvfp4", "fp8_current", "fp8_subchannel", "fp8_delayed", "fp8")
SHARDS, GATHERS = "data_parallel_sharding_strategy", KEYS["fp8_param_gather"]
EXCHANGE = KEYS["overlap_moe_expert_parallel_comm"]
_OVERRIDE = re.compile(rf"[+~]*((?:{'|'.join(SECTIONS)})(?:\.\w+)*)=(.*)", re.S)
COMMAND = re.compile(r"run_recipe\.py|\bmodel\.tensor_model_parallel_size=")
# short option of run_recipe.py and its long one -> override
_OPTIONS = {
    "-gb": "train.global_batch_size", "-mb": "train.micro_batch_size", "-sl": "dataset.seq_length",
    "-vp": "model.virtual_pipeline_model_parallel_size",
    **{f"-{degree}": KEYS[name] for degree, name in DEGREES.items()},
}  # fmt: skip
SHORT = {
    name: key for short, key in _OPTIONS.items() for name in (short, f"--{key.partition('.')[2]}")
}
# part of a preset's name (MIXED_PRECISION_RECIPES) -> our precision
_PRESETS = (
    ("fp8_current", "float8-tensorwise"), ("fp8_delayed", "float8-delayed"),
    ("fp8_subchannel", "float8-blockwise"), ("mxfp8", "mxfp8"), ("fp8", "float8-tensorwise"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedBridge(StatedMegatron):
    """A run of Megatron-Bridge: overrides as Megatron-LM's arguments.

    recipe: the recipe that they override, "" where the text names none.
    unread: overrides that have no argument.
    exchange: whether the exchange of experts overlaps; None where the text leaves it to the recipe.
    """

    trainer: str = NAME
    recipe: str = ""
    unread: tuple[str, ...] = ()
    exchange: bool | None = None
    needed: tuple[str, ...] = ()

    @property
    def model(self) -> StatedModel:
        """The catalogue's model whose name, or listed recipe, the recipe's name begins with."""
        own = {re.sub(r"[^a-z0-9]", "", name): name for name in model_names()}
        plain = {**beginnings(), **own}
        parts = re.split(r"[^a-z0-9]+", self.recipe.lower())
        known = [name for name in accumulate(parts) if name in plain]
        return StatedModel(
            value=plain[known[-1]] if known else None,
            lacking="the recipe has it, which is not read",
        )

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        experts = {"num_experts": [str(model.num_experts)]} if model.is_moe else {}
        words = {name: one for name, one in self.words.items() if name != "tp_comm_overlap"}
        shards = "use_megatron_fsdp" in words or "_fsdp_" in self.recipe
        if shards and SHARDS not in words:
            rule, remedy = "is not set, and recipes differ in it", "set it to optim_grads_params"
            raise fault(KEYS[SHARDS], None, rule, remedy)
        found = StatedMegatron.run(replace(self, words={**words, **experts}), model, num_gpus)
        known = {**found.training}
        if "global_batch_size" not in words:
            del known["global_batch_size"]
        has_buffers = found.layout["tp"] != 1 and found.layout["sequence_parallel"]
        off = {"ep": False} if self.exchange is False else {}
        if has_buffers and not model.uses_mla and "tp_comm_overlap" not in self.words:
            off["tp"] = False
        if off:
            overlap = known.get("overlap")
            known["overlap"] = {**(overlap if isinstance(overlap, Mapping) else {}), **off}
        notes, refusals = [*found.notes], found.refusals
        notes.append(f"of {self.recipe or 'its recipe'} only what the text overrides is read")
        if self.recipe:  # which may have a layout, and the FSDP that writes the format
            its = {"--ckpt-format", "--num-layers" if LAYOUT_TEXT not in words else ""}
            refusals = tuple(one for one in refusals if one.field not in its)
        if self.unread:
            notes.append(f"not read: {', '.join(self.unread)}")
        return replace(found, training=known, notes=tuple(notes), refusals=refusals)


def say(spec: CurrentSpec) -> StatedBridge:
    """Reads overrides. Raises SpecError for a precision that is not known."""
    if spec.format == "megatron-bridge" and not COMMAND.search(spec.text):
        document = yaml.safe_load(spec.text)
        return _stated(document if isinstance(document, Mapping) else {})
    commands = commands_of(spec.text, spec.files)
    command = max(commands, key=lambda one: sum("=" in text for text in one.texts))
    texts = command.texts
    given: dict[str, object] = {}
    for text, after in pairwise([*texts, ""]):
        found = _OVERRIDE.fullmatch(text)
        key, value = found.groups() if found else (SHORT.get(text, ""), after)
        if key:
            given[key] = yaml.safe_load(value)
    named = command.words().get("recipe") or [""]
    if "peft" in named[0] or "peft_scheme" in command.words():
        rule = "trains adapters, which are not priced"
        raise fault("--recipe", named[0], rule, "give a command of a pretrain or sft recipe")
    return _stated(given, named[0], machine_of(command))


def _stated(
    given: Mapping[str, object], recipe: str = "", machine: Machine | None = None
) -> StatedBridge:
    """The run of these overrides; those of `comm_overlap` end in the model's fields."""
    given = {re.sub(r"^comm_overlap\.", "model.", key): one for key, one in flatten(given).items()}
    words = arguments_of(given)
    words.pop("fp8_param_gather", None)  # a precision of Bridge's decides it
    preset = given.get("mixed_precision")
    if preset is None and (own := next((one for one in LOW if one in recipe), None)):
        preset = f"bf16_with_{own}_mixed"  # as recipes are named after it
    if preset is not None:
        words.pop("grad_reduce_in_bf16", None)
        words.update(_preset(str(preset)))
    known = {*KEYS.values(), "mixed_precision", "ddp.grad_reduce_in_fp32"}
    if given.get(GATHERS) is False and "fp8_format" in words:  # priced as its presets have it
        known -= {GATHERS}
    unread = [f"{key}={one}" for key, one in given.items() if key not in known]
    unread = [text for text in unread if text.startswith(("model.", "ddp.", "mixed_precision."))]
    machine = machine or Machine()
    exchange = given.get(EXCHANGE)
    return StatedBridge(
        words=words,
        recipe=recipe,
        machine=machine,
        unread=tuple(unread),
        exchange=exchange if isinstance(exchange, bool) else None,
    )


def _preset(text: str) -> dict[str, list[str]]:
    """Arguments of a preset of mixed precision, which reduces gradients in fp32 but for fp16."""
    plain = text.replace("-", "_")
    low = next((ours for theirs, ours in _PRESETS if theirs in plain), None)
    if "bf16" not in plain and "fp16" not in plain:
        known = "use bf16_mixed or another preset of Megatron-Bridge"
        raise fault("mixed_precision", text, "is not priced", known)
    words: dict[str, list[str]] = {"accumulate_allreduce_grads_in_fp32": []}
    if plain == "fp16_mixed":
        words = {"fp16": [], "grad_reduce_in_bf16": []}
    if low is not None:
        words |= {"fp8_format": ["hybrid"], "fp8_recipe": [FP8_RECIPES[low]]}
    elif "nvfp4" in plain:
        words["fp4_format"] = ["e2m1"]
    return words
