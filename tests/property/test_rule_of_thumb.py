"""By the model's own estimates number one is not behind a rule of thumb on one node."""

import numpy as np
import pytest

from benchmarks.rule_of_thumb import MODELS, Pick, jobs, picks


@pytest.mark.parametrize(("first", "every"), [(0, 97), pytest.param(3, 9, marks=pytest.mark.slow)])
def test_number_one_is_not_behind_the_rule_of_thumb_on_one_node(first: int, every: int) -> None:
    chosen = list(jobs())[first::every]
    found: list[Pick] = list(picks(chosen))
    assert len(found) > 0.8 * len(chosen)
    assert {pick.job for pick in found if pick.behind} == set()
    assert all(np.isfinite(pick.number_one_seconds) for pick in found)
    assert {str(job["model"]) for job in chosen} <= set(MODELS)
