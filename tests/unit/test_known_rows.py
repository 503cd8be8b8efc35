"""Work of units and shards that a job remembers."""

from dataclasses import fields, replace

import numpy as np
import pytest

from planner.columns import LayoutBatch, memo
from planner.columns.groups import layout_hashes
from planner.cost.cost_inputs import shards_at, unit_times_at, units_at
from planner.cost.cost_rows import distinct_rows
from planner.cost.layer.unit_work import unit_work
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.rules import Context
from planner.search.space.enumerate import Space, build_space
from planner.specs.layout import CP_METHODS
from planner.work.checkpointing import FULL, MEMORY_BUDGET, NONE, SELECTIVE_OP
from tests.conftest import job_values


def some_rows(pricer: Pricer, count: int = 500) -> LayoutBatch:
    context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    job = job_values("mixtral-8x7b", "h100-sxm-80gb", 16, 4096, 64)
    cells = build_space(context, read_job(job).search).cells
    order = np.random.default_rng(1).permutation(len(cells))[:count]
    return distinct_rows(pricer, cells.take(order))[0]


def fresh() -> Pricer:
    job = read_job(job_values("mixtral-8x7b", "h100-sxm-80gb", 16, 4096, 64))
    return Pricer.build(job.model, job.cluster, job.training)


def on_gpus(model: str, trainer: str, num_gpus: int) -> tuple[Pricer, Space]:
    """A pricer that has priced nothing, and its job's space."""
    job = read_job(job_values(model, "h100-sxm-80gb", num_gpus, 4096, 256, trainer=trainer))
    pricer = Pricer.build(job.model, job.cluster, job.training)
    return pricer, build_space(pricer.rules_context, job.search)


def same(first: object, second: object) -> bool:
    return all(
        np.array_equal(getattr(first, field.name), getattr(second, field.name))
        for field in fields(first)  # type: ignore[arg-type]
    )


def test_what_is_remembered_is_what_was_priced() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    first = units_at(pricer, rows).costs
    count = pricer.known.rows.work.count
    again = units_at(pricer, rows.take(np.arange(len(rows))[::-1])).costs
    assert pricer.known.rows.work.count == count < len(rows)
    assert same(first, units_at(pricer, rows).costs)
    assert np.array_equal(again.forward_seconds[:, ::-1], first.forward_seconds)
    alone = units_at(fresh(), rows.take(np.array([7]))).costs
    assert np.array_equal(alone.saved_bytes[:, 0], first.saved_bytes[:, 7])


def test_checkpointing_shares_the_work_of_a_unit() -> None:
    """A memory budget, and full recomputation, of one layout: its operations are priced once."""
    pricer, rows = fresh(), some_rows(fresh(), 1)
    for kind, value in [(NONE, 0.0), (FULL, 0.0), (SELECTIVE_OP, 0.0), *budgets()]:
        alike = replace(rows, ac_kind=np.array([kind]), ac_value=np.array([value]))
        found = units_at(pricer, alike).costs
        assert same(found, units_at(fresh(), alike).costs)
    assert (pricer.known.rows.work.count, pricer.known.rows.savings.count) == (1, 1)


def budgets() -> list[tuple[int, float]]:
    return [(MEMORY_BUDGET, share) for share in (0.0, 0.3, 0.7, 1.0)]


def test_budgets_and_modes_of_one_call_share_it_too() -> None:
    pricer, row = fresh(), some_rows(fresh(), 1)
    kinds, values = zip(*budgets(), (NONE, 0.0), strict=True)
    columns = {"ac_kind": np.array(kinds), "ac_value": np.array(values)}
    rows = replace(row.take(np.zeros(len(kinds), dtype=np.int64)), **columns)
    together = units_at(pricer, rows).costs
    assert (pricer.known.rows.work.count, pricer.known.rows.savings.count) == (1, 1)
    for place in range(len(rows)):
        alone = units_at(fresh(), rows.take(np.array([place]))).costs
        assert np.array_equal(alone.recompute_seconds[:, 0], together.recompute_seconds[:, place])
        assert np.array_equal(alone.saved_bytes[:, 0], together.saved_bytes[:, place])


def test_too_many_are_forgotten_and_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(fresh())
    whole = units_at(fresh(), rows).costs
    monkeypatch.setattr(memo, "MOST_ROWS", 32)
    pricer = fresh()
    for start in range(0, len(rows), 16):
        part = units_at(pricer, rows.take(slice(start, start + 16))).costs
        assert np.array_equal(part.forward_seconds, whole.forward_seconds[:, start : start + 16])
        assert pricer.known.rows.work.count <= 32
    assert same(units_at(pricer, rows).costs, whole)


