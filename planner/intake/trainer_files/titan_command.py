"""Reads TorchTitan's command line: 0.2's flags over a TOML, 0.3's --module and --config with flags.

Sources: torchtitan 0.2.2 and 0.3.0 run_train.sh (NGPU, CONFIG_FILE; MODULE, CONFIG),
    config/manager.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from planner.errors import fault
from planner.export.base import Value
from planner.export.titan_settings import AC_COMMAND, mode_words
from planner.export.torchtitan import flag_words, read_titan_flags
from planner.intake.trainer_files.flags import Command, best_command, commands_of, edit_flags
from planner.intake.trainer_files.statement import machine_of
from planner.intake.trainer_files.titan_registry import config_names, only, read_registry
from planner.intake.trainer_files.torchtitan import StatedTitan, check_keys, read_toml
from planner.specs.job import CurrentSpec
from planner.trainers.release import GRAPH_TRAINER
from planner.trainers.titan_settings import AC, configs_03

_PROGRAM = re.compile(r"run_train\.sh|torchtitan|(?:^|/)train\.py$")
_SETTING = re.compile(
    r"--(?:training|parallelism|activation_checkpoint|job|compile|model|optimizer|checkpoint|comm)"
    r"\.\w|--module\b"
)
MODULE = "config_registry"


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanCommand:
    """A command and the TOML that it starts from.

    toml: (name as in the command, text); None where it names none.
    given: dotted settings of its flags.
    """

    command: Command
    toml: tuple[str, str] | None
    given: Mapping[str, object]


def find_command(text: str, files: Mapping[str, str] | None = None) -> Command:
    """The command that starts TorchTitan: of several, the one with the most settings.

    Raises SpecError where there is none.
    """
    remedy = "give the script or the line that starts torchtitan.train"
    return best_command(commands_of(text, files), _rating, "TorchTitan", remedy)


def _rating(command: Command) -> int:
    words = command.texts
    programs = sum(bool(_PROGRAM.search(word)) for word in words if not word.startswith("--"))
    return programs + sum(bool(_SETTING.match(word)) for word in words)


def config_file(command: Command) -> str | None:
    words = command.words()
    named = words.get("job.config_file")
    if named:
        return named[0]
    starts_script = any("run_train.sh" in text for text in command.texts)
    return command.script.value("CONFIG_FILE") if starts_script else None


def named_by(text: str) -> tuple[str, ...]:
    """Files that a command names: its TOML, and the module of a 0.3 job."""
    command = find_command(text)
    module = str(_named_03(command).get("module", "")).replace(".", "/")
    toml = config_file(command)
    return (
        *((toml,) if toml else ()),
        *((f"{module}.py", f"{module}/config_registry.py") if module else ()),
    )


def _named_03(command: Command) -> dict[str, str]:
    """`module` and `config` of 0.3's command: its flags, else run_train.sh's variables."""
    words = command.words()
    if words.keys() & {"module", "config"} or config_file(command):
        return {key: words[key][0] for key in ("module", "config") if words.get(key)}
    if not any("run_train.sh" in text for text in command.texts):
        return {}
    variables = {key: command.script.value(key.upper()) for key in ("module", "config")}
    return {key: value for key, value in variables.items() if value is not None}


def read_command(spec: CurrentSpec) -> TitanCommand:
    """Finds the command with its TOML and flags.

    Raises SpecError where it names a TOML that is not among the files.
    """
    command = find_command(spec.text, spec.files)
    name = config_file(command)
    if name and name not in spec.files:
        remedy = "keep the TOML beside the script, or give the TOML itself"
        raise fault("current", spec.name, f"starts from {name}, which is not there", remedy)
    given = {**_named_03(command), **read_titan_flags(_titan_words(command))}
    return TitanCommand(
        command=command, toml=(name, spec.files[name]) if name else None, given=given
    )


def _titan_words(command: Command) -> list[str]:
    """The part of the command that TorchTitan receives: everything after the program."""
    words = command.texts
    named = (_PROGRAM.search(word) and not word.startswith("--") for word in words)
    start = next((index for index, names in enumerate(named) if names), -1)
    return words[start + 1 :]


def say(spec: CurrentSpec) -> StatedTitan:
    """Reads a command with its TOML; flags override the TOML. Raises SpecError."""
    found = read_command(spec)
    below: dict[str, object] = {}
    spelling: dict[str, str] = {}
    if found.toml is not None:
        below, spelling = read_toml(found.toml[1], found.toml[0])
    modules = {
        name.removesuffix(".py").removesuffix("/config_registry").replace("/", "."): text
        for name, text in spec.files.items()
        if name.endswith(".py")
    }
    skipped = tuple(text for text in found.command.script.skipped if _SETTING.search(text))
    given = {**below, **found.given}
    line = "0.3" if given.keys() & {"module", "config"} else "0.2"
    check_keys(given, line)
    registered = None
    if line == "0.3":
        module, config = (str(given.get(key, "")) for key in ("module", "config"))
        own = {one.module for one in configs_03().values()}
        shipped = module in own or module.startswith(f"{GRAPH_TRAINER}.")
        if module in modules and not shipped:  # TorchTitan looks among its own first
            registered = read_registry(modules[module], config)
            modules[module] = only(modules[module], config)
        else:
            _check_shipped(module, config)
    return StatedTitan(
        line=line,
        given=given,
        registered=registered,
        spelling=spelling,
        modules=modules,
        machine=machine_of(found.command),
        skipped=skipped,
    )


def of_module(spec: CurrentSpec) -> StatedTitan:
    """Reads a module of 0.3 with one configuration. Raises SpecError where it has several."""
    names = config_names(spec.text)
    if len(names) != 1:
        listed = ", ".join(names) or "no function that returns a Trainer.Config"
        rule = f"is a Python module of TorchTitan configurations and has {listed}"
        remedy = "give the command that names one: run_train.sh --module MODULE --config NAME"
        raise fault("current", spec.name, rule, remedy)
    return StatedTitan(
        line="0.3",
        given={"module": MODULE, "config": names[0]},
        registered=read_registry(spec.text, names[0]),
        modules={MODULE: spec.text},
    )


def _check_shipped(module: str, config: str) -> None:
    """Raises SpecError unless these name a configuration of TorchTitan 0.3 that is known here."""
    family = module.rpartition(".")[2]
    graph = module.startswith(f"{GRAPH_TRAINER}.")
    known = [
        f"{GRAPH_TRAINER}_{name}" if graph else name
        for name, one in configs_03().items()
        if one.module == family
    ]
    if config not in known:
        rule = (
            f"is no configuration of TorchTitan 0.3's {family} that is known here"
            if known
            else "is a Python configuration that is not here, and it alone says what runs"
        )
        keep = f"keep {module.replace('.', '/')}.py or its config_registry.py beside the script"
        remedy = f"use {', '.join(known)}; or {keep}" if known else keep
        raise fault("current", f"--module {module} --config {config}", rule, remedy)


def edited_command(
    spec: CurrentSpec, changes: Mapping[str, Value | None], spelling: Mapping[str, str], line: str
) -> dict[str, str]:
    """The script and its TOML with these settings, by file name.

    A setting is changed where it is given. A new one goes into the TOML, or to the flags where
    there is no TOML.
    """
    # an interpreter of probes need not have tomlkit
    from planner.intake.trainer_files.edit_toml import edit_toml

    found = read_command(spec)
    in_toml: dict[str, Value | None] = {}
    in_flags: dict[str, Value | None] = {}
    for key, value in changes.items():
        flagged = key in found.given or found.toml is None
        (in_flags if flagged else in_toml)[key] = value
    files = {}
    if in_toml and found.toml is not None:
        name, text = found.toml
        files[_shown(name)] = edit_toml(
            text, {spelling.get(key, key): value for key, value in in_toml.items()}
        )
    if in_flags:
        files[spec.name] = _with_flags(spec.text, found, in_flags, line)
    return files


def before(spec: CurrentSpec) -> dict[str, str]:
    """The user's own texts, under the names that `edited_command` uses."""
    found = read_command(spec)
    toml = {} if found.toml is None else {_shown(found.toml[0]): found.toml[1]}
    return {**toml, spec.name: spec.text}


