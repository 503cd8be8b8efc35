"""TorchTitan: train.toml for 0.2, `--module/--config` with flags for 0.3, and the way back.

The scripts that start them are here too.
Sources: torchtitan 0.2.2 config/manager.py (precedence of CLI, TOML and defaults), train.py,
    run_train.sh; 0.3.0 config/manager.py (registry of configs), trainer.py (what it refuses).
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.export.base import Draft, Export, Settings, Value, flatten, overlay_gaps, write_toml
from planner.export.commands import EXPANDABLE, Launch, plain_value
from planner.export.titan_modules import (
    CONFIG_MODULE,
    JOB_MODULE,
    MODEL_MODULE,
    WIDER_REDUCE_02,
    changed_flavor_02,
    changed_flavor_03,
    job_03,
    model_03,
    register_02,
)
from planner.export.titan_network import name_what_is_left_out
from planner.export.titan_precision import (
    precision_02,
    precision_03,
    read_precision_02,
    read_precision_03,
)
from planner.export.titan_read import read_dispatcher_03, read_settings
from planner.export.titan_settings import (
    AC_COMMAND,
    ac_subcommand,
    backends_03,
    layout_settings,
    training_settings,
)
from planner.specs.layout import Layout
from planner.trainers.registry import TRAINERS, release_of, runs_under, version_under
from planner.trainers.release import GRAPH_TRAINER, Releases
from planner.trainers.titan_models import Flavor, class_for, find_flavor, lacking
from planner.trainers.titan_networks import differences
from planner.trainers.titan_settings import AC, DEFAULTS
from planner.units import counted

OLDEST = "0.2.0"
WRITTEN = tuple(
    known.number
    for known in TRAINERS["torchtitan"].history
    if release_of("torchtitan", known.number).since(OLDEST)
)
"""The releases whose settings we write."""
PYTHON_CONFIGS = Releases(since="0.3", since_day="2026-03-01")
"""With configurations in Python: pull request 2207 of February 2026 edits config/configs.py."""
CONFIG_FILE = "train.toml"
TABLES = (
    *("job", "model", "optimizer", "training", "parallelism", "activation_checkpoint", "compile"),
    "checkpoint",
)
LIST_FLAGS = frozenset(
    {"compile.components", "model.converters", "quantize.linear.float8.filter_fqns"}
)
YOURS = (
    "Data set, tokenizer folder, learning rate and number of steps are not part of a layout: set "
    "your own."
)


def write(draft: Draft) -> Export:
    """The layout for one release of TorchTitan: the job's where none is asked for, else 0.2.2.

    A release that we do not know is written as the newest before it, and one before 0.2.0 as 0.2.0;
    a note says so.
    """
    training = draft.training
    release = release_of("torchtitan", draft.asked or version_under(training, "torchtitan"))
    number = release.number if release.since(OLDEST) else OLDEST
    if PYTHON_CONFIGS.hold(release):
        number = WRITTEN[-1]
    draft.version = number
    if number != release.number or not release.exact:
        draft.notes.append(
            f"Written for TorchTitan {number}: {release.named.text} is no release whose settings "
            "we write."
        )
    priced = release_of("torchtitan", version_under(training, "torchtitan"))
    if runs_under(training, "torchtitan", Releases()) and priced.number != number:
        draft.notes.append(
            f"Priced for TorchTitan {priced.number}, whose loss, CUDA graphs and attention may "
            f"differ from {number}'s: give training.trainer_version to plan for the one you run."
        )
    if draft.cluster.gpu.vendor == "cpu":
        draft.notes.append(
            "TorchTitan itself needs GPUs: on a CPU pool `planner-cli probe` runs this layout "
            "with the reference program."
        )
    if release.named.distribution == GRAPH_TRAINER:
        rule = (
            "is written for the core trainer: experiments/graph_trainer takes --module "
            "graph_trainer.MODEL --config graph_trainer_CONFIG with the same flags for "
            "parallelism, and --compile.memory_policy for recomputation"
        )
        remedy = "change these two by hand, or leave graph_trainer out of trainer_version"
        draft.gap("training.trainer_version", rule, remedy, shown=release.named.text)
    draft.check_common()
    draft.notes.append(YOURS)
    return _export_02(draft) if _line(draft.version) == "0.2" else _export_03(draft)


def _line(version: str) -> str:
    return version.rpartition(".")[0]


def _export_02(draft: Draft) -> Export:
    settings: Settings = {
        "job.description": f"{draft.name}: {draft.layout.short()}",
        "job.dump_folder": "./outputs",
    }
    if draft.layout.reduce_dtype != "float32":
        draft.files[f"{CONFIG_MODULE}.py"] = WIDER_REDUCE_02
        settings["job.custom_config_module"] = CONFIG_MODULE
    settings.update(_model_02(draft))
    settings.update(precision_02(draft))
    settings.update(training_settings(draft, "0.2"))
    settings["training.dataset"] = "c4"
    settings.update(layout_settings(draft, "0.2"))
    header = (
        f"TorchTitan {draft.version}: {draft.name} on {counted(draft.layout.num_gpus, 'GPU')}",
        "written by planner-cli export",
    )
    draft.files[CONFIG_FILE] = write_toml(dict(sorted(settings.items(), key=_by_table)), header)
    return _finish(draft, arguments=("--job.config_file", CONFIG_FILE))


def _by_table(item: tuple[str, Value]) -> str:
    """Order of tables in the file; within a table, the order in which settings were given."""
    table = item[0].rpartition(".")[0]
    return f"{TABLES.index(table) if table in TABLES else len(TABLES)} {table}"


def _model_02(draft: Draft) -> Settings:
    layout, model = draft.layout, draft.model
    flavor = find_flavor(model, "0.2")
    assets: Settings = {"model.hf_assets_path": f"./assets/hf/{draft.name}"}
    if flavor is not None:
        name_what_is_left_out(draft, flavor.module, "0.2", flavor)
        changes = _changes(draft, flavor)
        plain = flavor.flex and layout.cp > 1
        shipped, long = flavor, draft.training.seq_len > model.sliding_window and layout.cp == 1
        if model.sliding_layers and long and flavor.long_context:
            shipped = replace(flavor, flavor=flavor.long_context)
        if not changes and not plain:
            return {"model.name": shipped.module, "model.flavor": shipped.flavor, **assets}
        draft.files[f"{MODEL_MODULE}.py"] = changed_flavor_02(
            model, draft.name, shipped, changes, draft.version, plain_attention=plain
        )
    elif _can_register(draft, "0.2"):
        draft.files[f"{MODEL_MODULE}.py"] = register_02(model, draft.name)
    return {
        "model.name": MODEL_MODULE,
        "model.flavor": "custom",
        **assets,
        "experimental.custom_import": MODEL_MODULE,
    }


def _changes(draft: Draft, flavor: Flavor) -> dict[str, object]:
    """Fields in which the model differs from the one TorchTitan ships; a note names them."""
    changes = differences(draft.model, flavor.facts)
    if draft.version == "0.2.0":
        for field in ("n_group", "topk_group"):
            changes.pop(field, None)
    if flavor.num_layers is not None:
        changes["num_hidden_layers"] = flavor.num_layers
    if changes:
        names = ", ".join(changes)
        draft.notes.append(
            f"TorchTitan's {flavor.module} {flavor.flavor} has other values of {names}: the "
            "export sets the model's own."
        )
    return changes


def _can_register(draft: Draft, line: str) -> bool:
    """Whether the shapes fit one of TorchTitan's model classes."""
    model = draft.model
    if lacking(model, line):  # as the rules say
        return False
    kind = class_for(model)
    name = draft.name
    draft.notes.append(f"TorchTitan ships no {name}: it is registered with the class of {kind}.")
    name_what_is_left_out(draft, kind, line, None)
    if model.sliding_layers and model.sliding_window < draft.training.seq_len:
        rule, remedy = f"is not in TorchTitan's {kind}", "expect the time of full attention"
        draft.gap("model.sliding_window", rule, remedy, blocking=False)
    return True


