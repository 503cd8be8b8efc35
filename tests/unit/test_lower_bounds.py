"""Lower bounds of the search against the prices that they stand below, and how close they are."""

import itertools
from typing import Any

import numpy as np
import pytest

from planner.cost import cost_inputs, lower_bounds
from planner.cost.layer import forward_backward_overlap as pairs
from planner.cost.layer.unit_work import unit_work
from planner.cost.price import Pricer, Prices
from planner.specs.model import ModelSpec
from tests import pricing
from tests.pricing import batch_of

MIXTRAL = "mixtral-8x7b"
WORK = ("compute", "recompute", "launches", "waits", "tp", "cp", "ep", "straggler")


def pricer(
    trainer: str = "torchtitan", model: str = "llama3-8b", seq_len: int = 4096, **more: Any
) -> Pricer:
    given = {"seq_len": seq_len, "global_batch_size": 16, "trainer": trainer, **more}
    return pricing.pricer(model, 16, **given)


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
    p = pricer(seq_len=128)
    batch = batch_of(p, dp_shard=16, ac="none")
    compute = float(p.layout_lower_bounds(batch)[0])
    for bound in (p.time_lower_bounds(batch)[0], p.step_lower_bounds(batch)[0][0]):
        assert 2.0 * compute < bound <= p.price(batch).step_seconds[0]


def test_half_of_the_bubble_counts_under_any_split() -> None:
    p = pricer("megatron")
    batch = batch_of(p, pp=4, dp_shard=4, micro_batch_size=1)
    parts = p.price(batch).parts
    (whole,), (compute,) = p.step_lower_bounds(batch)
    outside, half = parts["optimizer"][0] + parts["fsdp"][0], 0.5 * parts["bubble"][0]
    assert compute + 0.9 * half < whole <= compute + half + outside


def test_async_tp_and_every_cp_method_are_tried_since_they_only_save() -> None:
    p = pricer()
    plain, overlapped = (batch_of(p, dp_shard=4, tp=4, async_tp=way) for way in (False, True))
    assert p.time_lower_bounds(plain)[0] == p.time_lower_bounds(overlapped)[0]
    assert p.time_lower_bounds(plain)[0] < p.layout_lower_bounds(plain)[0]
    given = {"dp_shard": 4, "cp": 4, "micro_batch_size": 4}
    ways = batch_of(p, *({**given, "cp_method": way} for way in ("allgather", "alltoall")))
    bounds = p.time_lower_bounds(ways)
    assert bounds[0] == bounds[1]
    updates = p.price(ways).parts["optimizer"][0]
    assert bounds[0] == pytest.approx(p.layout_lower_bounds(ways).min() + updates)


def test_a_pipeline_shares_the_work_equally_between_its_ranks_at_best() -> None:
    p = pricer("megatron")
    batch = batch_of(p, pp=2, dp_shard=8, micro_batch_size=1)
    found = p.price(batch, every_rank=True)
    bound, updated = p.layout_lower_bounds(batch)[0], p.time_lower_bounds(batch)[0]
    assert 0.85 * work(found) < bound < work(found)
    assert bound < updated < bound + 1.1 * found.parts["optimizer"][0]


def test_pairs_may_hide_time_only_where_the_schedule_has_them() -> None:
    p = pricer(model=MIXTRAL)
    given = {"pp": 2, "dp_shard": 4, "tp": 2, "ep": 4, "micro_batch_size": 1, "virtual_stages": 2}
    names = ("DualPipeV", "Interleaved1F1B")
    both = batch_of(p, *({**given, "pp_schedule": name} for name in names))
    (dual, looped), (least, less) = p.time_lower_bounds(both), p.layout_lower_bounds(both)
    assert dual == looped
    assert least < less
    p = pricer("megatron", MIXTRAL, overlap={"ep": True})  # which several stages a rank allow
    both = batch_of(p, *({**given, "pp_schedule": n, "virtual_stages": v}
                         for n, v in (("1F1B", 1), ("Interleaved1F1B", 2))))  # fmt: skip
    (single, looped), (more, least) = p.time_lower_bounds(both), p.layout_lower_bounds(both)
    assert single == looped
    assert least < more


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"pp": 4}])
def test_memory_counts_states_and_activations_of_a_mean_rank(
    trainer: str, degrees: dict[str, int]
) -> None:
    p = pricer(trainer)
    batch = batch_of(p, **degrees, micro_batch_size=1)
    device, price = p.lower_bounds(batch)[1][0], p.price(batch, every_rank=True)
    states = float((price.memory.resident + price.memory.optimizer).mean(axis=0)[0])
    gathered = 0.9 if trainer == "megatron" else 1.0
    assert gathered * states + p.cluster.gpu.context_bytes < device <= price.device_bytes[0]


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
    p = pricer(trainer, MIXTRAL, 16384)
    dispatchers = p.rules.moe_dispatchers
    if given.get("ep", 1) == 1:
        dispatchers &= {"alltoall", "allgather"}
    every = itertools.product(sorted(p.rules.cp_methods), sorted(dispatchers))
    names = ("cp_method", "moe_dispatcher")
    ways = batch_of(
        p,
        *({**given, "micro_batch_size": 1, **dict(zip(names, way, strict=True))} for way in every),
    )
    assert len(ways) > 1
    seconds, device = p.lower_bounds(ways)
    assert (np.ptp(seconds), np.ptp(device)) == pytest.approx((0.0, 0.0))  # it is the cell's
    assert 0.9 * p.layout_lower_bounds(ways).min() < seconds[0]
    assert seconds[0] <= p.step_lower_bounds(ways)[0].min()
    assert device[0] <= p.price(ways, every_rank=True).device_bytes.min()


