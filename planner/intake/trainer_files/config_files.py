"""Reads YAML and JSON of other trainers' configurations as a job; what is not read is named.

Sources: accelerate 1.15 commands/config/config_args.py, utils/constants.py
    (FSDP_SHARDING_STRATEGY); axolotl docs/config-reference; LLaMA-Factory hparams; DeepSpeed
    docs/_pages/config-json.md.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.errors import SpecError, fault
from planner.intake.trainer_files.known_models import called
from planner.specs.job import CurrentFormat

Values = Mapping[str, object]
PASSES = "gradient_accumulation_steps"
Lookup = Callable[[str], str | None]
# key of Axolotl -> field of a layout
AXOLOTL = {
    "tensor_parallel_size": "tp", "context_parallel_size": "cp", "dp_shard_size": "dp_shard",
    "dp_replicate_size": "dp_replicate", "micro_batch_size": "micro_batch_size",
    "expert_parallel_size": "ep",
}  # fmt: skip
# of Axolotl and of LLaMA-Factory: a loss without all logits at once
CHUNKED = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "enable_liger_kernel")
ADAMW = ("AdamW", "Adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
OWN_OPTIMIZERS = ("muon", "galore", "badam", "apollo", "adam_mini")  # LLaMA-Factory's use_...
DEEPSPEED = ("train_micro_batch_size_per_gpu", "train_batch_size")
UNSTATED = (
    "it states neither sequences a microbatch nor recomputation by transformers: one sequence, and "
    "what it says itself"
)
GIVE = "give a layout in JSON, or a file of TorchTitan, Megatron, Accelerate, Axolotl or DeepSpeed"


@dataclass(slots=True)
class Read:
    """A job under construction: its parts, and the notes of its reader.

    passes: microbatches of a step on each data-parallel rank; 0 where the file leaves them open.
    """

    lookup: Lookup
    layout: dict[str, object] = field(default_factory=dict)
    training: dict[str, object] = field(default_factory=dict)
    cluster: dict[str, object] = field(default_factory=dict)
    model: object | None = None
    passes: int = 0
    notes: list[str] = field(default_factory=list)

    def job(self) -> dict[str, object]:
        parts = {"model": self.model, "cluster": self.cluster, "training": self.training,
                 PASSES: self.passes}  # fmt: skip
        return {**{key: value for key, value in parts.items() if value}, "layout": self.layout}


def read_config(
    name: str, values: Values, text: str = "", lookup: Lookup = lambda _: None
) -> dict[str, object] | None:
    """A job's `current` for a trainer's configuration; None where the mapping is none.

    text: the file as it was written, into which another layout can be written.
    lookup: the text of a file that it names.

    Raises SpecError naming what it is, for one that is not read.
    """
    kind = next((kind for kind in KINDS if kind.marks(values)), None)
    if kind is None:
        return None
    if kind.format is not None:
        return {"name": name, "format": kind.format, "text": text or json.dumps(values)}
    if kind.reader is None:
        raise fault("current", name, f"is {kind.title}", kind.remedy)
    found = Read(lookup=lookup)
    kind.reader(values, found)
    notes = [f"{name} is {kind.title}", *found.notes]
    configuration = {"name": name, "format": "configuration", "text": text}
    return {**configuration, "job": found.job(), "notes": notes}


def _accelerate(values: Values, found: Read) -> None:
    kind, count = str(values.get("distributed_type")), _whole(values, "num_processes")
    machines = _whole(values, "num_machines") or 1
    if kind not in ("FSDP", "MULTI_GPU", "NO", "DEEPSPEED"):
        raise _unread("distributed_type", kind, "use FSDP, MULTI_GPU or DEEPSPEED")
    if count:
        found.cluster = {"num_gpus": count, "gpus_per_node": max(1, count // machines)}
    found.training["trainer"] = "fsdp"
    sizes = {
        name: _whole(_part(values, "parallelism_config"), f"parallelism_config_{name}_size")
        for name in ("dp_replicate", "dp_shard", "cp", "tp")
    }
    found.layout.update({name: size for name, size in sizes.items() if size})
    if kind == "DEEPSPEED":
        own = _part(values, "deepspeed_config")
        if named := own.get("deepspeed_config_file"):
            read = _beside(named, found)
            if read is None:
                rule, remedy = "is not there, or is not JSON", "put it beside the file"
                raise fault("deepspeed_config_file", named, rule, remedy)
            _deepspeed(read, found)
        else:  # accelerate utils/dataclasses.py DeepSpeedPlugin
            _zero({"zero_stage": 2, **own}, found)
    elif kind == "FSDP":
        _fsdp(_part(values, "fsdp_config"), found, "fsdp_", count, machines)
    else:
        found.layout |= {"zero_stage": 0} if kind == "MULTI_GPU" else {"dp_shard": 1}
    if "precision" not in found.layout:
        _precision(str(values.get("mixed_precision", "no")), found)
    dynamo = str(_part(values, "dynamo_config").get("dynamo_backend", "NO")).upper()
    found.layout["compile"] = dynamo != "NO"
    if kind == "FSDP" and found.layout["precision"] == "bf16" and "param_dtype" not in found.layout:
        found.layout["reduce_dtype"] = "bfloat16"  # Accelerate's policy has one dtype for both
    found.notes.append(UNSTATED)


def _beside(name: object, found: Read) -> Values | None:
    """DeepSpeed's JSON that a file names; None where it is not there, or is none."""
    try:
        values = json.loads(found.lookup(str(name)) or "")
    except ValueError:
        return None
    return values if isinstance(values, Mapping) else None