def _shown(name: str) -> str:
    """A path in the form that a patch may contain."""
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..", ".")]
    return "/".join(parts)


def _with_flags(
    text: str, found: TitanCommand, changes: Mapping[str, Value | None], line: str
) -> str:
    held = found.command.words()
    words: dict[str, Sequence[str] | None] = {}
    for key, value in changes.items():
        if line == "0.3" and key.startswith(AC):
            continue
        if value is None:
            words[key] = None
            continue
        spelled = flag_words({key: value})
        name = spelled[0].removeprefix("--")
        table, _, last = key.rpartition(".")
        other = f"{table}.{last}" if name != key else f"{table}.no_{last}"
        if isinstance(value, bool) and other in held:
            words[other] = None
        words[name] = spelled[1:]
    find = partial(find_command, files=found.command.script.files)
    new = edit_flags(text, find, words, lambda name: f"--{name}", lambda name: "." in name)
    if line == "0.3" and any(key.startswith(AC) for key in changes):
        now = {**found.given, **{key: value for key, value in changes.items() if value is not None}}
        mode = str(now.get(AC + "mode", "selective"))
        new = _with_subcommand(new, find, mode_words(mode, now.get(AC + "memory_budget")))
    return new


def _with_subcommand(text: str, find: Callable[[str], Command], subcommand: Sequence[str]) -> str:
    """The text with 0.3's subcommand for activation checkpointing, which comes last on the line."""
    command = find(text)
    old = next((field for field in command.fields if field.text.startswith(AC_COMMAND)), None)
    words = " ".join(subcommand)
    if old is not None and old.outer is not None:
        end = command.end if command.end > old.outer[1] else old.outer[1]
        tail = text[old.outer[1] : end]
        kept = re.sub(
            r"[ \t]*(?:\\\n[ \t]*)?--activation[-_]checkpoint\.memory[-_]budget[ =]\S+", "", tail
        )
        return text[: old.outer[0]] + words + kept + text[end:]
    return f"{text[: command.end]} {words}{text[command.end :]}"
