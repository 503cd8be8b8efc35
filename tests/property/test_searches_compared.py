"""A search finds nothing worse than a rule of thumb on one node, by the model's own estimates, nor
than the same search with fields fixed.
"""

import numpy as np
import pytest

from benchmarks.free_against_fixed import compared
from benchmarks.rule_of_thumb import MODELS, Pick, jobs, picks


@pytest.mark.parametrize(("first", "every"), [(0, 97), pytest.param(3, 9, marks=pytest.mark.slow)])
def test_number_one_is_not_behind_the_rule_of_thumb_on_one_node(first: int, every: int) -> None:
    chosen = list(jobs())[first::every]
    found: list[Pick] = list(picks(chosen))
    assert len(found) > 0.8 * len(chosen)
    assert {pick.job for pick in found if pick.behind} == set()
    assert all(np.isfinite(pick.number_one_seconds) for pick in found)
    assert {str(job["model"]) for job in chosen} <= set(MODELS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_nothing_fixed_is_as_good_as_anything_fixed(seed: int) -> None:
    jobs, fixes = (2, 2) if seed == 0 else (20, 3)
    rng = np.random.default_rng(seed)
    found = [one for _ in range(jobs) for one in compared(rng, fixes)]
    assert len(found) >= jobs
    violated = [(one.ratio, one.job, one.fix, one.fixed.short()) for one in found if one.violated]
    assert not violated, violated
