"""The loads of ranks: each distinct one once, and every rank finds its own again. A search prices
the deciding ranks alone: no other rank may hold more or compute longer.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.cost_inputs import CostInputs
from planner.cost.loads import BESIDE
from planner.cost.pipeline.stages import rank_layers
from planner.cost.price import Pricer
from planner.schedules import SCHEDULES
from tests.pricing import batch_of, pricer

GIVEN: tuple[dict[str, Any], ...] = (
    {"dp_shard": 16},
    {"dp_shard": 16, "optimizer_in_backward": True},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 1},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 1, "pp_schedule": "GPipe"},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 2, "pp_schedule": "GPipe"},
    {"dp_shard": 8, "pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "tp": 1},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 1, "zero_stage": 3},
)


def priced(
    given: Sequence[dict[str, Any]] = GIVEN, trainer: str = "torchtitan"
) -> tuple[Pricer, LayoutBatch, CostInputs]:
    p = pricer("llama3-8b", 16, trainer=trainer, seq_len=2048)
    batch = batch_of(p, *given)
    return p, batch, CostInputs.of(p, batch, every_rank=True)


def test_every_rank_finds_the_units_microbatches_and_fields_that_it_has() -> None:
    pricer, batch, found = priced()
    loads, at = found.loads.of_ranks, found.loads.at_rank
    for row in range(len(batch)):
        ranks = int(batch.pp[row])
        alone = batch.take(np.array([row]))
        expected = rank_layers(alone, pricer.model, pricer.rules, every_rank=True).units[..., 0]
        assert (found.units[:ranks, :, row] == expected).all()
        assert (found.mean_units[:, row] == expected.mean(axis=0)).all()
        assert found.rank[:ranks, row].tolist() == list(range(ranks))
    assert (loads.m[at] == found.m).all()
    assert (loads.at_unit[at] == found.at_unit).all()
    assert (loads.at_shard[at] == found.at_shard).all()
    for name in BESIDE:
        assert (getattr(loads.batch, name)[at] == getattr(batch, name)).all()


def test_ranks_that_run_the_same_share_a_load_whatever_the_schedule() -> None:
    _, _, found = priced()
    at = found.loads.at_rank
    assert (at[:, 2] == at[:, 3]).all()
    for other in (4, 6):
        assert (at[:, 3] != at[:, other]).all()
    assert at[0, 0] != at[0, 1]
    pipes = found.loads.pipelines.at
    assert pipes[2] != pipes[3] != pipes[4]
    assert pipes[2] == pipes[6]


def test_under_block_n_other_ranks_layers_tell_equal_ranks_apart() -> None:
    """7 of 8 layers are recomputed on both first ranks; the second split's last has no other."""
    given = {"dp_shard": 4, "pp": 4, "micro_batch_size": 1, "ac": "block-7"}
    splits = ([8, 8, 8, 8], [8, 10, 8, 6])
    layouts = [{**given, "layers_per_stage": split} for split in splits]
    _, _, found = priced(layouts, "megatron")
    assert (found.units[0, :, 0] == found.units[0, :, 1]).all()
    first, second = found.loads.at_rank[0]
    assert found.loads.of_ranks.spared[[first, second]].tolist() == [1.0, 0.0]


LAYERS = 126


def splits(num_stages: int, seed: int) -> list[tuple[int, ...]]:
    """Even but for the ends, and with the layers left over anywhere."""
    even = np.full(num_stages, LAYERS // num_stages + 1)
    even[0] -= 1
    even[num_stages - (even.sum() - LAYERS) :] -= 1
    anywhere = np.full(num_stages, LAYERS // num_stages)
    more = np.random.default_rng(seed).permutation(num_stages)[: LAYERS - anywhere.sum()]
    anywhere[more] += 1
    return [tuple(sizes.tolist()) for sizes in (even, anywhere)]


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
@pytest.mark.parametrize("name", SCHEDULES.names)
def test_no_rank_needs_more_than_the_deciding_ones(name: str, trainer: str) -> None:
    schedule = SCHEDULES[name]
    shapes = [(16, 1), (8, 1)] if schedule.single_stage else [(16, 2), (8, 2)]
    if not schedule.single_stage and not schedule.v_shaped:
        shapes += [(16, 5), (8, 4)]
    layouts = []
    for (pp, v), seed, ac in product(shapes, range(3), ("none", "full", "selective-op")):
        degrees = {"pp": pp, "virtual_stages": v, "tp": 8, "dp_shard": 64 // pp}
        given = {**degrees, "pp_schedule": name, "ac": ac}
        layouts += [{**given, "layers_per_stage": sizes} for sizes in splits(pp * v, seed)]
    p = pricer("llama3-405b", 512, seq_len=8192, global_batch_size=512, trainer=trainer)
    batch = batch_of(p, *layouts)
    deciding, every = p.price(batch), p.price(batch, every_rank=True)
    for column in ("least_device_bytes", "device_bytes", "step_seconds"):
        few, all_ranks = getattr(deciding, column), getattr(every, column)
        assert all_ranks == pytest.approx(few, rel=1e-12), column
