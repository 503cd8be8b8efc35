"""A synchronised step waits for its slowest rank."""

from typing import Any

import numpy as np
import pytest

from planner.cost.refine import refine
from planner.cost.stragglers import straggler_share
from tests.pricing import batch_of, pricer

BUSY = ("compute", "recompute", "tp", "cp", "ep", "launches", "waits")


def test_the_share_is_the_expected_largest_delay_beyond_the_mean() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 8, 64):
        harmonic = sum(1.0 / k for k in range(1, n + 1))
        assert straggler_share(n, 0.02) == pytest.approx(0.02 * (harmonic - 1.0))
        drawn = rng.exponential(0.02, (40_000, n)).max(axis=1).mean() - 0.02
        assert straggler_share(n, 0.02) == pytest.approx(drawn, abs=4e-4)


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