def _sharding(values: Values, found: Read) -> None:
    """ZeRO of the JSON that Axolotl's and LLaMA-Factory's key names; DDP where nothing shards."""
    named = values.get("deepspeed")
    read = _beside(named, found) if named else None
    if read is not None:
        _zero(read, found)
    elif named:
        found.notes.append(f"deepspeed {named} is not there: put it beside the file")
    elif not (values.get("fsdp") or values.get("fsdp_config") or "dp_shard" in found.layout):
        found.layout["zero_stage"] = 0
        found.notes.append("it shards nothing, so it is DDP, unless its launcher's file shards")


def _optimizer(name: object, found: Read) -> None:
    if name and name not in ADAMW:
        found.notes.append(f"optimizer {name} is priced as AdamW")


def _fsdp(values: Values, found: Read, prefix: str, count: int, machines: int) -> None:
    """FSDP's own keys, with the prefix that Accelerate gives them or without."""

    def own(key: str) -> object:
        return values.get(f"{prefix}{key}", values.get(key))

    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    stated = own("sharding_strategy") or own("reshard_after_forward")
    strategy = str(stated).upper()
    if strategy.isdigit() and 0 < int(strategy) <= len(strategies):
        strategy = strategies[int(strategy) - 1]
    keeps = strategy in ("FALSE", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    found.layout["zero_stage"] = 2 if keeps else 3
    if strategy == "NO_SHARD":
        found.layout["zero_stage"] = 0
    elif strategy.startswith("HYBRID") and machines > 1:
        found.layout |= {"dp_replicate": machines, "dp_shard": count // machines}
    found.layout["cpu_offload"] = own("offload_params") is True
    if own("activation_checkpointing") is not None:
        found.layout["ac"] = "full" if own("activation_checkpointing") is True else "none"


def _zero(values: Values, found: Read) -> None:
    """DeepSpeed's ZeRO as the nearest that torch has."""
    inner = _part(values, "zero_optimization") or values
    stage = _whole(inner, "stage") or _whole(inner, "zero_stage")
    found.layout["zero_stage"] = 3 if stage == 3 else 2 if stage else 0
    devices = [
        str(_part(inner, key).get("device") or inner.get(f"{key}_device") or "none")
        for key in ("offload_optimizer", "offload_param")
    ]
    if "nvme" in devices:
        raise _unread("offload", "nvme", "use cpu")
    found.layout["cpu_offload"] = "cpu" in devices
    found.notes.append(
        f"ZeRO-{stage} of DeepSpeed is priced as FSDP2's zero_stage {found.layout['zero_stage']}"
        + (", its optimizer on the host as FSDP2's offload" if "cpu" in devices else "")
    )


def _deepspeed(values: Values, found: Read) -> None:
    found.training["trainer"] = "fsdp"
    _zero(values, found)
    micro, batch = (_whole(values, key) for key in DEEPSPEED)
    if micro:
        found.layout["micro_batch_size"] = micro
    if batch:
        found.training["global_batch_size"] = batch
    passes = found.passes = _whole(values, PASSES)
    tp = _whole(_part(values, "tensor_parallel"), "autotp_size") or 1
    if batch and micro and passes and not batch % (micro * passes):
        ranks = batch // (micro * passes)
        found.layout |= {"tp": tp, "sequence_parallel": False}
        found.cluster["num_gpus"] = ranks * tp
    stated = {key: _part(values, key).get("enabled") for key in ("bf16", "fp16")}
    on = [key for wanted in (True, "auto") for key, one in stated.items() if one == wanted]
    _precision(on[0] if on else "no", found)
    if on and stated[on[0]] == "auto":
        found.notes.append(f"its numbers are transformers' choice (auto): taken as {on[0]}")
    if _part(values, "bf16").get("bf16_master_weights_and_grads") is True:
        found.layout["master_dtype"] = "bfloat16"
    _optimizer(_part(values, "optimizer").get("type"), found)
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    if reduces := dtypes.get(str(values.get("communication_data_type"))):
        found.layout["reduce_dtype"] = reduces


def _axolotl(values: Values, found: Read) -> None:
    if values.get("adapter"):
        raise _unread("adapter", values["adapter"], "train all weights: adapters are not priced")
    found.model = _model(values.get("base_model"), found)
    found.training["trainer"] = "fsdp"
    sizes = {ours: _whole(values, key) for key, ours in AXOLOTL.items() if key in values}
    found.layout.update(sizes)
    if _part(values, "fsdp_config"):
        _fsdp(_part(values, "fsdp_config"), found, "fsdp_", 0, 1)
    _trained(values, found, "sequence_len", bool(values.get("gradient_checkpointing")))


def _llama_factory(values: Values, found: Read) -> None:
    for key in values:
        if str(key).endswith("_model_parallel_size"):
            raise _unread(str(key), values[key], "give a layout in JSON: it starts Megatron")
    if values.get("finetuning_type", "lora") != "full":
        kind = values.get("finetuning_type", "lora")
        raise _unread("finetuning_type", kind, "use full: adapters are not priced")
    found.model = _model(values.get("model_name_or_path"), found)
    found.training["trainer"] = "fsdp"
    micro = _whole(values, "per_device_train_batch_size") or 1
    found.layout["micro_batch_size"] = micro
    _trained(values, found, "cutoff_len", values.get("disable_gradient_checkpointing") is not True)


def _model(text: object, found: Read) -> object:
    """The catalogue's model of a Hugging Face id, also of somebody's copy of it."""
    known = called(str(text)) if "/" in str(text) else None
    if known is None:
        return text
    found.notes.append(f"{text} is taken as {known}")
    return known


def _trained(values: Values, found: Read, length: str, recomputes: bool) -> None:
    if _whole(values, length):
        found.training["seq_len"] = _whole(values, length)
    found.passes = _whole(values, PASSES) or 1
    if recomputes or "ac" not in found.layout:  # FSDP has a setting of its own for it
        found.layout["ac"] = "full" if recomputes else "none"
    found.layout["compile"] = values.get("torch_compile") is True
    formats = ("fp8", "bf16", "pure_bf16", "bfloat16", "fp16")
    name = next((name for name in formats if values.get(name)), "no")
    _precision(name.replace("bfloat16", "bf16"), found)
    if name in ("pure_bf16", "bfloat16"):
        found.layout["master_dtype"] = "bfloat16"
    if any(values.get(key) for key in CHUNKED):
        found.training["chunked_loss"] = True
    own = [name for name in OWN_OPTIMIZERS if values.get(f"use_{name}")]
    _optimizer(own[0] if own else values.get("optimizer") or values.get("optim"), found)
    _sharding(values, found)


_PRECISIONS = (("fp8", "float8-tensorwise"), ("bf16", "bf16"), ("fp16", "fp16"))


def _precision(text: str, found: Read) -> None:
    """The precision that a trainer calls so; fp32 throughout for "no"."""
    name = next((ours for theirs, ours in _PRECISIONS if theirs in text), None)
    if name is not None:
        found.layout["precision"] = name
    elif text.lower() in ("no", "none", "fp32"):
        found.layout |= {"precision": "bf16", "param_dtype": "float32"}
    else:
        raise _unread("mixed_precision", text, "use bf16, fp16, fp8 or no")


def _part(values: Values, key: str) -> Values:
    part = values.get(key)
    return part if isinstance(part, Mapping) else {}


def _whole(values: Values, key: str) -> int:
    """A whole number; 0 for a missing one and for "auto". Raises SpecError for anything else."""
    value = values.get(key)
    if value is None or value == "auto":
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise fault(key, value, "is no whole number", "correct the file")


def _unread(key: str, value: object, remedy: str) -> SpecError:
    return fault(key, value, "is not priced", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKind:
    """One trainer's configuration: how it is recognised, and read; None where it is not.

    format: that of a text which `intake.current` reads.
    """

    title: str
    marks: Callable[[Values], bool]
    reader: Callable[[Values, Read], None] | None = None
    remedy: str = GIVE
    format: CurrentFormat | None = None


def _is_deepspeed(values: Values) -> bool:
    """Whether a key is DeepSpeed's own; others have a train_batch_size, too."""
    sections = [isinstance(values.get(key), Mapping) for key in ("bf16", "fp16", "optimizer")]
    own = not {"zero_optimization", DEEPSPEED[0]}.isdisjoint(values)
    return own or (DEEPSPEED[1] in values and any(sections))


def _has(*keys: str) -> Callable[[Values], bool]:
    return lambda values: all(key in values for key in keys)


KINDS = (
    ConfigKind(title="a model of Hugging Face, not what trains it", remedy="give it to --model",
               marks=_has("architectures", "model_type")),
    ConfigKind(title="an Accelerate configuration", marks=_has("distributed_type"),
               reader=_accelerate),
    ConfigKind(title="an Axolotl configuration", marks=_has("base_model"), reader=_axolotl),
    ConfigKind(title="a LLaMA-Factory configuration",
               marks=_has("model_name_or_path", "stage"), reader=_llama_factory),
    ConfigKind(title="a DeepSpeed configuration", reader=_deepspeed,
               marks=_is_deepspeed),
    ConfigKind(
        title="overrides of Megatron-Bridge",
        marks=lambda values: any(
            key.endswith("_model_parallel_size") or key.startswith("recompute_")
            for key in map(str, _part(values, "model"))
        ) or not {"global_batch_size", "micro_batch_size"}.isdisjoint(_part(values, "train")),
        format="megatron-bridge",
    ),
    ConfigKind(title="a Primus configuration", format="primus",
               marks=lambda values: "pre_trainer" in _part(values, "modules")),
    ConfigKind(title="a configuration of transformers' Trainer, which is not read",
               marks=_has("per_device_train_batch_size")),
    ConfigKind(title="a torchtune recipe, which is not read", marks=_has("tokenizer", "optimizer",
                                                                   "checkpointer")),
)  # fmt: skip
