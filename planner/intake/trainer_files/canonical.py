"""Puts a layout in a form in which two layouts that train alike compare equal."""

from planner.specs.layout import FieldValue, Layout
from planner.trainers.base import TrainerRules
from planner.trainers.registry import TRAINERS
from planner.trainers.titan_models import even_split


def canonical(layout: Layout, num_layers: int, trainer: str) -> Layout:
    """The layout with every field that has no effect set to its plainest value.

    A split that the trainer would choose itself becomes None.
    """
    rules = TRAINERS[trainer]
    plain: dict[str, object] = {}
    stages = layout.pp * layout.virtual_stages
    if layout.pp == 1:
        plain |= {"pp_schedule": "1F1B", "virtual_stages": 1, "layers_per_stage": None}
    elif layout.layers_per_stage == _own_split(num_layers, stages, rules):
        plain |= {"layers_per_stage": None}
    if layout.cp == 1:
        plain |= {"cp_method": "allgather"}
    if not layout.cpu_offload:
        plain |= {"optimizer_offload_fraction": 1.0}
    if layout.tp == 1:
        plain |= {"sequence_parallel": False, "async_tp": False}
    if layout.ep == 1:
        plain |= {"etp": 1, "moe_dispatcher": "alltoall"}
    if rules.sharding.degrees_decide and layout.dp_shard * layout.cp == 1:
        plain |= {"zero_stage": 0}
    if layout.precision != "float8-tensorwise" and rules.sharding.gathers_float8:
        plain |= {"float8_all_gather": False}
    if rules.compiles and not layout.compile:
        plain |= {"async_tp": False}
    # one data-parallel group, however it is written
    if not rules.sharding.degrees_decide and layout.zero_stage == 0:
        plain |= {"dp_replicate": 1, "dp_shard": layout.dp_degree}
    return layout.model_copy(update=plain)


def _own_split(num_layers: int, stages: int, rules: TrainerRules) -> tuple[int, ...] | None:
    if rules.split == "effective":
        return even_split(num_layers, stages)
    return None if num_layers % stages else (num_layers // stages,) * stages


def really_changed(
    first: Layout, second: Layout, num_layers: int, trainer: str
) -> dict[str, tuple[FieldValue, FieldValue]]:
    """Fields whose change affects what runs, each with both values."""
    a, b = (canonical(layout, num_layers, trainer).model_dump() for layout in (first, second))
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}
