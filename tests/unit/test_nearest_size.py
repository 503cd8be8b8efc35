"""The nearest that would fit is the nearest: every smaller change is searched and does not fit."""

from typing import Any

import pytest

from planner.intake.jobs import read_job
from planner.search.infeasible.suggested_fixes import Request, _sizes_between, fitting_changes
from planner.search.one_size import search_size
from planner.specs.job import Job
from planner.specs.plan_comparisons import FittingChange

JOBS: dict[str, dict[str, Any]] = {
    "no power of two": {"model": "mixtral-8x22b",
        "cluster": {"gpu": "a100-sxm-40gb", "num_gpus": 8},
        "training": {"seq_len": 4096, "global_batch_size": 48},
        "search": {"fix": {"ac": "full", "cpu_offload": True}}},
    "on the device": {"model": "llama3-70b", "cluster": {"gpu": "a100-sxm-40gb", "num_gpus": 8},
        "training": {"seq_len": 8192, "global_batch_size": 96},
        "search": {"fix": {"cpu_offload": False}}},
    "Megatron": {"model": "llama3-70b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {"seq_len": 8192, "global_batch_size": 96, "trainer": "megatron"}},
}  # fmt: skip


def changes(name: str) -> tuple[Job, dict[str, FittingChange]]:
    job = read_job(JOBS[name])
    found = fitting_changes(job, job.cluster, lambda _: None)
    return job, {change.field: change for change in reversed(found)}


def fits(request: Request) -> bool:
    return bool(search_size(request.job, request.cluster, lambda _: None).candidates)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "on the device" else [pytest.mark.slow]) for n in JOBS],
)
def test_the_fewest_gpus_are_the_fewest(name: str) -> None:
    job, found = changes(name)
    request, count = Request(job=job, cluster=job.cluster), found["cluster.num_gpus"].value
    assert isinstance(count, int)
    assert fits(request.on(job.cluster.with_num_gpus(count)))
    for smaller in _sizes_between(job.cluster, count):
        assert not fits(request.on(job.cluster.with_num_gpus(smaller))), smaller


def test_sizes_are_whole_nodes() -> None:
    cluster = read_job(JOBS["Megatron"]).cluster
    assert _sizes_between(cluster, 64) == [16, 24, 32, 40, 48, 56]


def test_a_shorter_sequence_is_the_longest_that_fits() -> None:
    job = read_job(
        {
            "model": "llama3.1-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
            "training": {"seq_len": 2**17, "global_batch_size": 8},
            "search": {"fix": {"ac": "none", "tp": 4, "dp_shard": 2, "precision": "bf16", "pp": 1}},
        }
    )
    request = Request(job=job, cluster=job.cluster)
    assert not fits(request)
    found = {c.field: c for c in fitting_changes(job, job.cluster, lambda _: None)}
    length = found["training.seq_len"].value
    assert isinstance(length, int)

    def at(seq_len: int) -> Request:
        training = job.training.model_copy(update={"seq_len": seq_len})
        return request.with_training(training)

    assert fits(at(length))
    half = next(2**n for n in range(17, 0, -1) if 2**n <= length)
    longer = [size for size in range(half, 2 * half + 1, half // 8) if size > length]
    assert not any(fits(at(size)) for size in longer)
