"""Another layout in a user's Accelerate, DeepSpeed, Axolotl, LLaMA-Factory or Bridge configuration.

Settings that two layouts write differently change in the user's file; the rest stays.
"""

import json
from collections.abc import Mapping, Sequence

import yaml

from planner.export.base import Export
from planner.intake.trainer_files.config_files import AXOLOTL
from planner.intake.trainer_files.edit_yaml import Path, changed_leaves, leaves
from planner.specs.layout import Layout, parse_ac

EXPORTED = {
    "accelerate": "accelerate.yaml", "deepspeed": "ds_config.json",
    "megatron-bridge": "overrides.yaml",
}  # fmt: skip
# last key -> the value under which the setting is off
GONE: Mapping[str, object] = {"device": "none", "dynamo_backend": "NO", "autotp_size": 1}
DEGREES: Mapping[Path, str] = {
    ("parallelism_config", f"parallelism_config_{name}_size"): name
    for name in ("dp_replicate", "dp_shard", "cp", "tp")
}
_MARKS = {
    "distributed_type": "accelerate", "base_model": "axolotl", "zero_optimization": "deepspeed",
    "model_name_or_path": "llama-factory", "model": "megatron-bridge",
}  # fmt: skip
STRATEGY: Path = ("fsdp_config", "fsdp_sharding_strategy")
RESHARDS: Path = ("fsdp_config", "fsdp_reshard_after_forward")
RECOMPUTES = ("accelerate", "axolotl", "llama-factory")  # whole layers or none
_CONVERTED = ("precision", "master_dtype", "optimizer_in_backward", "reduce_dtype")
# fields of a layout that a configuration has no setting for; and ac, but for "none" and "full"
_UNSAID: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("micro_batch_size", "master_dtype", "reduce_dtype"),
    "deepspeed": ("compile", "ac"),
    "axolotl": _CONVERTED,
    "llama-factory": (*_CONVERTED, "tp", "cp", "dp_replicate", "zero_stage", "cpu_offload"),
    "megatron-bridge": (),
}


def kind_of(text: str) -> str:
    """Which trainer's configuration it is; "" for one whose settings are not written."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return ""
    keys = document.keys() if isinstance(document, Mapping) else ()
    if "distributed_type" in keys and "deepspeed_config" in keys:
        return ""
    return next((kind for key, kind in _MARKS.items() if key in keys), "")


def config_changes(
    text: str, layouts: Sequence[Layout], exports: Sequence[Export | None], global_batch_size: int
) -> tuple[dict[Path, object], list[str]]:
    """(values to set, sentences on the others) from the first layout to the second.

    exports: both in the format of that name, for those of EXPORTED.
    """
    kind, given = kind_of(text), leaves(yaml.safe_load(text))
    was, now = layouts
    if kind in EXPORTED:
        name = EXPORTED[kind]
        made = [one for one in exports if one is not None]
        old, new = (leaves(yaml.safe_load(one.files[name])) for one in made)
        if kind == "accelerate":
            for path, field in DEGREES.items():
                if path in given:
                    old[path], new[path] = getattr(was, field), getattr(now, field)
        notes = [str(fault) for fault in made[1].blockers]
    else:
        write = _axolotl if kind == "axolotl" else _factory
        old, new = (write(layout, global_batch_size) for layout in layouts)
        notes = []
    unsaid = [name for name in _UNSAID[kind] if getattr(was, name) != getattr(now, name)]
    if kind in RECOMPUTES and parse_ac(now.ac)[0] not in ("none", "full"):
        unsaid.append("ac")
    notes += [f"it has no setting for {name} {_spelled(getattr(now, name))}" for name in unsaid]
    changes = changed_leaves(old, new, GONE)
    if STRATEGY in given and RESHARDS in changes:  # FSDP 1 has another key for it
        changes[STRATEGY] = "SHARD_GRAD_OP" if changes.pop(RESHARDS) is False else "FULL_SHARD"
    settable: dict[Path, object] = {}
    for path, value in changes.items():
        whole = next((path[:size] for size in range(1, len(path)) if path[:size] in given), None)
        if whole is not None and given[whole] is not None:
            notes.append(
                f"{'.'.join(whole)} is {given[whole]!r}, which names a whole: in it set "
                f"{path[-1]} to {_spelled(value)}"
            )
        elif path in given or value is not None:
            settable[path] = value
    return settable, notes


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _passes(layout: Layout, global_batch_size: int) -> int:
    return max(1, layout.num_microbatches(global_batch_size))


def _axolotl(layout: Layout, global_batch_size: int) -> dict[Path, object]:
    return {
        **{(key,): getattr(layout, field) for key, field in AXOLOTL.items()},
        ("torch_compile",): layout.compile,
        ("gradient_accumulation_steps",): _passes(layout, global_batch_size),
        ("gradient_checkpointing",): parse_ac(layout.ac)[0] != "none",
        ("fsdp_config", "reshard_after_forward"): layout.zero_stage == 3,
        ("fsdp_config", "offload_params"): layout.cpu_offload,
    }


def _factory(layout: Layout, global_batch_size: int) -> dict[Path, object]:
    return {
        ("per_device_train_batch_size",): layout.micro_batch_size,
        ("torch_compile",): layout.compile,
        ("gradient_accumulation_steps",): _passes(layout, global_batch_size),
        ("disable_gradient_checkpointing",): parse_ac(layout.ac)[0] == "none",
    }
