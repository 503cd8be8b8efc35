"""Lower bounds of the search against the prices that they stand below, and how close they are."""

from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer, Prices
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.specs.model import ModelSpec
from planner.trainers.registry import resolve_layout

NUM_GPUS = 16
CLUSTER = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": NUM_GPUS})
MODEL = read_model("llama3-8b")
WORK = ("compute", "recompute", "launches", "waits", "tp", "cp", "ep", "straggler")


def pricer(trainer: str = "torchtitan", model: ModelSpec = MODEL, sequence: int = 4096) -> Pricer:
    spec = {"seq_len": sequence, "global_batch_size": 16, "trainer": trainer}
    return Pricer.build(model, CLUSTER, read_training(spec))


def batch_of(p: Pricer, **layout: Any) -> LayoutBatch:
    given = resolve_layout(layout, trainer=p.training.trainer, num_gpus=NUM_GPUS)
    return LayoutBatch.from_layouts([given])


def work(prices: Prices) -> float:
    return float(sum(prices.parts[name][0] for name in WORK))


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 16},
        {"dp_shard": 16, "ac": "full", "compile": True},
        {"dp_shard": 4, "tp": 4, "async_tp": True},
    ],
)
def test_without_a_pipeline_the_bound_is_the_work_of_a_step(layout: dict[str, Any]) -> None:
    """One microbatch; what stands above it are waits, the optimizer and fixed seconds."""
    p = pricer()
    batch = batch_of(p, **layout, micro_batch_size=16 // layout["dp_shard"])
    found = p.price(batch)
    computed = pytest.approx(work(found))
    updated = pytest.approx(work(found) + float(found.parts["optimizer"][0]))
    assert p.lower_bounds(batch)[0][0] == updated
    assert p.time_lower_bounds(batch)[0] == updated
    assert p.layout_lower_bounds(batch)[0] == computed
    whole, compute = p.step_lower_bounds(batch)
    assert compute[0] == computed
    waited = whole[0] - updated.expected
    fsdp = float(found.parts["fsdp"][0] + found.parts["copies"][0])
    assert 0.3 * fsdp < waited <= fsdp  # less what the network costs the kernels beside it


def test_a_step_takes_no_less_than_its_network() -> None:
    """Of so short sequences and so many ranks that gathers take longer than all GEMMs."""
    p = pricer(sequence=128)
    batch = batch_of(p, dp_shard=16, ac="none")
    compute = float(p.layout_lower_bounds(batch)[0])
    for bound in (p.time_lower_bounds(batch)[0], p.step_lower_bounds(batch)[0][0]):
        assert 2.0 * compute < bound <= p.price(batch).step_seconds[0]


def test_half_of_the_bubble_counts_under_any_split() -> None:
    p = pricer("megatron")
    batch = batch_of(p, pp=4, dp_shard=4, micro_batch_size=1)
    found = p.price(batch)
    whole, compute = p.step_lower_bounds(batch)
    outside = found.parts["optimizer"] + found.parts["fsdp"]
    half = 0.5 * found.parts["bubble"]
    assert whole[0] > compute[0] + 0.9 * half[0]
    assert whole[0] <= compute[0] + half[0] + outside[0]


def test_async_tp_and_every_cp_method_are_tried_since_they_only_save() -> None:
    p = pricer()
    plain, asynchronous = (
        p.time_lower_bounds(batch_of(p, dp_shard=4, tp=4, async_tp=way))[0] for way in (False, True)
    )
    assert plain == asynchronous
    assert plain < p.layout_lower_bounds(batch_of(p, dp_shard=4, tp=4, async_tp=False))[0]
    ways = [
        batch_of(p, dp_shard=4, cp=4, micro_batch_size=4, cp_method=way)
        for way in ("allgather", "alltoall")
    ]
    bounds = [float(p.time_lower_bounds(batch)[0]) for batch in ways]
    assert bounds[0] == bounds[1]
    updates = float(p.price(ways[0]).parts["optimizer"][0])
    computed = min(float(p.layout_lower_bounds(x)[0]) for x in ways)
    assert bounds[0] == pytest.approx(computed + updates)


def test_a_pipeline_shares_the_work_equally_between_its_ranks_at_best() -> None:
    p = pricer("megatron")
    batch = batch_of(p, pp=2, dp_shard=8, micro_batch_size=1)
    found = p.price(batch, every_rank=True)
    bound = float(p.layout_lower_bounds(batch)[0])
    assert bound < work(found)
    assert bound > 0.85 * work(found)
    updated = float(p.time_lower_bounds(batch)[0])
    assert bound < updated < bound + 1.1 * float(found.parts["optimizer"][0])


def test_pairs_may_hide_time_only_where_the_schedule_has_them() -> None:
    p = pricer(model=read_model("mixtral-8x7b"))
    given = {"pp": 2, "dp_shard": 4, "tp": 2, "ep": 4, "micro_batch_size": 1, "virtual_stages": 2}
    dual = batch_of(p, **given, pp_schedule="DualPipeV")
    looped = batch_of(p, **given, pp_schedule="Interleaved1F1B")
    assert p.time_lower_bounds(dual)[0] == p.time_lower_bounds(looped)[0]
    assert p.layout_lower_bounds(dual)[0] < p.layout_lower_bounds(looped)[0]


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_memory_counts_states_and_activations_of_a_mean_rank(trainer: str) -> None:
    p = pricer(trainer)
    for layout in ({"tp": 2, "dp_shard": 8}, {"pp": 2, "dp_shard": 8}, {"pp": 4, "dp_shard": 4}):
        batch = batch_of(p, **layout, micro_batch_size=1)
        device = float(p.lower_bounds(batch)[1][0])
        price = p.price(batch, every_rank=True)
        assert device <= float(price.device_bytes[0])
        states = float((price.memory.resident + price.memory.optimizer).mean(axis=0)[0])
        gathered = 0.9 if trainer == "megatron" else 1.0
        assert device > gathered * states + p.cluster.gpu.context_bytes


MOE_ROWS = (
    {"dp_shard": 16, "ac": "none"},
    {"tp": 2, "dp_shard": 8, "ep": 8, "ac": "selective-op"},
    {"pp": 2, "dp_shard": 8, "ep": 2, "ac": "full"},
)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("llama3-8b", ({"dp_shard": 16, "micro_batch_size": 1}, {"tp": 8, "dp_shard": 2})),
        ("mixtral-8x7b", MOE_ROWS),
    ],
)
def test_columns_are_bounded_row_by_row(model: str, given: tuple[dict[str, Any], ...]) -> None:
    p = pricer(model=read_model(model))
    rows = [batch_of(p, **layout) for layout in given]
    together = LayoutBatch.concatenate([*rows, rows[0]])
    seconds, device = p.lower_bounds(together)
    alone = [p.lower_bounds(row) for row in (*rows, rows[0])]
    np.testing.assert_array_equal(seconds, [found[0][0] for found in alone])
    np.testing.assert_array_equal(device, [found[1][0] for found in alone])
