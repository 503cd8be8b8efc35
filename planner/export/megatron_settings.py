"""Megatron-LM's arguments by the fields that they set, and Megatron-Bridge's overrides of them.

Source: planner/catalog/megatron_settings.tsv, one row an argument.
"""

from collections.abc import Mapping

from planner.catalog.files import rows_of

# What several arguments set together -> fields of a layout.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "stages": ("pp_schedule", "virtual_stages", "layers_per_stage"),
    "sharding": ("zero_stage", "dp_replicate"),
    "precision": ("precision", "float8_all_gather", "param_dtype"),
    "offload": ("cpu_offload", "optimizer_offload_fraction"),
}
CAPACITY, PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
_ROWS = rows_of("megatron_settings")
GROUPS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    TOGETHER.get(sets, (sets,)): tuple(name for name, one, *_ in _ROWS if one == sets)
    for sets in dict.fromkeys(row[1] for row in _ROWS)
    if sets not in ("job", "graphs")
}
"""Fields of a layout -> the arguments that set them together."""
DEGREES = {fields[0]: names[0] for fields, names in [*GROUPS.items()][:5]}
"""Degree of a layout -> its argument, a number whose default is 1."""
GRAPH_ARGUMENTS = frozenset(name for name, sets, *_ in _ROWS if sets == "graphs")
KEYS: Mapping[str, str] = {name: key for name, _, key, _ in _ROWS if key != "-"}
"""Argument -> the override of a recipe of Megatron-Bridge that says the same."""
TAKEN_BACK: Mapping[str, object] = {
    name: {"off": False, "null": None}[absent] for name, *_, absent in _ROWS if absent != "-"
}
"""Argument -> the override against a recipe's own value, where the layout has none."""