def test_dispatchers_are_tried_apart_where_graphs_depend_on_them() -> None:
    """TorchTitan 0.3 captures experts under HybridEP alone: its launches cost nothing."""
    p = pricer(model=MIXTRAL, trainer_version="0.3.0")
    given = {"dp_shard": 16, "ep": 8, "micro_batch_size": 1, "compile": True}
    names = sorted(p.rules.moe_dispatchers)
    ways = batch_of(p, *({**given, "moe_dispatcher": name} for name in names))
    (bound,) = {*p.time_lower_bounds(ways).tolist()}
    assert bound <= p.step_lower_bounds(ways)[0].min()
    assert all(code >= 0 for code in lower_bounds._dispatchers(p))


def test_bounds_of_any_method_take_one_price_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    p = pricer(model=MIXTRAL)
    priced: list[int] = []

    def counted(context: Any, model: ModelSpec) -> Any:
        priced.append(len(context.batch))
        return unit_work(context, model)

    monkeypatch.setattr(cost_inputs, "unit_work", counted)
    p.time_lower_bounds(batch_of(p, dp_shard=4, cp=4, ep=8))
    assert priced == [1]


DUAL = {"dp_shard": 8, "pp": 2, "ep": 8, "pp_schedule": "DualPipeV", "virtual_stages": 2}


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_what_pairs_hide_is_bounded_by_shares_of_their_wires(dispatcher: str) -> None:
    """And that by the wires, so that the least of several methods stays the least without it."""
    p = pricer(model=MIXTRAL)
    batch = batch_of(p, **DUAL, micro_batch_size=1, moe_dispatcher=dispatcher)
    unit = cost_inputs.units_at(p, cost_inputs.distinct_rows(p, batch)[0])
    ways = (pairs.most_saved, pairs.shares_of_wires)
    most, bound = (count(unit, p.profile) for count in ways)
    wires = unit.exposed_forward + unit.exposed_backward
    assert np.all(most <= bound * (1 + 1e-12))
    assert np.all(bound <= wires.sum(axis=0))
    assert most.sum() > 0.0


def test_network_that_pairs_may_hide_bounds_nothing() -> None:
    """Of so short sequences that gathers take longer than all GEMMs."""
    p = pricer(seq_len=128)
    batch = batch_of(p, **{**DUAL, "ep": 1}, micro_batch_size=1, ac="none")
    bound, price = p.time_lower_bounds(batch)[0], p.price(batch)
    wires, compute = price.parts["optimizer"][0], p.layout_lower_bounds(batch)[0]
    assert bound < 1.01 * (compute + wires) < price.step_seconds[0]


def test_what_computes_longer_than_the_limit_is_bounded_by_that_alone() -> None:
    p = pricer()
    layouts = ({"dp_shard": 16, "ac": ac, "micro_batch_size": 1} for ac in ("none", "full"))
    batch = batch_of(p, *layouts)
    whole, compute = p.step_lower_bounds(batch)
    assert np.all(compute < whole)
    limit = float(compute.mean())
    found, same = p.step_lower_bounds(batch, limit)
    np.testing.assert_array_equal(same, compute)
    np.testing.assert_array_equal(found, np.where(compute <= limit, whole, compute))
