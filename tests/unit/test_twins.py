"""Simpler twins of the best layouts are candidates, as far as the job leaves them open."""

from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.rules import Context
from planner.search.variations.neighbours import simpler_twins
from planner.specs.job import SearchSpec
from planner.trainers.registry import resolve_layout
from tests.conftest import fixed_now, job_values

JOB = job_values("qwen2-7b", "a100-sxm-40gb", 16, 4096, 32, trainer="megatron")


def test_number_1_goes_without_sequence_parallelism_for_more_than_half_a_percent() -> None:
    """Its twin was lost before points were counted, for 0.4%."""
    plan = recommend(read_job({**JOB, "search": {"top_k": 3}}), now=fixed_now)
    first = plan.ranked[0].layout
    assert first.tp > 1
    assert first.sequence_parallel


def test_twins_are_legal_other_and_left_open() -> None:
    job = read_job(JOB)
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    values = {"dp_shard": 4, "tp": 4, "sequence_parallel": False}
    layout = resolve_layout(values, trainer="megatron", num_gpus=16)
    found = simpler_twins(context, SearchSpec(), [layout]).layouts()
    assert [one.sequence_parallel for one in found] == [False, True]
    fixed = SearchSpec(fix={"sequence_parallel": False})
    assert simpler_twins(context, fixed, [layout]).layouts() == [layout]
