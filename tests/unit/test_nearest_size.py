"""The nearest that would fit is the nearest: every smaller change is searched and does not fit."""

from typing import Any

import pytest

from planner.intake.jobs import read_job
from planner.search.infeasible.suggested_fixes import _sizes_between, fitting_changes
from planner.search.one_size import search_size
from planner.specs.job import Job
from tests.conftest import job_values, one_fast

OFFLOADED, ON_DEVICE = {"ac": "full", "cpu_offload": True}, {"cpu_offload": False}
AMPERE, HOPPER = "a100-sxm-40gb", "h100-sxm-80gb"
JOBS: dict[str, dict[str, Any]] = {
    "on the device": job_values("llama3-70b", AMPERE, 8, 8192, 96, search={"fix": ON_DEVICE}),
    "no power of two": job_values("mixtral-8x22b", AMPERE, 8, 4096, 48, search={"fix": OFFLOADED}),
    "Megatron": job_values("llama3-70b", HOPPER, 8, 8192, 96, trainer="megatron"),
}


def value_that_fits(job: Job, field: str) -> int:
    """The nearest of the changes of this field."""
    found = fitting_changes(job, job.cluster, lambda _: None)
    value = next(change.value for change in found if change.field == field)
    assert isinstance(value, int)
    return value


def fits(job: Job, num_gpus: int | None = None) -> bool:
    cluster = job.cluster.with_num_gpus(num_gpus or job.cluster.num_gpus)
    return bool(search_size(job, cluster, lambda _: None).candidates)


@pytest.mark.parametrize("name", one_fast(*JOBS))
def test_the_fewest_gpus_are_the_fewest(name: str) -> None:
    job = read_job(JOBS[name])
    count = value_that_fits(job, "cluster.num_gpus")
    assert fits(job, count)
    for smaller in _sizes_between(job.cluster, count):
        assert not fits(job, smaller), smaller


def test_sizes_are_whole_nodes() -> None:
    cluster = read_job(JOBS["Megatron"]).cluster
    assert _sizes_between(cluster, 64) == [16, 24, 32, 40, 48, 56]


def test_a_shorter_sequence_is_the_longest_that_fits() -> None:
    fix = {"ac": "none", "tp": 4, "dp_shard": 2, "precision": "bf16", "pp": 1}
    job = read_job(job_values("llama3.1-8b", HOPPER, 8, 2**17, 8, search={"fix": fix}))
    assert not fits(job)
    length = value_that_fits(job, "training.seq_len")

    def at(seq_len: int) -> Job:
        training = job.training.model_copy(update={"seq_len": seq_len})
        return job.model_copy(update={"training": training})

    assert fits(at(length))
    half = next(2**n for n in range(17, 0, -1) if 2**n <= length)
    longer = [size for size in range(half, 2 * half + 1, half // 8) if size > length]
    assert not any(fits(at(size)) for size in longer)