def _export_03(draft: Draft) -> Export:
    settings = {**training_settings(draft, "0.3"), **layout_settings(draft, "0.3")}
    module, config = _job_03(draft)
    subcommand = ac_subcommand(draft.layout.ac)
    arguments = ("--module", module, "--config", config, *flag_words(settings))
    return _finish(draft, arguments=arguments, subcommand=subcommand)


def flag_words(settings: Mapping[str, Value]) -> list[str]:
    """Dotted settings as flags; inverse of `read_titan_flags`."""
    flags: list[str] = []
    for key, value in settings.items():
        table, _, name = key.rpartition(".")
        if isinstance(value, bool):
            flags.append(f"--{table}.{name}" if value else f"--{table}.no_{name}")
        elif isinstance(value, list):
            words = [",".join(item) if isinstance(item, list) else item for item in value]
            flags += [f"--{key}", *(words if isinstance(value[0], list) else [",".join(words)])]
        else:
            flags += [f"--{key}", str(value)]
    return flags


def _job_03(draft: Draft) -> tuple[str, str]:
    """(--module, --config): TorchTitan's own if flags can set the rest, else our module."""
    flavor = find_flavor(draft.model, "0.3")
    converters, backends = precision_03(draft), backends_03(draft)
    chunked = draft.training.chunked_loss is not False
    wide_reduce = draft.layout.reduce_dtype != "float32"
    family, name, custom, config = "", "custom", "", None
    if flavor is not None:
        name_what_is_left_out(draft, flavor.module, "0.3", flavor)
        family, name, config = flavor.module, flavor.flavor, flavor.config
        if changes := _changes(draft, flavor):
            name, custom = "custom", changed_flavor_03(draft.model, flavor, changes)
    elif _can_register(draft, "0.3"):
        family, custom = model_03(draft.model)
    if config is not None and chunked and not (converters or backends or wide_reduce or custom):
        return family, config
    if not family:
        lost = ["moe_dispatcher"] * ("moe_comm_backend" in backends)
        for field in lost + ["precision"] * bool(converters):
            rule = "is part of a model's module, and this model has none"
            draft.gap(field, rule, "see the fault of the model")
    else:
        ways = {"wide_reduce": wide_reduce, "chunked_loss": chunked}
        module = job_03(draft.name, family, name, converters, custom, backends=backends, **ways)
        draft.files[f"{JOB_MODULE}.py"] = module
    return JOB_MODULE, JOB_MODULE


