"""The space once more, the slow way: the product of all domains, every rule, every wish."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.columns import LayoutBatch
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.rules import Context, legal_mask
from planner.rules.base import sharding_degree
from planner.schedules import SCHEDULES
from planner.search.space.domains import CELL_FIELDS, FREE_FIELDS, Domains, domains_of
from planner.specs.job import SearchSpec
from planner.specs.layout import AC_KINDS, CP_METHODS, DTYPES, MOE_DISPATCHERS

NAMES = (*CELL_FIELDS, *FREE_FIELDS)
TINY: dict[str, Any] = {
    "name": "tiny", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 768, "vocab_size": 1000,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
TINY_MOE = {**TINY, "name": "tiny-moe", **EXPERTS}

FLASH_TILE, LONGEST_MICRO_BATCH, SPLIT_BACKWARD = 128, 262_144, ("ZB", "DualPipe", "ZeroBubble")


def named(codes: np.ndarray, names: Sequence[str], *wanted: str) -> np.ndarray:
    return np.isin(names, wanted)[codes]


def large_micro_batch(x: LayoutBatch, c: Context) -> np.ndarray:
    """Larger than 1: its 16-bit inputs fit, it fills the pipeline, and no kernel is saturated."""
    tokens = x.micro_batch_size * c.training.seq_len / x.cp
    input_bytes = 2.0 * tokens * c.model.hidden_size * c.model.num_hidden_layers / (x.tp * x.pp)
    sequences = c.training.global_batch_size / (x.dp_replicate * x.dp_shard)
    full = (x.pp == 1) | (sequences / x.micro_batch_size >= x.pp)
    fits = input_bytes <= c.cluster.gpu.memory_bytes
    return full & fits & (tokens <= LONGEST_MICRO_BATCH)


def schedule_pays(x: LayoutBatch, c: Context) -> np.ndarray:
    splits = [name for name in SCHEDULES.names if any(part in name for part in SPLIT_BACKWARD)]
    split = named(x.pp_schedule, SCHEDULES.names, *splits)
    recomputes = ~named(x.ac_kind, AC_KINDS, "none")
    in_torch = c.training.trainer in ("torchtitan", "fsdp")
    plain = named(x.pp_schedule, SCHEDULES.names, "1F1B")
    return plain | ((x.pp > 1) & ~(split & recomputes & in_torch))


def divided(c: Context, parts: np.ndarray) -> np.ndarray:
    """Megatron may count the embedding, the head or both as a layer."""
    layers = c.model.num_hidden_layers
    return np.any([(layers + ends) % parts == 0 for ends in (0, 1, 2)], axis=0)


def stages_pay(x: LayoutBatch, c: Context) -> np.ndarray:
    """Megatron before 0.13 only splits evenly: where ranks can, stages must too."""
    uneven = divided(c, x.pp) & ~divided(c, x.pp * x.virtual_stages)
    release = (c.training.trainer_version or "99").split(".")
    if c.training.trainer != "megatron" or [int(part) for part in release] >= [0, 13]:
        uneven[:] = False
    return np.where(x.pp > 1, ~uneven, x.virtual_stages == 1)


def steps_once(x: LayoutBatch, c: Context) -> np.ndarray:
    ranks = x.dp_replicate * x.dp_shard * x.micro_batch_size
    once = (c.training.global_batch_size == ranks) & (sharding_degree(x, c) > 1)
    return ~x.optimizer_in_backward | once


def states_fit(x: LayoutBatch, c: Context) -> np.ndarray:
    """AdamW's two states in the master dtype at most float32, beside master weights, fit.

    FSDP adds gradients in reduce_dtype under a pipeline; Megatron parameters and gradients.
    """
    experts = c.model.num_moe_layers * c.model.num_experts * c.model.parameters.expert()
    dense = c.model.total_parameters() - experts
    rank = dense / (x.tp * x.pp) + experts / (x.ep * x.etp * x.pp)
    sharded = (dense + experts) / (x.tp * x.pp * x.dp_shard * x.cp)
    width = np.array([2.0 if name == "bfloat16" else 4.0 for name in DTYPES])
    assert c.training.optimizer == "adamw"
    held = sharded * (width[x.master_dtype] + 8.0 * width[x.master_dtype] / 4.0)
    if c.training.trainer in ("torchtitan", "fsdp"):
        held = held + np.where(x.pp > 1, rank * width[x.reduce_dtype], 0.0)
    else:
        held = held + 4.0 * rank
    return held <= c.cluster.usable_memory_bytes


WANTED: dict[str, Callable[[LayoutBatch, Context], np.ndarray]] = {
    "tp": lambda x, c: x.tp <= max(8, c.cluster.fabric[0].gpus),
    "cp": lambda x, c: (x.cp == 1) | (c.training.seq_len / x.cp >= FLASH_TILE),
    "micro_batch_size": lambda x, c: (x.micro_batch_size == 1) | large_micro_batch(x, c),
    "precision": states_fit,
    "pp_schedule": schedule_pays,
    "virtual_stages": stages_pay,
    "zero_stage": lambda x, c: (
        (x.zero_stage > 0) == ((sharding_degree(x, c) > 1) | (x.cpu_offload & (x.zero_stage > 0)))
    ),
    "cp_method": lambda x, c: (x.cp > 1) | named(x.cp_method, CP_METHODS, "allgather"),
    "moe_dispatcher": lambda x, c: (
        (x.ep > 1) | named(x.moe_dispatcher, MOE_DISPATCHERS, "alltoall", "allgather")
    ),
    "sequence_parallel": lambda x, c: (x.tp > 1) | ~x.sequence_parallel,
    "optimizer_in_backward": steps_once,
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
    fields = domains.by_field.items()
    fewer = {name: replace(d, values=values.get(name, d.values)) for name, d in fields}
    return replace(domains, by_field=fewer)


def small_domains(
    c: Context, search: SearchSpec | None = None, **values: tuple[Any, ...]
) -> Domains:
    schedules = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ZB-1p")
    few = {"virtual_stages": (1, 2, 3), "pp_schedule": schedules}
    domains = domains_of(c, search or SearchSpec())
    free = {name: domains.by_field[name] for name in few if not domains.by_field[name].given}
    kept = {name: tuple(v for v in d.values if v in few[name]) for name, d in free.items()}
    return narrowed(domains, {**kept, **values})


def rows_of(batch: LayoutBatch) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for _, column in batch.columns()), strict=True))


def brute_force(c: Context, domains: Domains) -> LayoutBatch:
    """Every legal, wanted layout of the product; degrees are filtered first, to spare memory."""
    columns = {name: domains.columns(name) for name in NAMES}
    lengths = [len(next(iter(columns[name].values()))) for name in NAMES]
    assert np.prod(lengths[:5]) * np.prod(lengths[5:]) < 5e8
    degrees = np.indices(lengths[:5]).reshape(5, -1)
    named = zip(NAMES, degrees, strict=False)
    product = np.prod([columns[name][name][place] for name, place in named], axis=0)
    degrees = degrees[:, product == c.cluster.num_gpus]
    rest = np.indices(lengths[5:]).reshape(len(NAMES) - 5, -1)
    num, width = degrees.shape[1], rest.shape[1]
    places = [np.repeat(place, width) for place in degrees]
    places += [np.tile(place, num) for place in rest]
    table = {
        column: values[place]
        for name, place in zip(NAMES, places, strict=True)
        for column, values in columns[name].items()
    }
    batch = LayoutBatch(**table, splits=domains.splits)
    wanted = np.ones(len(batch), dtype=np.bool_)
    for name, domain in domains.by_field.items():
        if domain.keep and domain.given:  # stages of what shards nothing are one run
            assert name == "zero_stage"
            wanted &= (batch.dp_shard * batch.cp > 1) | (batch.zero_stage == domain.values[0])
        elif domain.keep:
            wanted &= WANTED[name](batch, c)
    rows = np.flatnonzero(wanted)  # few: rules are dearer than wishes
    rows = rows[legal_mask(batch.take(rows), c)]
    order = dict(zip(NAMES, (place[rows].tolist() for place in places), strict=True))
    return _first_legal(batch.take(rows), domains, order)


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
