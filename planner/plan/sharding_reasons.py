"""Why a layout shards, in the order of the rule of thumb: replicas if they fit, then FSDP, then TP
and PP.

Source: the project's documents, tests/golden/source_tables.md, "Rules of thumb": fit first, TP
inside a node, then PP or FSDP across nodes, then DP for scale. A sentence stands only where the
step before it in that order does not fit or cannot run: a layout that splits for speed has none.
"""

from collections.abc import Callable, Iterator

import numpy as np

from planner.cost.price import Pricer
from planner.plan.together import Together
from planner.search.choice.ranking import enumerated
from planner.specs.layout import Layout
from planner.units import counted, format_bytes

SHARDS = {1: "the optimizer states", 2: "gradients and optimizer states", 3: "all three"}


def sharding_reasons(together: Together, layout: Layout) -> Iterator[str]:
    if not _is_explained(layout):
        return
    pricer = together.pricer
    usable = pricer.cluster.usable_memory_bytes
    room, split = f"{format_bytes(usable)} usable", layout.tp * layout.pp > 1

    def replicated(one: Layout) -> Layout:
        return _replicated(one, pricer.rules.ep_over_replicas)

    def lean_replica(one: Layout) -> Layout:
        return _lean(replicated(one))

    kept_states, kept_device = _need(together, layout, replicated)
    degrees = {"tp": layout.tp, "pp": layout.pp, "ep": replicated(layout).ep}
    parts = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    part = f"one rank's part ({parts})" if parts else "one replica"
    states = f"the weights, gradients and optimizer states of {part} take"
    if _shards(layout):
        _, lean_device = _need(together, layout, lean_replica)
        if lean_device > usable:
            scale = f", with {layout.dp_replicate} replicas for scale"
            yield (
                f"fit first: {states} {format_bytes(kept_states)}, with as few activations as "
                f"recomputation leaves {format_bytes(lean_device)} of {room}, so DDP does not fit "
                f"and {_sharder(pricer, layout)} shards {SHARDS[layout.zero_stage]} over "
                f"{counted(_shard_ranks(layout), 'GPU')}"
                f"{scale if layout.dp_replicate > 1 else ''}"
            )
    elif layout.dp_degree > 1 and not _shards(layout) and not split and layout.ep == 1:
        yield (
            f"fit first: {states} {format_bytes(kept_states)}, with activations "
            f"{format_bytes(kept_device)} of {room}: it fits, so DDP replicates it for scale"
        )
    if split:
        yield from _split_reasons(together, layout)


def _is_explained(layout: Layout) -> bool:
    return not layout.cpu_offload and layout.num_gpus > 1


def _split_reasons(together: Together, layout: Layout) -> Iterator[str]:
    """Why TP and PP: FSDP over all GPUs does not fit, or has more ranks than the batch feeds."""
    pricer = together.pricer
    usable, least = pricer.cluster.usable_memory_bytes, pricer.rules.zero_stage
    alone = _unsplit(layout, least)

    def lean_alone(one: Layout) -> Layout:
        return _lean(_unsplit(one, least))

    (_, need), ranks = _need(together, layout, lean_alone), alone.dp_degree
    batch = pricer.training.global_batch_size
    inside = "inside a node" if layout.tp <= pricer.cluster.fabric[0].gpus else "across nodes"
    splits = " and ".join(
        text
        for text, degree in (
            (f"TP {layout.tp} {inside}", layout.tp),
            (f"PP {layout.pp}", layout.pp),
        )
        if degree > 1
    )
    beside = [f"{name.upper()} {n}" for name in ("cp", "ep") if (n := getattr(alone, name)) > 1]
    if need > usable:
        yield (
            f"fit first: sharded by {enumerated([_sharder(pricer, alone), *beside])} alone, over "
            f"{counted(_shard_ranks(alone), 'GPU')}, the smallest microbatch still takes "
            f"{format_bytes(need)} of {format_bytes(usable)} usable, so the layers are "
            f"split by {splits}"
        )
    elif ranks > batch:
        yield (
            f"a batch of {counted(batch, 'sequence')} feeds no more than {batch} of the {ranks} "
            f"ranks that data parallelism alone would have, so the others go to {splits}"
        )


def _need(
    together: Together, layout: Layout, change: Callable[[Layout], Layout]
) -> tuple[float, float]:
    """(bytes of weights, gradients and optimizer states, of everything) on the fullest rank."""
    prices, row = together.price(layout, change.__name__, change, concerns=_is_explained)
    memory = prices.memory
    shape = memory.resident.shape
    gradients = np.max([np.broadcast_to(p.gradients, shape) for p in memory.phases()], axis=0)
    states = memory.resident + memory.optimizer + gradients
    return float(states[:, row].max()), float(prices.device_bytes[row])


def _shards(layout: Layout) -> bool:
    return layout.zero_stage > 0 and _shard_ranks(layout) > 1


def _shard_ranks(layout: Layout) -> int:
    return layout.dp_shard * layout.cp


def _sharder(pricer: Pricer, layout: Layout) -> str:
    if layout.zero_stage >= 2 and pricer.rules.framework.runtime == "torch":
        return "FSDP2"
    return f"ZeRO-{layout.zero_stage}"


def _replicated(layout: Layout, ep_over_replicas: bool) -> Layout:
    """Every rank of data parallelism keeps all that its part of the model has."""
    whole = {"dp_replicate": layout.dp_degree, "dp_shard": 1, "zero_stage": 0}
    gathered = {} if ep_over_replicas else {"ep": 1, "etp": 1}
    return layout.model_copy(update=whole | gathered)


def _unsplit(layout: Layout, zero_stage: int) -> Layout:
    """The ranks of TP and PP share the work of FSDP, or of the trainer's own sharding, instead.

    zero_stage: of the trainer's own sharding.
    """
    return layout.model_copy(
        update={
            "dp_shard": layout.dp_shard * layout.tp * layout.pp,
            "tp": 1,
            "pp": 1,
            "etp": 1,
            "virtual_stages": 1,
            "pp_schedule": "1F1B",
            "layers_per_stage": None,
            "sequence_parallel": False,
            "async_tp": False,
            "zero_stage": max(layout.zero_stage, zero_stage),
        }
    )


def _lean(layout: Layout) -> Layout:
    """One sequence at a time, with everything recomputed."""
    return layout.model_copy(update={"micro_batch_size": 1, "ac": "full"})
