"""A search without `search.fix` is never worse than the same search with fields fixed."""

import numpy as np
import pytest

from benchmarks.free_against_fixed import compared


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_nothing_fixed_is_as_good_as_anything_fixed(seed: int) -> None:
    jobs, fixes = (2, 2) if seed == 0 else (20, 3)
    rng = np.random.default_rng(seed)
    found = [one for _ in range(jobs) for one in compared(rng, fixes)]
    assert len(found) >= jobs
    violated = [(one.ratio, one.job, one.fix, one.fixed.short()) for one in found if one.violated]
    assert not violated, violated
