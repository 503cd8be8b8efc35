"""What activations on the host cost and spare, against closed forms."""

from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.cost_inputs import CostInputs
from planner.cost.memory.host_activations import BUFFERED_LAYERS, host_bytes
from planner.cost.price import Pricer
from planner.cost.run import goodput
from planner.intake.jobs import read_job
from tests.conftest import job_values
from tests.pricing import batch_of, check_rows_and_bounds, priced

LAYERS = 32


def case(cluster: dict[str, Any] | None = None, **layout: Any) -> tuple[Pricer, LayoutBatch]:
    """Llama 3 8B, all of it on each of 8 data-parallel ranks."""
    given = {"layout": layout, "trainer": "megatron", "trainer_version": "0.16"}
    job = job_values("llama3-8b", "a100-sxm-80gb", 8, 8192, 32, **given)
    job["cluster"] |= cluster or {}
    return priced(read_job(job))


def layer_columns(pricer: Pricer, batch: LayoutBatch) -> tuple[float, float, float]:
    """(bytes that a layer saves, seconds of its forward, of its backward)."""
    found = CostInputs.of(pricer, batch, every_rank=True)
    unit, row = found.unit, found.at_unit[0]
    backward = unit.input_grad[0, row] + unit.weight_grad[0, row]
    return float(unit.saved_bytes[0, row]), float(unit.forward[0, row]), float(backward)


@pytest.mark.parametrize("layers", [1, 2, 3, 20, 31])
def test_all_layers_but_those_under_way_leave_the_device(layers: int) -> None:
    pricer, batch = case()
    saved, _, _ = layer_columns(pricer, batch)
    _, moved = case(activation_offload_layers=layers)
    before, after = (pricer.price(x).peak_allocated_bytes[0] for x in (batch, moved))
    assert before - after == pytest.approx(max(0, layers - BUFFERED_LAYERS) * saved)
    assert host_bytes(pricer, moved)[0] == pytest.approx(layers * saved)
    assert host_bytes(pricer, batch)[0] == 0.0


@pytest.mark.parametrize("bandwidth", [6, 20, 60, 400])
@pytest.mark.parametrize("layers", [8, 31])
def test_copies_hide_under_the_forward_and_the_backward(bandwidth: int, layers: int) -> None:
    cluster = {"pcie_bandwidth": f"{bandwidth} GB/s"}
    pricer, batch = case(cluster)
    saved, forward, backward = layer_columns(pricer, batch)
    _, moved = case(cluster, activation_offload_layers=layers)
    copies = layers * saved / (bandwidth * 1e9)
    waits = max(0.0, copies - LAYERS * forward) + max(0.0, copies - LAYERS * backward)
    assert (waits > 0) == (bandwidth * (LAYERS / layers) < 50)
    microbatches = 4
    before, after = pricer.price(batch), pricer.price(moved)
    factor = float(np.broadcast_to(after.own_factor, 1)[0])
    more = factor * microbatches * waits
    assert after.step_seconds[0] - before.step_seconds[0] == pytest.approx(more, abs=1e-9)
    assert after.parts["copies"][0] - before.parts["copies"][0] == pytest.approx(more, abs=1e-9)


@pytest.mark.parametrize("tp", [1, 4])
def test_bounds_hold_with_activations_on_the_host(tp: int) -> None:
    p, _ = case()
    moved = [{"tp": tp, "activation_offload_layers": layers} for layers in (0, 5, 31)]
    check_rows_and_bounds(p, batch_of(p, *moved))


def test_a_nodes_memory_counts_them() -> None:
    pricer, batch = case()
    saved, _, _ = layer_columns(pricer, batch)
    _, moved = case(activation_offload_layers=10)
    both = (goodput.save_costs(pricer, x, np.ones(1), "sync") for x in (batch, moved))
    before, after = (costs.host_bytes[0] for costs in both)
    assert after - before == pytest.approx(8 * 10 * saved)
