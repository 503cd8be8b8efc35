"""The trainers by name: one file each, one line each here.

`planner-cli catalog defaults` prints what each assumes when a layout leaves a field unset.
"""

import math

from planner.errors import fault
from planner.registry import Registry
from planner.schedules import SCHEDULES
from planner.specs.layout import Layout, check_layout_values
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.trainers.fsdp import FSDP
from planner.trainers.internevo import INTERNEVO
from planner.trainers.megatron import MEGATRON
from planner.trainers.megatron_bridge import MEGATRON_BRIDGE
from planner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from planner.trainers.release import Release, Releases, named
from planner.trainers.torchtitan import TORCHTITAN

TRAINERS: Registry[TrainerRules] = Registry(
    TORCHTITAN,
    MEGATRON,
    MEGATRON_BRIDGE,
    MEGATRON_DEEPSPEED,
    FSDP,
    INTERNEVO,
    kind="trainer",
    field="training.trainer",
)


def trainer_name(text: str) -> str:
    """The name of the trainer that has this alias; any other text as it is."""
    return next((one.name for one in TRAINERS.values() if text in one.aliases), text)


def release_of(trainer: str, text: str | None) -> Release:
    """The release that a job's rules take: by number, else by date, else the trainer's default."""
    return TRAINERS[trainer].release(text)


def training_release(training: TrainingSpec) -> Release:
    """The release whose rules hold for a job."""
    return release_of(training.trainer, training.trainer_version)


def code_of(training: TrainingSpec) -> str:
    """Name of the trainer whose code a job runs: its rules, releases and measurements hold."""
    return TRAINERS[training.trainer].code_name


def runs_under(training: TrainingSpec, trainer: str, releases: Releases) -> bool:
    """Whether a job runs the code of this trainer, in one of these releases."""
    return code_of(training) == trainer and releases.hold(training_release(training))


def version_under(training: TrainingSpec, trainer: str) -> str | None:
    """The release that a job names, where its trainer is this one; None for another's job."""
    same = training.trainer == trainer
    return training.trainer_version if same else None


def layout_line(layout: Layout, trainer: str) -> str:
    """A layout in one line, with the trainer's own words."""
    return layout.short(TRAINERS[trainer].cp_words)


def layout_defaults(trainer: str, trainer_version: str | None) -> dict[str, object]:
    """Default values of a layout's fields, of the trainer or its distribution."""
    rules = TRAINERS[trainer]
    own = rules.distributions.get(named(trainer_version).distribution, {})
    return {**rules.layout_defaults, **own}


def resolve_layout(
    values: object,
    *,
    trainer: str,
    num_gpus: int,
    trainer_version: str | None = None,
    cuda_graphs: str | None = None,
    field: str = "layout",
) -> Layout:
    """A layout as typed, completed by the trainer's defaults.

    Unset degrees are 1; unset `dp_shard` is what the others leave of num_gpus. A product that
    differs from num_gpus is not an error here: it is a violation, so that an estimate can report
    it. A graph of a whole step holds no dispatch that the host waits for, so that there HybridEP is
    the default (`rules.cuda_graphs`). Raises SpecError for malformed values.
    """
    given = check_layout_values(values, field)
    rules = TRAINERS[trainer]
    degrees = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1)
    usual = layout_defaults(trainer, trainer_version)
    layout: dict[str, object] = {**usual, **degrees, **given}
    if cuda_graphs == "full" and _integer(layout["ep"]) > 1 and "moe_dispatcher" not in given:
        released = rules.at(rules.release(trainer_version))
        static = "hybridep" in released.moe_dispatchers
        layout["moe_dispatcher"] = "hybridep" if static else layout["moe_dispatcher"]
    others = math.prod(_integer(layout[axis]) for axis in ("dp_replicate", "cp", "tp", "pp"))
    layout.setdefault("dp_shard", max(1, num_gpus // others))
    sharding_ranks = _integer(layout["dp_shard"]) * _integer(layout["cp"])
    stage = rules.zero_stage_under_pp if _integer(layout["pp"]) > 1 else rules.zero_stage
    stage_asked = layout.get("zero_stage", 0)
    if rules.sharding.degrees_decide and sharding_ranks == 1 and stage_asked in rules.zero_stages:
        layout["zero_stage"] = 0  # one rank shards nothing, whatever stage is asked of it
    layout.setdefault("zero_stage", stage)
    layout.setdefault("ac", rules.ac)
    if "sequence_parallel" not in given and layout["tp"] == 1:
        layout["sequence_parallel"] = False
    if (
        "virtual_stages" not in given
        and _integer(layout["pp"]) > 1
        and not SCHEDULES[str(layout["pp_schedule"])].single_stage
    ):
        layout["virtual_stages"] = 2
    return Layout.model_validate(layout)


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise fault("layout", value, "must be an integer", "give a whole number")
    return value
