"""TorchTitan's settings: what it assumes where a file states nothing, and the names that it knows.

TorchTitan stops at any other name, and so does the planner.
Sources: planner/catalog/torchtitan_settings.tsv, whose head says where its rows come from; for each
    function of a model's config_registry.py in 0.3.0 what it sets, torchtitan/configs.yaml there.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from planner.catalog.files import document, rows_of

P, T, AC = "parallelism.", "training.", "activation_checkpoint."
Settings = Mapping[str, object]
_ROWS = rows_of("torchtitan_settings")
_IN_LINE = {
    line: {row[0]: row[column] for row in _ROWS if row[column] != "-"}
    for column, line in enumerate(("0.2", "0.3"), 1)
}
KEYS: Mapping[str, frozenset[str]] = {line: frozenset(cells) for line, cells in _IN_LINE.items()}
"""Line of releases -> its settings."""
DEFAULTS: Mapping[str, Settings] = {
    line: {name: json.loads(cell) for name, cell in cells.items() if cell != "+"}
    | {"optimizer.name": "AdamW"}  # in 0.3 that of a class, and no setting
    for line, cells in _IN_LINE.items()
}
BEFORE_02 = frozenset(row[0] for row in _ROWS) - KEYS["0.2"] - KEYS["0.3"]
"""Settings that only releases before 0.2 have."""
FORMER_NAMES: Mapping[str, str] = {name: now for name, *_, now in _ROWS if now != "-"}
"""Name of a setting in releases before 0.2 -> its name now."""
BY_TOKENS: Mapping[str, str] = {
    "training.max_context_length": "training.seq_len",
    "training.num_tokens_per_microbatch_per_dp_rank": "training.local_batch_size",
    "training.num_tokens_per_train_step": "training.global_batch_size",
    "parallelism.num_pp_microbatches": "parallelism.pipeline_parallel_microbatch_size",
}
"""Setting of the repository since 20 August 2026 -> the setting of 0.3.0 that it replaced."""


class Config03(NamedTuple):
    """One function of 0.3's registries: the model that it asks for, and what it sets.

    dispatcher: of routed tokens; "" for the standard one.
    """

    module: str
    flavor: str
    precision: str
    sets: Settings
    dispatcher: str = ""


@cache
def configs_03() -> Mapping[str, Config03]:
    """Functions of 0.3's registries, by name."""
    return {name: Config03(**row) for name, row in document("torchtitan", "configs").items()}


# parts of a 0.3 configuration whose settings depend on the class that its function chose
_CHOSEN_03 = re.compile(
    r"(?:dataloader|tokenizer|validator|loss|override|optimizer\.(?:param_groups|"
    r"optimizer_factory_kwargs_by_name))(?:\.|$)"
)
_GRAPH_03 = re.compile(r"compile\.")


def unknown(keys: Iterable[str], line: str, *, graph: bool = False) -> list[str]:
    """The settings that TorchTitan does not have, in the order given.

    graph: whether experiments/graph_trainer runs, whose compile table is its own.
    """
    known = KEYS[line] | (BEFORE_02 | FORMER_NAMES.keys() if line == "0.2" else frozenset())
    return [
        key
        for key in keys
        if key not in known
        and not (line == "0.3" and _CHOSEN_03.match(key))
        and not (graph and _GRAPH_03.match(key))
    ]
