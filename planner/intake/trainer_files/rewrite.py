"""Writes another layout into a user's file, changing only what must, and shows it as a patch.

In an Accelerate, DeepSpeed, Axolotl, LLaMA-Factory or Bridge configuration, settings that the two
layouts write differently change; the rest stays.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from planner.export.base import Export, Value, leaves
from planner.export.commands import spelled
from planner.intake.current import Current
from planner.intake.trainer_files import megatron, titan_command
from planner.intake.trainer_files.config_files import AXOLOTL
from planner.intake.trainer_files.edit_yaml import Path, changed_leaves, edit_yaml
from planner.intake.trainer_files.shell import ARGUMENTS
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.torchtitan import StatedTitan
from planner.specs.job import CurrentSpec
from planner.specs.layout import Layout, parse_ac

NO_NEWLINE = "\\ No newline at end of file\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The user's files with another layout.

    files: name -> new text, of the user's files that change and of our modules that they then name.
    diff: of the user's files only, as a unified diff that `patch -p1` takes.
    settings: what changes, by the trainer's names, as (before, after); None where it is not set.
    notes: what the files cannot express.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    diff: str = ""
    settings: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def rewrite(
    current: Current, winner: Layout, exported: Export, global_batch_size: int
) -> Rewritten:
    """The files of the current run, changed to run another layout.

    exported: that layout's export, for the same release of the same trainer.
    """
    from planner.intake.trainer_files.edit_toml import edit_toml

    stated, spec, kind = current.stated, current.spec, current.format
    if isinstance(stated, StatedTitan) and kind in ("torchtitan-toml", "torchtitan-command"):
        changes, notes = titan_changes(stated, winner, exported)
        if kind == "torchtitan-toml":
            before = {**spec.files, spec.name: spec.text}
            named = {stated.spelling.get(key, key): value for key, value in changes.items()}
            files = {spec.name: edit_toml(spec.text, named)}
        else:
            before = titan_command.before(spec)
            files = titan_command.edited_command(spec, changes, stated.spelling, stated.line)
        return Rewritten(
            files={**files, **_modules(exported, stated, changes, spec.files)},
            diff=_diffs(before, files),
            settings={key: (stated.given.get(key), value) for key, value in changes.items()},
            notes=tuple(notes),
        )
    if isinstance(stated, megatron.StatedMegatron) and kind == "megatron-arguments":
        words, notes = megatron.megatron_changes(stated, winner, exported, global_batch_size)
        settings = {
            spelled(name): (_spelled(stated.words.get(name)), _spelled(new))
            for name, new in words.items()
        }
        if others := spec.files.keys() - {ARGUMENTS}:
            rest = f"set the fields below in it or in {', '.join(sorted(others))}"
            return Rewritten(settings=settings, notes=(f"{spec.name} is not changed: {rest}",))
        files = {spec.name: megatron.edited_script(spec, words)}
        return Rewritten(
            files=files,
            diff=_diffs({spec.name: spec.text}, files),
            settings=settings,
            notes=tuple(notes),
        )
    return Rewritten()


def rewrite_config(
    spec: CurrentSpec,
    layouts: Sequence[Layout],
    exports: Sequence[Export | None],
    global_batch_size: int,
) -> Rewritten:
    """A configuration in YAML or JSON, changed from the first of two layouts to the second.

    exports: both, in the file's own format; None where that is none of ours.
    """
    changes, notes = config_changes(spec.text, layouts, exports, global_batch_size)
    files = {spec.name: edit_yaml(spec.text, changes)}
    given = leaves(yaml.safe_load(spec.text))
    return Rewritten(
        files=files,
        diff=_diffs({spec.name: spec.text}, files),
        settings={".".join(path): (given.get(path), new) for path, new in changes.items()},
        notes=tuple(notes),
    )


def _spelled(words: Sequence[str] | None) -> object:
    """An argument's values: None where it is not given, True for a flag without values."""
    return None if words is None else " ".join(words) if words else True


def _modules(
    exported: Export,
    stated: StatedTitan,
    changes: Mapping[str, Value | None],
    files: Mapping[str, str],
) -> dict[str, str]:
    """Python modules of the export that the new settings name, unless the user has them already."""
    words = {str(value) for value in {**stated.given, **changes}.values()}
    named = {
        name: text
        for name, text in exported.files.items()
        if name.endswith(".py") and name.removesuffix(".py") in words
    }
    return {name: text for name, text in named.items() if files.get(name) != text}


def _diffs(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    return "".join(
        unified(name, text, after[name]) for name, text in before.items() if name in after
    )


def unified(name: str, before: str, after: str) -> str:
    """The difference as `patch` takes it; empty for equal texts."""
    lines = []
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
        lines.append(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}")
    return "".join(lines)


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
    notes += [f"it has no setting for {name} {_word(getattr(now, name))}" for name in unsaid]
    changes = changed_leaves(old, new, GONE)
    if STRATEGY in given and RESHARDS in changes:  # FSDP 1 has another key for it
        changes[STRATEGY] = "SHARD_GRAD_OP" if changes.pop(RESHARDS) is False else "FULL_SHARD"
    settable: dict[Path, object] = {}
    for path, value in changes.items():
        whole = next((path[:size] for size in range(1, len(path)) if path[:size] in given), None)
        if whole is not None and given[whole] is not None:
            notes.append(
                f"{'.'.join(whole)} is {given[whole]!r}, which names a whole: in it set "
                f"{path[-1]} to {_word(value)}"
            )
        elif path in given or value is not None:
            settable[path] = value
    return settable, notes


def _word(value: object) -> str:
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
