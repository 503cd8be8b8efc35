"""Lower bounds of the search against the prices that they stand below, and how close they are."""

from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost import cost_inputs, cost_rows, lower_bounds
from planner.cost.layer import forward_backward_overlap as pairs
from planner.cost.layer.unit_work import unit_work
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


@pytest.mark.parametrize("layout", [
    {"dp_shard": 16},
    {"dp_shard": 16, "ac": "full", "compile": True},
    {"dp_shard": 4, "tp": 4, "async_tp": True},
])  # fmt: skip
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
    given = {"dp_shard": 4, "cp": 4, "micro_batch_size": 4}
    ways = [batch_of(p, **given, cp_method=way) for way in ("allgather", "alltoall")]
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


METHODS = (  # the last is of TorchTitan alone
    {"dp_shard": 4, "cp": 4, "ep": 1},
    {"dp_shard": 16, "ep": 8},
    {"dp_shard": 4, "cp": 4, "ep": 16},
    {"dp_shard": 2, "pp": 2, "tp": 2, "cp": 2, "ep": 4},
    {"dp_shard": 16, "ep": 8, "ac": "full"},
    {"dp_shard": 8, "pp": 2, "ep": 8, "pp_schedule": "DualPipeV", "virtual_stages": 2},
)


@pytest.mark.parametrize(
    ("trainer", "given"),
    [*(("torchtitan", one) for one in METHODS), *(("megatron", one) for one in METHODS[:-1])],
)
def test_any_dispatcher_and_cp_method_is_below_each(trainer: str, given: dict[str, Any]) -> None:
    """And not far below the best of them."""
    p = pricer(trainer, read_model("mixtral-8x7b"), sequence=16384)
    rules = p.rules
    ways = [
        batch_of(p, **given, micro_batch_size=1, cp_method=method, moe_dispatcher=dispatcher)
        for method in sorted(rules.cp_methods)
        for dispatcher in sorted(rules.moe_dispatchers)
        if given.get("ep", 1) > 1 or dispatcher in ("alltoall", "allgather")
    ]
    assert len(ways) > 1
    bounds = np.array([p.lower_bounds(way) for way in ways])[:, :, 0]
    exact = np.array([p.step_lower_bounds(way)[0][0] for way in ways])
    device = np.array([p.price(way, every_rank=True).device_bytes[0] for way in ways])
    assert np.ptp(bounds, axis=0) == pytest.approx(0.0)  # it is the cell's
    assert bounds[0, 0] <= exact.min()
    assert bounds[0, 0] > 0.9 * min(float(p.layout_lower_bounds(way)[0]) for way in ways)
    assert bounds[0, 1] <= device.min()


def test_dispatchers_are_tried_apart_where_graphs_depend_on_them() -> None:
    """TorchTitan 0.3 captures experts under HybridEP alone: its launches cost nothing."""
    spec = {"seq_len": 4096, "global_batch_size": 16, "trainer_version": "0.3.0"}
    p = Pricer.build(read_model("mixtral-8x7b"), CLUSTER, read_training(spec))
    ways = [
        batch_of(p, dp_shard=16, ep=8, moe_dispatcher=name, micro_batch_size=1, compile=True)
        for name in sorted(p.rules.moe_dispatchers)
    ]
    bound = {float(p.time_lower_bounds(way)[0]) for way in ways}
    assert len(bound) == 1
    assert bound.pop() <= min(float(p.step_lower_bounds(way)[0][0]) for way in ways)
    assert all(code >= 0 for code in lower_bounds._dispatchers(p))


def test_bounds_of_any_method_take_one_price_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    p = pricer(model=read_model("mixtral-8x7b"))
    priced: list[int] = []

    def counted(context: Any, model: ModelSpec) -> Any:
        priced.append(len(context.batch))
        return unit_work(context, model)

    monkeypatch.setattr(cost_inputs, "unit_work", counted)
    p.time_lower_bounds(batch_of(p, dp_shard=4, cp=4, ep=8))
    assert priced == [1]


DUAL = {"dp_shard": 8, "pp": 2, "ep": 8, "pp_schedule": "DualPipeV", "virtual_stages": 2}


def test_what_pairs_hide_is_bounded_by_shares_of_their_wires() -> None:
    """And that by the wires, so that the least of several methods stays the least without it."""
    p = pricer(model=read_model("mixtral-8x7b"))
    for one in ("alltoall", "deepep"):
        batch = batch_of(p, **DUAL, micro_batch_size=1, moe_dispatcher=one)
        unit = cost_inputs.units_at(p, cost_rows.distinct_rows(p, batch)[0])
        ways = (pairs.most_saved, pairs.shares_of_wires)
        most, bound = (count(unit.costs, p.profile) for count in ways)
        wires = unit.costs.exposed_forward + unit.costs.exposed_backward
        assert np.all(most <= bound * (1 + 1e-12))
        assert np.all(bound <= wires.sum(axis=0))
        assert most.sum() > 0.0


def test_network_that_pairs_may_hide_bounds_nothing() -> None:
    """Of so short sequences that gathers take longer than all GEMMs."""
    p = pricer(sequence=128)
    batch = batch_of(p, **{**DUAL, "ep": 1}, micro_batch_size=1, ac="none")
    bound, price = p.time_lower_bounds(batch)[0], p.price(batch)
    wires, compute = price.parts["optimizer"][0], p.layout_lower_bounds(batch)[0]
    assert bound < 1.01 * (compute + wires) < price.step_seconds[0]


def test_what_computes_longer_than_the_limit_is_bounded_by_that_alone() -> None:
    p = pricer()
    batch = LayoutBatch.concatenate(
        [batch_of(p, dp_shard=16, ac=ac, micro_batch_size=1) for ac in ("none", "full")]
    )
    whole, compute = p.step_lower_bounds(batch)
    assert np.all(compute < whole)
    limit = float(compute.mean())
    found, same = p.step_lower_bounds(batch, limit)
    np.testing.assert_array_equal(same, compute)
    np.testing.assert_array_equal(found, np.where(compute <= limit, whole, compute))
