"""Reads the overrides of a Primus YAML: arguments of Megatron-LM, or settings of TorchTitan.

Source: AMD-AGI/Primus of 2026-08-22 primus/configs/{modules,models} (defaults) and examples.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import yaml

from planner.errors import fault
from planner.export.base import flatten
from planner.export.megatron_read import whole
from planner.intake.trainer_files.known_models import called, model_of
from planner.intake.trainer_files.megatron import StatedMegatron
from planner.intake.trainer_files.megatron_log import words_of
from planner.intake.trainer_files.statement import Run, StatedModel
from planner.intake.trainer_files.torchtitan import StatedTitan
from planner.specs.job import CurrentSpec
from planner.specs.model import ModelSpec
from planner.trainers.titan_models import FLAVORS
from planner.trainers.titan_settings import KEYS

_VARIABLE = re.compile(r"\$\{\w+:([^{}]*)\}")  # with its default
MEGATRON: Mapping[str, object] = {
    "micro_batch_size": 2, "global_batch_size": 16, "seq_length": 1024, "bf16": True,
    "use_distributed_optimizer": True, "sequence_parallel": True, "attention_dropout": 0.0,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "add_bias_linear": False,
}  # fmt: skip
TITAN = {
    "training.seq_len": 2048, "training.local_batch_size": 8, "compile.enable": True,
    "activation_checkpoint.mode": "none", "activation_checkpoint.selective_ac_option": "2",
}  # fmt: skip
LAYER_IDS = "recompute_layer_ids"
# Primus's own: their kernels and overlaps are not priced
_OWN = re.compile(r"(use_turbo_|patch_|turbo_sync_free|enable_odc|primus_turbo\.use)\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Megatron(StatedMegatron):
    """A run of Megatron-LM under Primus. named: its model; own: settings of Primus itself."""

    named: StatedModel
    own: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()

    @property
    def model(self) -> StatedModel:
        return self.named

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        words: dict[str, list[str]] = {name: [*one] for name, one in self.words.items()}
        words |= {"num_experts": [str(model.num_experts)]} if model.is_moe else {}
        words |= {"multi_latent_attention": []} if model.uses_mla else {}
        notes = [f"not priced: {', '.join(self.own)}"] if self.own else []
        if chosen := [one for text in words.pop(LAYER_IDS, ()) for one in text.split(",")]:
            each = -(-len(chosen) // whole(words, "pipeline_model_parallel_size", 1))
            words |= {"recompute_method": ["block"], "recompute_num_layers": [str(each)]}
            notes.append(f"{LAYER_IDS} is priced as the first of each stage's layers, evenly")
        found = StatedMegatron.run(replace(self, words=words), model, num_gpus)
        return replace(found, notes=(*notes, *found.notes))


def read_primus(spec: CurrentSpec) -> _Megatron | StatedTitan:
    """Reads a configuration. Raises SpecError for one of another framework."""
    values = yaml.safe_load(_VARIABLE.sub(r"\1", spec.text))["modules"]["pre_trainer"]
    named = str(values.get("model", "")).removesuffix(".yaml")
    reader = READERS.get(str(values.get("framework")))
    if reader is None:
        rule, remedy = "is not read", "give a configuration of megatron or torchtitan"
        raise fault("framework", values.get("framework"), rule, remedy)
    return reader(named, flatten(values.get("overrides") or {}))


def _of_megatron(named: str, given: Mapping[str, object]) -> _Megatron:
    words = words_of({name: str(one) for name, one in {**MEGATRON, **given}.items()})
    own = tuple(f"{name}={one}" for name, one in given.items() if one and _OWN.fullmatch(name))
    return _Megatron(words=words, named=_model(named, given), own=own)


def _of_titan(named: str, given: Mapping[str, object]) -> StatedTitan:
    plain = {key.removeprefix("quantize.linear."): one for key, one in given.items()}
    known = {key: one for key, one in plain.items() if key in KEYS["0.2"] and one is not None}
    known |= {"model.converters": ["float8"]} if named.endswith("-fp8") else {}
    model = _model(named.removesuffix("-fp8"), {})
    return StatedTitan(line="0.2", given={**TITAN, **known}, named=model)


READERS: Mapping[str, Callable[[str, Mapping[str, object]], _Megatron | StatedTitan]] = {
    "megatron": _of_megatron, "torchtitan": _of_titan,
}  # fmt: skip


def _model(named: str, given: Mapping[str, object]) -> StatedModel:
    """Looks up a file's model in the catalogue and sets the number of layers it overrides."""
    module, _, flavor = named.rpartition("_")  # as TorchTitan calls some
    flavors = [one.flavor for one in FLAVORS.values() if one.flavor.lower() == flavor.lower()]
    own = model_of(module, flavors[0]).value if flavors else None
    found: object = called(named) or own
    if found is not None and "num_layers" in given:
        found = {"base": found, "num_hidden_layers": given["num_layers"]}
    return StatedModel(value=found, lacking=f"the catalogue has no {named}")
