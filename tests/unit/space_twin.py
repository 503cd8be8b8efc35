"""The space once more, the slow way: the whole product of all domains, then every rule, then every
domain's wishes.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from planner.columns import LayoutBatch
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.rules import Context, legal_mask
from planner.search.space.domains import CELL_FIELDS, FREE_FIELDS, Domains, domains_of
from planner.specs.job import SearchSpec

NAMES = (*CELL_FIELDS, *FREE_FIELDS)
TINY: dict[str, Any] = {
    "name": "tiny", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 768, "vocab_size": 1000,
}  # fmt: skip
TINY_MOE = {
    **TINY,
    "name": "tiny-moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


def context(
    model: Any = None, gpu: str = "h100-sxm-80gb", num_gpus: int = 8, **training: Any
) -> Context:
    per_node = next(n for n in (4, 3, 2, 1) if num_gpus % n == 0)
    return Context(
        model=read_model(TINY if model is None else model),
        cluster=read_cluster({"gpu": gpu, "num_gpus": num_gpus, "gpus_per_node": per_node}),
        training=read_training({"seq_len": 1024, "global_batch_size": 8, **training}),
    )


def narrowed(domains: Domains, values: dict[str, tuple[Any, ...]]) -> Domains:
    """The same domains with fewer values; what they want to keep stays."""
    return replace(
        domains,
        by_field={
            n: replace(d, values=values.get(n, d.values)) for n, d in domains.by_field.items()
        },
    )


def small_domains(
    c: Context, search: SearchSpec | None = None, **values: tuple[Any, ...]
) -> Domains:
    few = {
        "virtual_stages": (1, 2, 3),
        "pp_schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ZB-1p"),
    }
    domains = domains_of(c, search or SearchSpec())
    given = {name for name, domain in domains.by_field.items() if domain.given}
    kept = {
        name: tuple(v for v in domains.by_field[name].values if v in few[name])
        for name in few.keys() - given
    }
    return narrowed(domains, {**kept, **values})


def rows_of(batch: LayoutBatch) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for _, column in batch.columns()), strict=True))


def brute_force(c: Context, domains: Domains) -> LayoutBatch:
    """Every layout of the product that is legal and wanted. Degrees are filtered by their product
    first, to spare memory.
    """
    columns = {name: domains.columns(name) for name in NAMES}
    lengths = [len(next(iter(columns[name].values()))) for name in NAMES]
    assert np.prod(lengths[:5]) * np.prod(lengths[5:]) < 5e8
    degrees = np.indices(lengths[:5]).reshape(5, -1)
    product = np.prod(
        [columns[name][name][place] for name, place in zip(NAMES, degrees, strict=False)], axis=0
    )
    degrees = degrees[:, product == c.cluster.num_gpus]
    rest = np.indices(lengths[5:]).reshape(len(NAMES) - 5, -1)
    num, width = degrees.shape[1], rest.shape[1]
    places = [
        *(np.repeat(place, width) for place in degrees),
        *(np.tile(place, num) for place in rest),
    ]
    table = {
        column: values[place]
        for name, place in zip(NAMES, places, strict=True)
        for column, values in columns[name].items()
    }
    batch = LayoutBatch(**table, splits=domains.splits)
    wanted = legal_mask(batch, c)
    for domain in domains.by_field.values():
        if domain.keep:
            wanted &= domain.keep.mask(batch, c)
    order = dict(zip(NAMES, (place[wanted].tolist() for place in places), strict=True))
    return _first_legal(batch.take(wanted), domains, order)


def _first_legal(batch: LayoutBatch, domains: Domains, places: dict[str, list[int]]) -> LayoutBatch:
    alive = list(range(len(batch)))
    for name in NAMES:
        if not domains.by_field[name].first_legal:
            continue
        best: dict[tuple[int, ...], int] = {}
        for row in alive:
            key = tuple(places[other][row] for other in NAMES if other != name)
            if key not in best or places[name][row] < places[name][best[key]]:
                best[key] = row
        alive = sorted(best.values())
    return batch.take(np.array(alive, dtype=np.int64))
