"""A synchronised step waits for its slowest rank."""

from typing import Any

import numpy as np
import pytest

from planner.cost.refine import refine
from planner.cost.stragglers import straggler_share
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from tests.conftest import job_values
from tests.pricing import H100, batch_of, pricer

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


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 4}, {"pp": 4, "micro_batch_size": 2, "pp_schedule": "1F1B"}]
)
def test_the_wait_is_the_share_of_the_busiest_ranks_work(layout: dict[str, Any]) -> None:
    p = pricer("llama3-8b", 32)
    batch = batch_of(p, **layout)
    prices = p.price(batch)
    share = straggler_share(32, p.profile.straggler_delay)
    parts = {name: seconds[0] for name, seconds in prices.parts.items()}
    assert parts["straggler"] == pytest.approx(share * sum(parts[name] for name in BUSY))
    assert share > 0.0
    simulated = refine(p, batch, prices)
    parts |= {"bubble": simulated.bubble_seconds[0], "pp": simulated.send_seconds[0]}
    assert simulated.step_seconds[0] == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize(("num_gpus", "waits"), [(1, False), (8, True)])
def test_an_estimate_says_how_long_it_waits(num_gpus: int, waits: bool) -> None:
    values = job_values("llama3-8b", H100, num_gpus, 2048, 8, layout={"ac": "full"})
    estimate = estimate_job(read_job(values))
    assert (estimate.time.straggler_seconds > 0.0) == waits
    assert estimate.time.total() == pytest.approx(estimate.step_seconds)
