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

LAYERS = 32


def case(cluster: dict[str, Any] | None = None, **layout: Any) -> tuple[Pricer, LayoutBatch]:
    """Llama 3 8B, all of it on each of 8 data-parallel ranks."""
    job = read_job({
        "model": "llama3-8b", "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8, **(cluster or {})},
        "training": {"seq_len": 8192, "global_batch_size": 32, "trainer": "megatron",
            "trainer_version": "0.16"}, "layout": layout,
    })  # fmt: skip
    pricer = Pricer.build(job.model, job.cluster, job.training)
    return pricer, LayoutBatch.from_layouts([job.layout])


def layer_columns(pricer: Pricer, batch: LayoutBatch) -> tuple[float, float, float]:
    """(bytes that a layer saves, seconds of its forward, of its backward)."""
    found = CostInputs.of(pricer, batch, every_rank=True)
    unit, row = found.unit, found.at_unit[0]
    backward = unit.input_grad[0, row] + unit.weight_grad[0, row]
    return float(unit.costs.saved_bytes[0, row]), float(unit.forward[0, row]), float(backward)


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


def test_bounds_hold_with_activations_on_the_host() -> None:
    pricer, _ = case()
    for layers in (0, 5, 31):
        for tp in (1, 4):
            _, batch = case(tp=tp, activation_offload_layers=layers)
            seconds, device = pricer.lower_bounds(batch)
            prices = pricer.price(batch)
            assert seconds[0] <= prices.step_seconds[0]
            assert pricer.step_lower_bounds(batch)[0][0] <= prices.step_seconds[0]
            assert device[0] <= prices.device_bytes[0]


def test_a_nodes_memory_counts_them() -> None:
    pricer, batch = case()
    saved, _, _ = layer_columns(pricer, batch)
    _, moved = case(activation_offload_layers=10)
    both = (goodput.save_costs(pricer, x, np.ones(1), "sync") for x in (batch, moved))
    before, after = (costs.host_bytes[0] for costs in both)
    assert after - before == pytest.approx(8 * 10 * saved)
