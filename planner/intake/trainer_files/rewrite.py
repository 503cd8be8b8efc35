"""Writes another layout into a user's file, changing only what must, and shows it as a patch."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from planner.export.base import Export, Value
from planner.export.commands import spelled
from planner.intake.current import Current
from planner.intake.trainer_files import megatron, titan_command
from planner.intake.trainer_files.edit_yaml import edit_yaml, leaves
from planner.intake.trainer_files.rewritten_config import config_changes
from planner.intake.trainer_files.shell import ARGUMENTS
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.torchtitan import StatedTitan, former_name
from planner.specs.current import CurrentSpec
from planner.specs.layout import Layout

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
            named = {former_name(key, stated.spelling): value for key, value in changes.items()}
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
