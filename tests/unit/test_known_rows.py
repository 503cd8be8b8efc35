"""Unit costs and shards that a job remembers."""

from dataclasses import fields, replace

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost import known_rows
from planner.cost.cost_inputs import distinct_rows, shards_at, units_at
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.rules import Context
from planner.search.space.enumerate import build_space


def some_rows(pricer: Pricer, count: int = 500) -> LayoutBatch:
    context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    job = {
        "model": "mixtral-8x7b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"seq_len": 4096, "global_batch_size": 64},
    }
    cells = build_space(context, read_job(job).search).cells
    order = np.random.default_rng(1).permutation(len(cells))[:count]
    return distinct_rows(pricer, cells.take(order))[0]


def fresh() -> Pricer:
    job = read_job(
        {
            "model": "mixtral-8x7b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
            "training": {"seq_len": 4096, "global_batch_size": 64},
        }
    )
    return Pricer.build(job.model, job.cluster, job.training)


def same(first: object, second: object) -> bool:
    return all(
        np.array_equal(getattr(first, field.name), getattr(second, field.name))
        for field in fields(first)  # type: ignore[arg-type]
    )


def test_what_is_remembered_is_what_was_priced() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    first = units_at(pricer, rows).costs
    count = pricer.known_units.count
    again = units_at(pricer, rows.take(np.arange(len(rows))[::-1])).costs
    assert pricer.known_units.count == count == len(rows)
    assert same(first, units_at(pricer, rows).costs)
    assert np.array_equal(again.forward_seconds[:, ::-1], first.forward_seconds)
    alone = units_at(fresh(), rows.take(np.array([7]))).costs
    assert np.array_equal(alone.saved_bytes[:, 0], first.saved_bytes[:, 7])


def test_too_many_are_forgotten_and_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(fresh())
    whole = units_at(fresh(), rows).costs
    monkeypatch.setattr(known_rows, "MOST_ROWS", 64)
    pricer = fresh()
    for start in range(0, len(rows), 16):
        part = units_at(pricer, rows.take(slice(start, start + 16))).costs
        assert np.array_equal(part.forward_seconds, whole.forward_seconds[:, start : start + 16])
        assert pricer.known_units.count <= 64
    assert same(units_at(pricer, rows).costs, whole)


def test_shards_are_remembered_too() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    first = shards_at(pricer, rows)
    count = pricer.known_shards.count
    assert same(first, shards_at(pricer, rows))
    assert pricer.known_shards.count == count
    alone = shards_at(fresh(), rows.take(np.array([7])))
    assert np.array_equal(alone.gather_seconds[:, 0], first.gather_seconds[:, 7])
    assert alone.step_seconds[0] == first.step_seconds[7]


def test_a_changed_job_starts_without() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    units_at(pricer, rows)
    longer = replace(pricer, training=pricer.training.model_copy(update={"seq_len": 8192}))
    assert longer.known_units.count == 0
    assert (units_at(longer, rows).forward > units_at(pricer, rows).forward).any()


def test_units_ask_of_pipelines_only_whether_there_are_several_stages() -> None:
    pricer = fresh()
    rows = some_rows(pricer)
    deeper = replace(rows, pp=np.where(rows.pp > 1, 8, rows.pp))
    assert len(np.unique(distinct_rows(pricer, deeper)[0].pp)) <= 2
    context = pricer.context
    from planner.cost.layer.unit_costs import unit_costs

    assert same(unit_costs(context(rows), pricer.model), unit_costs(context(deeper), pricer.model))
