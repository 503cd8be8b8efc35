"""Reads TorchTitan's dotted settings as fields of a layout; inverse of `titan_settings`.

`line` is "0.2" or "0.3".
"""

import re
from collections.abc import Mapping

from planner.export.titan_settings import (
    ASYNC_TP,
    COMPONENTS,
    DISPATCHER,
    DISPATCHERS,
    ETP,
    IN_BACKWARD,
    LAYERS,
    MICRO,
    MODULES,
    RESHARD,
    ROTATE,
    SAME_KEYS,
    SCHEDULE,
    default_stages,
)
from planner.schedules import schedules_of
from planner.trainers.titan_models import even_split
from planner.trainers.titan_settings import AC, P, T

_BACKENDS = {theirs: ours for ours, theirs in DISPATCHERS.items()}
_COMM_BACKEND = re.compile(r"\bmoe_comm_backend=[\"'](\w+)[\"'](?:,\n|, (?!\*\*)|\)$)")


def read_settings(settings: Mapping[str, object], line: str, num_layers: int) -> dict[str, object]:
    """Fields of the layout that these settings give; inverse of `layout_settings`.

    settings: those of a file, completed by `titan_defaults.DEFAULTS`, with dp_shard as a number.
    Precision is read elsewhere.
    """
    values: dict[str, object] = {name: settings[key] for name, key in SAME_KEYS.items()}
    tp, pp, cp, dp_shard = (
        as_int(settings[SAME_KEYS[name]]) for name in ("tp", "pp", "cp", "dp_shard")
    )
    values["compile"], _ = read_compiled(settings)
    values["async_tp"] = settings[ASYNC_TP[line]]
    values["zero_stage"] = read_reshard(settings[RESHARD], pp, dp_shard * cp > 1)
    schedule = schedule_name(str(settings[SCHEDULE]))
    values["pp_schedule"] = schedule
    values["micro_batch_size"] = settings[MICRO if pp > 1 else (T + "local_batch_size")]
    values.update(read_stages(settings, pp, schedule, num_layers))
    values.update(_read_ac(settings, line))
    if line == "0.3":
        rest = {"etp": 1, "cp_method": "allgather", "optimizer_in_backward": False}
        return {**values, **rest, "sequence_parallel": settings[P + "enable_sequence_parallel"]}
    return {
        **values,
        "etp": settings[ETP],
        "sequence_parallel": tp > 1,
        "cp_method": settings[ROTATE],
        "moe_dispatcher": _BACKENDS.get(str(settings[DISPATCHER]), "alltoall"),
        "optimizer_in_backward": settings[IN_BACKWARD],
    }


def read_compiled(settings: Mapping[str, object]) -> tuple[bool, bool | None]:
    """(layout.compile, training.fused_cross_entropy), which is None where both are alike."""
    parts = settings[COMPONENTS] if settings[SAME_KEYS["compile"]] else ()
    model, loss = (isinstance(parts, list) and name in parts for name in ("model", "loss"))
    return model, None if model == loss else loss


def read_reshard(policy: object, pp: int, sharded: bool) -> int:
    """The zero_stage that a policy stands for.

    sharded: whether parameters are sharded at all (dp_shard x cp > 1).
    """
    if policy == "default":
        return (3 if pp == 1 else 2) if sharded else 0
    return 3 if policy == "always" else 2


def read_dispatcher_03(module: str | None) -> dict[str, object]:
    """The dispatcher in the job's module; inverse of `backends_03`."""
    found = None if module is None else _COMM_BACKEND.search(module)
    return {"moe_dispatcher": _BACKENDS.get(found[1], "alltoall") if found else "alltoall"}


def schedule_name(text: str) -> str:
    """The schedule's own spelling; TorchTitan takes a name in any case, as torch does."""
    return next((name for name in schedules_of("torch") if name.lower() == text.lower()), text)


def _read_ac(settings: Mapping[str, object], line: str) -> dict[str, object]:
    mode = settings[AC + "mode"]
    if mode == "memory_budget":
        return {"ac": f"memory-budget-{settings[AC + 'memory_budget']}"}
    if mode != "selective":
        return {"ac": mode}
    option = "op" if line == "0.3" else settings[AC + "selective_ac_option"]
    return {"ac": "selective-op" if option == "op" else f"selective-layer-{option}"}


def read_stages(
    settings: Mapping[str, object], pp: int, schedule: str, num_layers: int
) -> dict[str, object]:
    """virtual_stages and layers_per_stage that TorchTitan derives from its settings."""
    if pp == 1:
        return {"virtual_stages": 1, "layers_per_stage": None}
    parts, uniform = settings.get(MODULES), settings.get(LAYERS)
    if isinstance(parts, list):
        split = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
        return {"virtual_stages": max(1, len(parts) // pp), "layers_per_stage": split}
    first, last = (
        as_int(settings[P + f"pipeline_parallel_{end}_stage_less_layers"])
        for end in ("first", "last")
    )
    stages = pp * default_stages(schedule)
    if uniform is not None:
        stages = -(-(num_layers + first + last) // as_int(uniform))
    own = None if (first, last) == (1, 1) else even_split(num_layers, stages, first, last)
    return {"virtual_stages": max(1, stages // pp), "layers_per_stage": own}


def as_int(value: object) -> int:
    assert isinstance(value, int)
    return value
