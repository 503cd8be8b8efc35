"""The fastest layouts with a budget, of all and of those with few mechanisms."""

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search.parts import searched
from planner.search.screen import Goal
from planner.search.space.enumerate import build_space
from planner.search.variations import budgets
from planner.search.variations.budgets import Budgeted, LargestBudgets, StepLimits, largest_budgets
from planner.specs.job import SearchSpec
from tests.unit.test_subsearches import JOBS

KEEP = 3


def asked(name: str) -> Budgeted:
    """The layouts of a job that can be within a fifth of the best with a budget, not sought yet."""
    job = read_job(JOBS[name])
    pricer = Pricer.build(job.model, job.cluster, job.training)
    space = build_space(pricer.rules_context, SearchSpec())
    with searched(pricer, lambda: space, Goal(count=10, budgets=KEEP)) as parts:
        worth = 1.2 * float(parts.screened.step_seconds[0])
        (one,) = parts.sides.states[0]._bases(worth)
    return one


def all_of(one: Budgeted) -> LargestBudgets:
    """All of them that have a budget, none left out."""
    rounds = list(one._rounds())
    batch = LayoutBatch.concatenate([each.batch for each in rounds])
    simple = np.concatenate([each.simple for each in rounds])
    limits = StepLimits(every=one.worth, simple=one.worth)
    return largest_budgets(one.pricer, batch, simple, limits, len(batch) + 1, one.dial)


@pytest.mark.parametrize("at_once", [2**13, 64])
@pytest.mark.parametrize("name", ["8B, short of memory", "experts"])
def test_the_fastest_are_sought_among_all(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds are sought together, a few at a time, with what was found as their limits.

    Here all but the fastest eighth of the cells count as simple.
    """
    monkeypatch.setattr(budgets, "CHUNK", at_once)
    monkeypatch.setattr(budgets, "ROUND", 16 * at_once)
    one = asked(name)
    one.simple = np.arange(len(one.cells)) >= len(one.cells) // 8
    every = all_of(one)
    fastest, simple = one.fastest(KEEP)
    few = every.take(every.simple)
    for found, wanted in ((fastest, every.first(KEEP)), (simple, few.first(KEEP))):
        assert len(found.layouts) == KEEP
        assert np.array_equal(found.seconds, wanted.seconds)
        assert found.layouts.layouts() == wanted.layouts.layouts()
        assert np.array_equal(found.hundredths, wanted.hundredths)
    assert simple.seconds[-1] > fastest.seconds[-1]
    assert simple.simple.all()


def test_a_simple_layout_may_be_among_either() -> None:
    limits = StepLimits(every=4.0, simple=9.0)
    assert limits.of(np.array([True, False])).tolist() == [9.0, 4.0]
    seconds, simple = np.array([1.0, 5.0, 3.0, 2.0]), np.array([True, True, False, False])
    assert limits.lowered(seconds, simple, 2) == StepLimits(every=2.0, simple=5.0)
    assert limits.lowered(seconds, simple, 4) == limits, "fewer are known, or none is faster"