def _finish(
    draft: Draft, *, arguments: tuple[str, ...], subcommand: tuple[str, ...] = ()
) -> Export:
    expandable = draft.training.expandable_segments is not False
    environment = EXPANDABLE if expandable else {}
    program = ("-m", "torchtitan.train")
    launch = Launch(draft, program, arguments, subcommand, environment)
    draft.files.update(launch.files())
    return draft.finished("torchtitan", launch.command(), (*arguments, *subcommand))


def parse_back(exported: Export) -> Layout:
    """The layout of an export, read from its TOML or its flags; inverse of `write`."""
    line = _line(exported.version)
    settings = {**DEFAULTS[line], **read_export(exported)}
    module = exported.files.get(f"{JOB_MODULE}.py")
    own = (
        read_precision_02(settings)
        if line == "0.2"
        else {**read_precision_03(module), **read_dispatcher_03(module)}
    )
    return overlay_gaps(
        {**read_settings(settings, line, exported.num_layers), **own}, exported.gaps
    )


def read_export(exported: Export) -> dict[str, object]:
    """The dotted settings that an export writes, from its TOML or its flags."""
    if _line(exported.version) == "0.2":
        return flatten(tomllib.loads(exported.files[CONFIG_FILE]))
    return read_titan_flags(exported.arguments)


def read_titan_flags(arguments: Sequence[str]) -> dict[str, object]:
    """Dotted settings of TorchTitan's flags, as values of the kind they are written in.

    --module and --config become `module` and `config`. 0.3's subcommand for activation
    checkpointing becomes the settings that 0.2 has for it.
    """
    settings: dict[str, object] = {}
    for flag, words in titan_flags(arguments).items():
        table, _, name = flag.rpartition(".")
        if name == "memory_budget":
            settings[flag] = words[0] if words else "0.5"
        elif not words:
            settings[
                f"{table}.{name.removeprefix('no_')}" if table else name
            ] = not name.startswith("no_")
        elif name == "module_fqns_per_model_part":
            settings[flag] = [word.split(",") for word in words]
        elif flag in LIST_FLAGS:
            settings[flag] = words[0].split(",") if words[0] else []
        else:
            settings[flag] = plain_value(words[0])
    return settings


def titan_flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Flag (as a dotted setting) -> its words.

    --a.b=c and --a.b c are the same, and so are - and _ in a name, as in tyro.
    """
    flags: dict[str, list[str]] = {}
    name = None
    for word in arguments:
        if word.startswith(AC_COMMAND):
            flags[AC + "mode"] = [word.removeprefix(AC_COMMAND).replace("-", "_")]
            name = None
        elif word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            name = key.replace("-", "_")
            flags[name] = [value] if equals else []
        elif name is not None:
            flags[name].append(word)
    return flags
