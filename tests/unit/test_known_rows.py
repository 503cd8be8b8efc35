"""Work of units and shards that a job remembers."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest

from planner.columns import LayoutBatch, memo
from planner.columns.groups import hashes
from planner.cost.cost_inputs import distinct_rows, shards_at, units_at
from planner.cost.data_parallel.sharding import UnitShards
from planner.cost.layer.unit_costs import unit_costs
from planner.cost.layer.unit_work import Savings, UnitWork, savings, unit_work
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search.space.enumerate import build_space
from planner.specs.layout import CP_METHODS
from planner.work.checkpointing import FULL, MEMORY_BUDGET, NONE, SELECTIVE_OP
from tests.conftest import job_values
from tests.pricing import priced_space, pricer_of


def some_rows(pricer: Pricer, count: int = 500) -> LayoutBatch:
    cells = build_space(pricer.rules_context, read_job(JOB).search).cells
    order = np.random.default_rng(1).permutation(len(cells))[:count]
    return distinct_rows(pricer, cells.take(order))[0]


JOB = job_values("mixtral-8x7b", "h100-sxm-80gb", 16, 4096, 64)


def fresh() -> Pricer:
    return pricer_of(read_job(JOB))


@pytest.fixture
def pricer() -> Pricer:
    """One that has priced nothing."""
    return fresh()


@pytest.fixture
def rows() -> LayoutBatch:
    return some_rows(fresh())


def same(first: object, second: object) -> bool:
    return all(
        np.array_equal(getattr(first, field.name), getattr(second, field.name))
        for field in fields(first)  # type: ignore[arg-type]
    )


def test_what_is_remembered_is_what_was_priced(pricer: Pricer, rows: LayoutBatch) -> None:
    first = units_at(pricer, rows)
    count = pricer.known.memo(UnitWork).count
    again = units_at(pricer, rows.take(np.arange(len(rows))[::-1]))
    assert pricer.known.memo(UnitWork).count == count < len(rows)
    assert same(first, units_at(pricer, rows))
    assert np.array_equal(again.forward_seconds[:, ::-1], first.forward_seconds)
    alone = units_at(fresh(), rows.take(np.array([7])))
    assert np.array_equal(alone.saved_bytes[:, 0], first.saved_bytes[:, 7])
    pricer.known.forget()
    assert pricer.known.memo(UnitWork).count == 0
    assert same(first, units_at(pricer, rows)), "what was forgotten is priced again"


BUDGETS = [(MEMORY_BUDGET, share) for share in (0.0, 0.3, 0.7, 1.0)]


def test_checkpointing_shares_the_work_of_a_unit(pricer: Pricer) -> None:
    """A memory budget, and full recomputation, of one layout: its operations are priced once."""
    row = some_rows(pricer, 1)
    for kind, value in [(NONE, 0.0), (FULL, 0.0), (SELECTIVE_OP, 0.0), *BUDGETS]:
        alike = replace(row, ac_kind=np.array([kind]), ac_value=np.array([value]))
        assert same(units_at(pricer, alike), units_at(fresh(), alike))
    assert (pricer.known.memo(UnitWork).count, pricer.known.memo(Savings).count) == (1, 1)


def test_budgets_and_modes_of_one_call_share_it_too(pricer: Pricer) -> None:
    kinds, values = zip(*BUDGETS, (NONE, 0.0), strict=True)
    columns = {"ac_kind": np.array(kinds), "ac_value": np.array(values)}
    whole = some_rows(pricer, 1).take(np.zeros(len(kinds), dtype=np.int64))
    rows = replace(whole, **columns)
    together = units_at(pricer, rows)
    assert (pricer.known.memo(UnitWork).count, pricer.known.memo(Savings).count) == (1, 1)
    for place in range(len(rows)):
        alone = units_at(fresh(), rows.take(np.array([place])))
        for name in ("recompute_seconds", "saved_bytes"):
            ours, theirs = getattr(together, name), getattr(alone, name)
            assert np.array_equal(theirs[:, 0], ours[:, place]), name


def test_too_many_are_forgotten_and_priced_again(
    pricer: Pricer, rows: LayoutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = units_at(fresh(), rows)
    monkeypatch.setattr(memo, "MOST_ROWS", 32)
    for start in range(0, len(rows), 16):
        part = units_at(pricer, rows.take(slice(start, start + 16)))
        assert np.array_equal(part.forward_seconds, whole.forward_seconds[:, start : start + 16])
        assert pricer.known.memo(UnitWork).count <= 32
    assert same(units_at(pricer, rows), whole)


def test_shards_are_remembered_too(pricer: Pricer, rows: LayoutBatch) -> None:
    first = shards_at(pricer, rows)
    count = pricer.known.memo(UnitShards).count
    assert same(first, shards_at(pricer, rows))
    assert pricer.known.memo(UnitShards).count == count
    alone = shards_at(fresh(), rows.take(np.array([7])))
    assert np.array_equal(alone.gather_seconds[:, 0], first.gather_seconds[:, 7])
    assert alone.step_seconds[0] == first.step_seconds[7]


def test_a_changed_job_starts_without(pricer: Pricer, rows: LayoutBatch) -> None:
    units_at(pricer, rows)
    longer = replace(pricer, training=pricer.training.model_copy(update={"seq_len": 8192}))
    assert longer.known.memo(UnitWork).count == 0
    assert (units_at(longer, rows).forward > units_at(pricer, rows).forward).any()


def test_units_ask_only_whether_there_are_several_stages(pricer: Pricer, rows: LayoutBatch) -> None:
    deeper = replace(rows, pp=np.where(rows.pp > 1, 8, rows.pp))
    assert len(np.unique(distinct_rows(pricer, deeper)[0].pp)) <= 2
    first, second = (unit_work(pricer.context(one), pricer.model) for one in (rows, deeper))
    assert same(first, second)


def test_a_layout_costs_what_its_representative_does(pricer: Pricer, rows: LayoutBatch) -> None:
    """Experts that keep their precision under pipelines and CP ask for stages, and no others."""
    alone, *_ = (code for code, recipe in enumerate(pricer.recipes) if recipe.experts_alone)
    ways = [
        replace(rows, **{name: np.full(len(rows), value) for name, value in changed.items()})
        for code, pp, cp in itertools.product((0, alone), (1, 4), (1, 2))
        for changed in [{"precision": code, "pp": pp, "cp": cp}]
    ]
    batch = LayoutBatch.concatenate(ways)
    of_rows, at = distinct_rows(pricer, batch)
    assert len(of_rows) < len(batch)
    own, stands = (unit_work(pricer.context(one), pricer.model) for one in (batch, of_rows))
    for name in ("again_all", "every_bytes"):
        assert np.array_equal(getattr(own, name), getattr(stands, name)[..., at]), name


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "deepseek-v2"])
def test_what_a_budget_saves_is_known_however_results_travel(model: str, trainer: str) -> None:
    """Layouts that differ in async TP, CP method or dispatcher alone; Ulysses is told apart."""
    job = read_job(job_values(model, "h100-sxm-80gb", 256, 4096, 256, trainer=trainer))
    pricer, space = priced_space(job)
    batch = space.expand(np.random.default_rng(3).permutation(len(space.cells))[:200])
    batch = batch.take(np.random.default_rng(4).permutation(len(batch))[:4000])
    methods = [CP_METHODS.index(name) for name in sorted(pricer.rules.cp_methods)]
    ways = [replace(batch, cp_method=np.full(len(batch), code)) for code in methods]
    budgeted = LayoutBatch.concatenate(ways)
    count = len(budgeted)
    columns = {"ac_kind": np.full(count, MEMORY_BUDGET), "ac_value": np.full(count, 0.4)}
    rows, _ = distinct_rows(pricer, replace(budgeted, **columns))
    found = units_at(pricer, rows)
    context, model = pricer.context(rows), pricer.model
    work, saved = unit_work(context, model), savings(context, model)
    assert same(found, unit_costs(work, saved, rows, model, pricer.training, pricer.rules))
    assert 0 < pricer.known.memo(Savings).count < pricer.known.memo(UnitWork).count


def test_one_number_for_all_layouts_stays_one_number(rows: LayoutBatch) -> None:
    same_tp = replace(rows, tp=np.broadcast_to(np.int64(4), len(rows)))
    materialised = replace(rows, tp=np.full(len(rows), 4))
    order = np.random.default_rng(2).permutation(len(rows))
    for chosen in (order, order > 100, slice(3, 90)):
        first, second = same_tp.take(chosen), materialised.take(chosen)
        assert first.tp.strides == (0,)
        assert np.array_equal(first.tp, second.tp)
        assert np.array_equal(hashes([first.tp]), hashes([second.tp]))
