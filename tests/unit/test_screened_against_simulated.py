"""Screened step times against simulated ones: the same order, and the same winner at the top."""

import numpy as np
import pytest
from space_twin import rows_of

from benchmarks import screening
from planner.cost.price import Pricer
from planner.search.space.enumerate import Space

LEAST_SPEARMAN, WITHIN_FIRST, SAMPLE, FIRST = 0.95, 50, 500, 300


@pytest.fixture(scope="module", params=list(screening.JOBS))
def job(request: pytest.FixtureRequest) -> tuple[Pricer, Space]:
    return screening.prepared(request.param)


@pytest.mark.slow
def test_screened_and_simulated_agree(job: tuple[Pricer, Space]) -> None:
    found = screening.faithfulness(*job, SAMPLE, first=FIRST)
    assert found.sample == SAMPLE
    assert found.spearman >= LEAST_SPEARMAN, found
    assert found.winner_place < WITHIN_FIRST, found
    assert found.winner_gain >= 0.0
    # most of the sample is pipelined, or nothing is compared
    assert sum(count for count, _, _ in found.by_schedule.values()) > SAMPLE / 2
    assert all(error < 0.05 for _, _, error in found.by_schedule.values()), found


def test_random_layouts_are_legal_distinct_and_repeatable(job: tuple[Pricer, Space]) -> None:
    _, space = job
    first, again, other = (screening.random_layouts(space, 200, seed) for seed in (0, 0, 1))
    assert len({*rows_of(first)}) == 200
    assert rows_of(first) == rows_of(again) != rows_of(other)
    whole = screening.random_layouts(space, 1, 5)
    assert whole.row(0).num_gpus == first.row(0).num_gpus


def test_a_place_in_the_space_is_found_through_its_cell() -> None:
    _, space = screening.prepared("8B on 8")
    everything = screening.random_layouts(space, space.num_layouts, 0)
    assert rows_of(everything) == rows_of(space.expand(slice(None)))


def test_spearman_by_its_definition() -> None:
    """Without ties 1 - 6 sum d^2 / n (n^2 - 1); ties share their mean place."""
    rng = np.random.default_rng(2)
    first, second = rng.permutation(300), rng.permutation(300)
    by_definition = 1 - 6 * float(((first - second) ** 2).sum()) / (300 * (300**2 - 1))
    found = screening.spearman(first * 2.0, np.exp(second / 100))
    assert found == pytest.approx(by_definition, abs=1e-12)
    assert screening.ranks(np.array([5.0, 1.0, 5.0, 7.0])).tolist() == [1.5, 0.0, 1.5, 3.0]


@pytest.mark.slow
def test_speed_is_measured_on_what_is_counted() -> None:
    pricer, space = screening.prepared("8B on 8")
    count, of_a_core, by_the_wall = screening.priced_a_second(pricer, space)
    assert count == space.num_layouts
    assert min(of_a_core, by_the_wall) > 10_000
