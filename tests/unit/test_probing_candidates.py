"""Candidates: complete by brute force, priced as the planner prices, found by their layout."""

import numpy as np
import pytest

from planner.calibration.intervals import oom_probability, time_spread
from planner.cost.refine import refine
from planner.errors import InfeasibleError
from planner.intake.jobs import read_job
from planner.rules import legal_mask
from planner.search.fit import OOM_LIMIT
from planner.specs.measurement import Measured
from planner.study.candidates import RISKIEST, SLACK, enumerate_candidates
from tests.pricing import priced_space
from tests.unit.probing_cases import REQUEST, searched, small

SPLIT = {
    "tp": 1, "pp": 2, "dp_replicate": 1, "dp_shard": 4, "layers_per_stage": (15, 17),
    "zero_stage": 2, "pp_schedule": "1F1B", "virtual_stages": 1, "async_tp": False,
}  # fmt: skip


def test_all_within_the_slack_of_the_best_and_no_other() -> None:
    pricer, space = searched()
    everything = space.expand(slice(None))
    prices = pricer.price(everything)
    oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
    fastest = prices.step_seconds[oom <= OOM_LIMIT].min()
    near = (oom <= RISKIEST) & (prices.step_seconds <= SLACK * fastest)
    expected = {*everything.take(near).layouts()}
    assert {*small().batch.layouts()} == expected
    assert len(expected) == len(small()) > 300


def test_columns_are_the_planners_own() -> None:
    pricer, found = searched()[0], small()
    prices, prior = pricer.price(found.batch), found.prior
    assert np.all(np.diff(prior.log_seconds) >= 0.0)
    refined = refine(pricer, found.batch, prices).step_seconds
    assert prior.log_seconds == pytest.approx(np.log(refined))
    assert found.memory["device_bytes"] == pytest.approx(prices.device_bytes)
    risk = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
    assert prior.oom_probability == pytest.approx(risk)
    total = np.sqrt((prior.factor**2).sum(axis=1) + prior.sd**2)
    assert total == pytest.approx(time_spread(pricer, found.batch, prices).sd, rel=1e-6)
    assert legal_mask(found.batch, pricer.rules_context).all()


def test_every_layout_is_found_at_its_row_and_others_are_not() -> None:
    found = small()
    for row in range(0, len(found), 29):
        assert found.find(found.batch.row(row)) == row
    layout = found.batch.row(0)
    assert found.find(layout.model_copy(update={"micro_batch_size": 64})) is None
    assert found.find(layout.model_copy(update={"layers_per_stage": (16, 16)})) is None


def test_what_must_be_included_is_once() -> None:
    pricer, space = searched()
    given = {"dp_shard": 8, "micro_batch_size": 1, "ac": "full"}
    slow, inside = read_job({**REQUEST, "layout": given}).layout, small().batch.row(3)
    split = inside.model_copy(update=SPLIT)
    found = enumerate_candidates(pricer, space, include=[slow, inside, split])
    assert found.find(slow) is not None
    assert found.find(split) is not None
    assert len(found) == len(small()) + (small().find(slow) is None) + 1
    assert len({*found.batch.layouts()}) == len(found)


def test_the_fastest_are_kept_where_there_are_too_many() -> None:
    few = enumerate_candidates(*searched(), most=50)
    assert len(few) == 50
    screened = np.sort(searched()[0].price(few.batch).step_seconds)
    every = np.sort(searched()[0].price(small().batch).step_seconds)
    assert screened == pytest.approx(every[:50])


def test_nothing_that_may_fit_is_said() -> None:
    job = read_job({**REQUEST, "cluster": {"gpu": "rtx-4090", "num_gpus": 1}, "search": {}})
    with pytest.raises(InfeasibleError, match="likely enough to fit"):
        enumerate_candidates(*priced_space(job, oversized=True))


def test_memory_is_compared_with_the_same_kind() -> None:
    found = small()
    reserved = float(found.memory["peak_reserved_bytes"][4])
    both = Measured(peak_reserved_bytes=1.1 * reserved, peak_allocated_bytes=1.0)
    assert found.memory_residual(4, both) == pytest.approx(np.log(1.1))
    assert found.memory_residual(4, Measured()) is None


def test_no_two_candidates_read_alike() -> None:
    first, *others = small().batch.layouts()
    assert len({one.short() for one in (first, *others)}) == 1 + len(others)
    changes = {"pp": 4, "layers_per_stage": (7, 9, 9, 7), "reduce_dtype": "bfloat16"}
    uneven = first.model_copy(update=changes).short()
    assert "layers 7,9x2,7" in uneven
    assert "grads bfloat16" in uneven
