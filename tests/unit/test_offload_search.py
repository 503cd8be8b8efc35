"""States on the host are searched beside what fits without."""

from typing import Any

import pytest

from planner.intake.jobs import read_job
from planner.search import one_size
from planner.search.size_candidates import OneSize
from tests.conftest import job_values

# 13B parameters and their states fill 4 A100 so far that layers must be recomputed; states that
# are on the host leave room not to.
TIGHT: dict[str, Any] = job_values(
    "llama2-13b", "a100-sxm-80gb", 4, 4096, 64, trainer="megatron-deepspeed"
)


def searched(**search: Any) -> OneSize:
    job = read_job({**TIGHT, "search": {"prefer": "fastest", **search}})
    return one_size.search_size(job, job.cluster, lambda line: None)


def test_states_on_the_host_win_where_the_device_is_nearly_full() -> None:
    on_device, on_host = (searched(fix={"cpu_offload": value}) for value in (False, True))
    assert on_device.candidates
    assert on_host.best_seconds < 0.9 * on_device.best_seconds
    found = searched()
    assert found.best_seconds == pytest.approx(on_host.best_seconds, rel=0.002)
    assert {layout.cpu_offload for _, _, layout in found.candidates} == {False, True}


def test_a_space_too_large_is_searched_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_size, "MOST_OFFLOADED", 0)
    assert not any(layout.cpu_offload for _, _, layout in searched().candidates)


def test_the_smallest_layouts_are_not_sought_on_the_host() -> None:
    """Who asks for least memory wants room on the device, not the device's states elsewhere."""
    assert not any(x.cpu_offload for _, _, x in searched(objective="memory").candidates)