def test_seconds_alone_are_those_of_the_costs() -> None:
    rows = some_rows(fresh())
    assert len({*rows.ac_kind.tolist()}) > 3
    for pricer in (fresh(), replace(fresh(), remembers=False)):
        costs, times = units_at(pricer, rows), unit_times_at(pricer, rows)
        for field in fields(times.costs):
            ours = getattr(times.costs, field.name)
            assert np.array_equal(ours, getattr(costs.costs, field.name)), field.name
        assert np.array_equal(times.total, costs.total)


def test_shards_are_remembered_too() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    first = shards_at(pricer, rows)
    count = pricer.known.rows.shards.count
    assert same(first, shards_at(pricer, rows))
    assert pricer.known.rows.shards.count == count
    alone = shards_at(fresh(), rows.take(np.array([7])))
    assert np.array_equal(alone.gather_seconds[:, 0], first.gather_seconds[:, 7])
    assert alone.step_seconds[0] == first.step_seconds[7]


def test_a_changed_job_starts_without() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    units_at(pricer, rows)
    longer = replace(pricer, training=pricer.training.model_copy(update={"seq_len": 8192}))
    assert longer.known.rows.work.count == 0
    assert (units_at(longer, rows).forward > units_at(pricer, rows).forward).any()


def test_units_ask_of_pipelines_only_whether_there_are_several_stages() -> None:
    pricer = fresh()
    rows = some_rows(pricer)
    deeper = replace(rows, pp=np.where(rows.pp > 1, 8, rows.pp))
    assert len(np.unique(distinct_rows(pricer, deeper)[0].pp)) <= 2
    context = pricer.context
    assert same(unit_work(context(rows), pricer.model), unit_work(context(deeper), pricer.model))


def test_a_layout_costs_what_the_row_that_stands_for_it_does() -> None:
    """Experts that keep their precision under pipelines and CP ask for stages, and no others."""
    pricer, rows = fresh(), some_rows(fresh())
    alone = [code for code, recipe in enumerate(pricer.recipes) if recipe.experts_alone]
    assert alone
    ways = [
        replace(
            rows,
            precision=np.full(len(rows), code),
            pp=np.full(len(rows), pp),
            cp=np.full(len(rows), cp),
        )
        for code in (0, alone[0])
        for pp in (1, 4)
        for cp in (1, 2)
    ]
    batch = LayoutBatch.concatenate(ways)
    of_rows, at = distinct_rows(pricer, batch)
    assert len(of_rows) < len(batch)
    own, stands = (unit_work(pricer.context(one), pricer.model) for one in (batch, of_rows))
    assert np.array_equal(own.forward_seconds, stands.forward_seconds[:, at])
    assert np.array_equal(own.every_bytes, stands.every_bytes[:, at])


def test_what_was_forgotten_is_priced_again() -> None:
    pricer, rows = fresh(), some_rows(fresh())
    first = units_at(pricer, rows).costs
    pricer.known.forget()
    assert pricer.known.rows.work.count == 0
    assert same(first, units_at(pricer, rows).costs)


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "deepseek-v2"])
def test_what_a_budget_saves_is_known_however_results_travel(model: str, trainer: str) -> None:
    """Layouts that differ in async TP, CP method or dispatcher alone; Ulysses is told apart."""
    pricer, space = on_gpus(model, trainer, 256)
    order = np.random.default_rng(3).permutation(len(space.cells))[:200]
    batch = space.expand(order)
    batch = batch.take(np.random.default_rng(4).permutation(len(batch))[:4000])
    methods = [CP_METHODS.index(name) for name in sorted(pricer.rules.cp_methods)]
    ways = [replace(batch, cp_method=np.full(len(batch), code)) for code in methods]
    budgeted = LayoutBatch.concatenate(ways)
    count = len(budgeted)
    columns = {"ac_kind": np.full(count, MEMORY_BUDGET), "ac_value": np.full(count, 0.4)}
    budgeted = replace(budgeted, **columns)
    rows, _ = distinct_rows(pricer, budgeted)
    found = units_at(pricer, rows).costs
    assert same(found, units_at(replace(pricer, remembers=False), rows).costs)
    assert 0 < pricer.known.rows.savings.count < pricer.known.rows.work.count


def test_one_number_for_all_layouts_stays_one_number() -> None:
    rows = some_rows(fresh())
    same_tp = replace(rows, tp=np.broadcast_to(np.int64(4), len(rows)))
    materialised = replace(rows, tp=np.full(len(rows), 4))
    order = np.random.default_rng(2).permutation(len(rows))
    mask = order > 100
    for chosen in (order, mask, slice(3, 90)):
        assert same_tp.take(chosen).tp.strides == (0,)
        assert np.array_equal(same_tp.take(chosen).tp, materialised.take(chosen).tp)
        first, second = (layout_hashes(one.take(chosen)) for one in (same_tp, materialised))
        assert np.array_equal(first, second)
