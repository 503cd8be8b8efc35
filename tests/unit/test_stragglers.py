"""A synchronised step waits for its slowest rank."""

from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.cost.stragglers import straggler_share
from planner.estimates import estimate_job
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.trainers.registry import resolve_layout
from tests.conftest import job_values

BUSY = ("compute", "recompute", "tp", "cp", "ep", "launches", "waits")


def test_the_share_is_the_expected_largest_delay_beyond_the_mean() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 8, 64):
        harmonic = sum(1.0 / k for k in range(1, n + 1))
        assert straggler_share(n, 0.02) == pytest.approx(0.02 * (harmonic - 1.0))
        drawn = rng.exponential(0.02, (40_000, n)).max(axis=1).mean() - 0.02
        assert straggler_share(n, 0.02) == pytest.approx(drawn, abs=4e-4)


def test_one_gpu_waits_for_nobody_and_a_doubling_adds_a_percent() -> None:
    assert straggler_share(1, 0.0144) == 0.0
    steps = [straggler_share(2**k, 0.0144) for k in range(5, 15)]
    assert np.diff(steps) == pytest.approx(0.01, rel=0.03)


def pricer(num_gpus: int, **training: Any) -> Pricer:
    spec = {"seq_len": 4096, "global_batch_size": 64, "trainer": "torchtitan", **training}
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus})
    return Pricer.build(read_model("llama3-8b"), cluster, read_training(spec))


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 4}, {"pp": 4, "micro_batch_size": 2, "pp_schedule": "1F1B"}]
)
def test_the_wait_is_the_share_of_the_busiest_ranks_work(layout: dict[str, Any]) -> None:
    p = pricer(32)
    batch = LayoutBatch.from_layouts([resolve_layout(layout, trainer="torchtitan", num_gpus=32)])
    prices = p.price(batch)
    share = straggler_share(32, p.profile.straggler_delay)
    busy = sum(prices.parts[name][0] for name in BUSY)
    assert prices.parts["straggler"][0] == pytest.approx(share * busy)
    assert share > 0.0
    simulated = refine(p, batch, prices)
    rest = sum(seconds[0] for name, seconds in prices.parts.items() if name not in ("bubble", "pp"))
    assert simulated.step_seconds[0] == pytest.approx(
        rest + simulated.bubble_seconds[0] + simulated.send_seconds[0]
    )


@pytest.mark.parametrize(("num_gpus", "waits"), [(1, False), (8, True)])
def test_an_estimate_says_how_long_it_waits(num_gpus: int, waits: bool) -> None:
    job = read_job(
        job_values("llama3-8b", "h100-sxm-80gb", num_gpus, 2048, 8, layout={"ac": "full"})
    )
    estimate = estimate_job(job)
    assert (estimate.time.straggler_seconds > 0.0) == waits
    assert estimate.time.total() == pytest.approx(estimate.step_seconds)
