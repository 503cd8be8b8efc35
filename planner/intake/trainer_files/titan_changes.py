"""Which TorchTitan settings must change to run another layout; those with the same meaning stay."""

import math
from collections.abc import Mapping
from dataclasses import replace

from planner.export.base import Export, Value
from planner.export.titan_modules import JOB_MODULE, MODEL_MODULE, REPLACES_FLEX
from planner.export.titan_precision import FLOAT8, MX
from planner.export.titan_read import as_int, read_reshard, read_stages, schedule_name
from planner.export.titan_settings import (
    COMPONENTS,
    IN_BACKWARD,
    LAYERS,
    MODULES,
    RESHARD,
    ROTATE,
    SAME_KEYS,
    SCHEDULE,
)
from planner.export.torchtitan import read_export
from planner.intake.trainer_files.torchtitan import SHARD, StatedTitan
from planner.precision import PRECISIONS
from planner.specs.layout import Layout
from planner.trainers.titan_settings import AC, BY_TOKENS, P, T

CUSTOM_CONFIG, CUSTOM_IMPORT = "job.custom_config_module", "experimental.custom_import"
_FORMER = {"float8": FLOAT8, "mx": MX}  # names of converters before 0.2
PRECISION_CONVERTERS = frozenset(
    {
        words["0.2"]
        for precision in PRECISIONS.values()
        for words in (precision.titan_converters, precision.titan_expert_converters)
        if "0.2" in words
    }
    | {*_FORMER}
)
_OTHERS = frozenset({
    *SAME_KEYS.values(), T + "local_batch_size", T + "global_batch_size", COMPONENTS,
    "compile.enable_async_tensor_parallel",
    AC + "mode", AC + "selective_ac_option", AC + "memory_budget", IN_BACKWARD,
})  # fmt: skip
_LESS = tuple(f"{P}pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
STAGES = (MODULES, LAYERS, *_LESS)


def titan_changes(
    stated: StatedTitan, winner: Layout, exported: Export
) -> tuple[dict[str, Value | None], list[str]]:
    """(setting -> its new value, or None to remove it; what the user's file cannot express).

    exported: the new layout's export, for the release that the user runs.
    """
    wanted = {key: _value(value) for key, value in read_export(exported).items()}
    changes, notes = _modules(stated, winner, wanted, exported)
    now = replace(stated, given={**stated.given, **changes}).settings
    for key, value in wanted.items():
        of_layout = (key.startswith(P) and key not in STAGES) or key in _OTHERS
        if of_layout and not (_inert(key, winner) or _means(key, now, value, winner, wanted)):
            changes[key] = value
    if winner.pp > 1:
        _stages(stated, changes, wanted, exported.num_layers)
    if stated.line == "0.2":
        _converters(stated, changes, wanted, winner)
    elif winner.ac.startswith("memory-budget") and AC + "memory_budget" in changes:
        changes[AC + "mode"] = "memory_budget"  # one word of the command line says both
    if stated.counts_tokens:
        _in_tokens(stated, changes, wanted, winner)
    return changes, notes


def _in_tokens(
    stated: StatedTitan,
    changes: dict[str, Value | None],
    wanted: Mapping[str, Value],
    winner: Layout,
) -> None:
    """Writes batches as the repository counts them since August 2026 (`titan_keys.BY_TOKENS`)."""
    _, tokens, whole, passes = BY_TOKENS
    for key in BY_TOKENS.values():
        changes.pop(key, None)
    seq_len = as_int(stated.settings[T + "seq_len"])
    local = as_int(wanted[T + "local_batch_size"])
    goal = {
        tokens: winner.micro_batch_size * seq_len,
        whole: as_int(wanted[T + "global_batch_size"]) * seq_len,
    }
    if winner.pp > 1:
        goal[passes] = local // winner.micro_batch_size
    changes.update({key: value for key, value in goal.items() if stated.given.get(key) != value})


def _value(value: object) -> Value:
    assert isinstance(value, bool | int | float | str | list), "an export writes nothing else"
    return value


def _inert(key: str, winner: Layout) -> bool:
    if key.startswith(P + "pipeline_parallel_") and key != SAME_KEYS["pp"]:
        return winner.pp == 1
    if key in (P + "enable_sequence_parallel", P + "disable_loss_parallel"):
        return winner.tp == 1
    if key.endswith("enable_async_tensor_parallel"):
        return winner.tp == 1 or not winner.compile
    if key == COMPONENTS:
        return not winner.compile
    return (key == ROTATE and winner.cp == 1) or (
        key == P + "expert_tensor_parallel_degree" and winner.ep == 1
    )


def _means(
    key: str, now: Mapping[str, object], value: Value, winner: Layout, wanted: Mapping[str, object]
) -> bool:
    """Whether the current setting already means the wanted value."""
    held = now.get(key)
    if key == SHARD and held == -1:
        return True  # -1 takes the ranks that the other degrees leave
    if key == RESHARD:
        return read_reshard(held, winner.pp, winner.dp_shard * winner.cp > 1) == winner.zero_stage
    if key == T + "global_batch_size" and isinstance(held, int) and held < 0:
        return value == as_int(wanted[T + "local_batch_size"]) * winner.dp_degree
    if key == SCHEDULE:
        return schedule_name(str(held)) == value
    if key == COMPONENTS:
        return isinstance(held, list) and "model" in held
    if isinstance(value, int | float) and isinstance(held, int | float | str):
        try:
            return math.isclose(float(held), float(value))
        except ValueError:
            return False
    return held == value


def _stages(
    stated: StatedTitan,
    changes: dict[str, Value | None],
    wanted: Mapping[str, Value],
    num_layers: int,
) -> None:
    """Sets the split, unless the file's own settings give the same split with the new degrees."""
    now = {**stated.settings, **{key: value for key, value in changes.items() if value is not None}}
    degree, schedule = as_int(now[SAME_KEYS["pp"]]), schedule_name(str(now[SCHEDULE]))
    means = read_stages(now, degree, schedule, num_layers)
    bare = {key: value for key, value in now.items() if key not in (MODULES, LAYERS)}
    goal = {
        **bare,
        **dict.fromkeys(STAGES[2:], 1),
        **{key: wanted[key] for key in (MODULES, LAYERS) if key in wanted},
    }
    if means == read_stages(goal, degree, schedule, num_layers):
        return
    for key in (MODULES, LAYERS):
        if key in wanted:
            changes[key] = wanted[key]
        elif key in stated.given:
            changes[key] = None
    if MODULES not in wanted:
        changes.update({key: 1 for key in STAGES[2:] if stated.given.get(key, 1) != 1})


def _converters(
    stated: StatedTitan,
    changes: dict[str, Value | None],
    wanted: Mapping[str, Value],
    winner: Layout,
) -> None:
    """Sets 0.2's converters.

    Those of a precision are exchanged. A user's other converters and their settings stay.
    """
    now = stated.settings
    held, goal = _names(now["model.converters"]), _names(wanted["model.converters"])
    kept = [name for name in held if name not in PRECISION_CONVERTERS]
    same = {_FORMER.get(name, name) for name in held if name not in kept} == set(goal)
    if not same:
        changes["model.converters"] = [*kept, *goal]
    gather = f"{FLOAT8}.enable_fsdp_float8_all_gather"
    for key, value in wanted.items():
        theirs = key in stated.given and key.endswith("fqns")
        decides = (
            not same
            or key in (gather, f"{FLOAT8}.recipe_name")
            or (gather in changes and "precompute" in key)
        )
        if key.startswith("quantize.") and decides and not theirs and now.get(key) != value:
            changes[key] = value
    recipe = f"{FLOAT8}.recipe_name"
    other = stated.given.get(recipe) not in (None, "tensorwise")
    if winner.precision == "float8-tensorwise" and other:
        changes[recipe] = "tensorwise"


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _modules(
    stated: StatedTitan, winner: Layout, wanted: Mapping[str, Value], exported: Export
) -> tuple[dict[str, Value | None], list[str]]:
    """Settings that name our modules, where the layout needs one and the user has none there.

    The model stays the user's own: they never name a module that only sets published numbers.
    """
    if stated.line == "0.3":
        return _modules_03(stated, winner, wanted)
    changes: dict[str, Value | None] = {}
    notes = []
    own = stated.given.get(CUSTOM_CONFIG)
    if CUSTOM_CONFIG in wanted and own and own != wanted[CUSTOM_CONFIG]:
        notes.append(
            f"your {own} must let training.mixed_precision_reduce be bfloat16, as our "
            f"{wanted[CUSTOM_CONFIG]} does"
        )
    elif CUSTOM_CONFIG in wanted and not own:
        changes[CUSTOM_CONFIG] = wanted[CUSTOM_CONFIG]
    needed = REPLACES_FLEX in exported.files.get(f"{MODEL_MODULE}.py", "")
    if needed and not stated.given.get(CUSTOM_IMPORT) and stated.model.value is not None:
        changes |= {key: wanted[key] for key in (CUSTOM_IMPORT, "model.name", "model.flavor")}
    return changes, notes


def _modules_03(
    stated: StatedTitan, winner: Layout, wanted: Mapping[str, Value]
) -> tuple[dict[str, Value | None], list[str]]:
    """Changes of 0.3, which states a precision in the model's module.

    Another precision, or a dtype that no flag takes, needs another module.
    """
    ours = stated.given.get("module") == JOB_MODULE
    if stated.precision == winner.precision and (ours or winner.reduce_dtype == "float32"):
        return {}, []
    if stated.given.get("config") == wanted["config"]:
        return {}, []  # its module is written anew
    note = (
        f"--config {wanted['config']} brings its own data set, learning rate and schedule: copy "
        "yours into it"
    )
    return {"module": wanted["module"], "config": wanted["config"]}, [note]
