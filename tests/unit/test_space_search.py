"""What a search asks of a space besides its screen."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import planner
from planner.cost.layer.unit_work import unit_work
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search.choice.preference import Weighed
from planner.search.fit import priced_and_fitting
from planner.search.screen import Goal
from planner.search.space.enumerate import build_space
from planner.search.space_search import searched
from tests.conftest import job_values

FREE = ("moe_dispatcher", "pp_schedule", "virtual_stages", "zero_stage", "compile", "async_tp")


def pricer_of(model: str, num_gpus: int, gpu: str = "h100-sxm-80gb", **training: object) -> Pricer:
    job = read_job(job_values(model, gpu, num_gpus, 4096, 1024, **training))
    return Pricer.build(job.model, job.cluster, job.training)


def test_the_measured_beside_the_best_fit_and_come_from_their_cells() -> None:
    pricer = pricer_of("mixtral-8x7b", 64)
    space = build_space(pricer.rules_context)
    search = searched(pricer, space, Goal(count=10))
    screened, found = search.screened, search.measured(8)
    assert 0 < len(found) <= 8
    assert not Weighed.of(found, pricer).unmeasured.any()
    seconds, fits = priced_and_fitting(pricer, found)
    assert fits.all()
    assert (np.diff(seconds) >= 0.0).all()
    cells = {cell_of(screened.batch, row) for row in range(len(screened.batch))}
    assert {cell_of(found, row) for row in range(len(found))} <= cells
    # none of what the screen kept is measured, fits and is faster
    kept, their_fits = priced_and_fitting(pricer, screened.batch)
    of_kept = ~Weighed.of(screened.batch, pricer).unmeasured.any(axis=0) & their_fits
    assert of_kept.any()
    assert seconds[0] <= kept[of_kept].min() * (1.0 + 1e-12)


def cell_of(batch: Any, row: int) -> tuple[object, ...]:
    return tuple(column[row] for name, column in batch.columns() if name not in FREE)


LARGE = [
    ("deepseek-v3", "h800-sxm-80gb", 2048, 4096, 15360),
    ("kimi-k2", "h100-sxm-80gb", 1024, 4096, 8192),
]


@pytest.mark.slow
@pytest.mark.parametrize("given", LARGE, ids=str)
def test_what_no_run_supports_is_named_and_does_not_lead(given: tuple[Any, ...]) -> None:
    plan = planner.recommend(**job_values(*given))
    fastest = min(plan.ranked, key=lambda one: one.estimate.step_seconds or np.inf)
    assert any("deepep" in one for one in fastest.unmeasured)
    assert plan.ranked[0].layout.moe_dispatcher == "alltoall"
    assert not any("deepep" in one for one in plan.ranked[0].unmeasured)


def test_units_of_pipelines_differ_only_where_experts_leave_their_precision() -> None:
    """What is priced once for several numbers of stages costs the same for each of them."""
    pricer = pricer_of("deepseek-v3", 256)
    cells = build_space(pricer.rules_context).cells
    rows = np.random.default_rng(5).permutation(len(cells))[:300]
    batch = cells.take(rows)
    assert len({int(pp > 1) for pp in batch.pp}) == 2
    assert len({*product(batch.precision.tolist(), (batch.cp > 1).tolist())}) > 4
    alike = pricer.as_units_see(batch)
    assert (alike.pp < np.minimum(batch.pp, 2)).any()
    own, shared = (unit_work(pricer.context(one), pricer.model) for one in (batch, alike))
    for field in fields(own):
        np.testing.assert_array_equal(getattr(own, field.name), getattr(shared, field.name))
    wrong = replace(batch, pp=np.ones(len(batch), dtype=np.int64))
    forgotten = unit_work(pricer.context(wrong), pricer.model)
    assert not np.array_equal(own.forward_seconds, forgotten.forward_seconds)
