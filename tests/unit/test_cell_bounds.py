"""Bounds of cells: worked out when asked for, band by band, each once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import TWO_SIDED_90, memory_deviation
from planner.columns import COLUMNS, LayoutBatch
from planner.cost.lower_bounds import Idle
from planner.cost.prepared_job import KnownJob
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search import bounds
from planner.search import screen as screen_module
from planner.search.bounds import CellBounds
from planner.search.screen import PARETO_SLACK, Goal, idle_of, near_layouts
from planner.search.space.enumerate import Space
from planner.search.space_search import screen
from planner.search.variations.floors import with_budget
from planner.work.checkpointing import FULL, NONE
from tests.conftest import job_values
from tests.pricing import priced_space, pricer_of
from tests.pricing import rows as batch_of

PRICER = pricer_of(read_job(job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 64)))
LIMIT = float(PRICER.cluster.usable_memory_bytes)
BYTES = LIMIT / 8  # of each sequence of a microbatch


class Counting:
    """A pricer whose bounds are 1 s and an eighth of the memory a sequence, and 9 s for
    recomputation. asked: the microbatches of every call.
    """

    def __init__(self) -> None:
        self.profile, self.cluster, self.rules = PRICER.profile, PRICER.cluster, PRICER.rules
        self.unit_fields, self.beside, self.known = PRICER.unit_fields, None, KnownJob()
        self.asked: list[list[int]] = []

    def time_lower_bounds(self, batch: LayoutBatch, _: object = None) -> np.ndarray:
        return batch.micro_batch_size + np.where(batch.ac_kind > 0, 9.0, 0.0) + batch.ac_value

    def compute_lower_bounds(self, batch: LayoutBatch, _: object) -> np.ndarray:
        return self.time_lower_bounds(batch)

    def cell_device_bounds(
        self, batch: LayoutBatch, most_bytes: float
    ) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(batch.micro_batch_size.tolist())
        device = batch.micro_batch_size * BYTES
        return device, np.tile(most_bytes / device, (len(self.rules.sharding.stages), 1))


def cells(*sizes: int) -> LayoutBatch:
    return batch_of(*({"micro_batch_size": size, "ac": "full"} for size in sizes))


DENSE: dict[str, Any] = {"model": "llama3-8b", "batch": 256}


def small_space(
    trainer: str, fix: dict[str, Any], *, model: str = "mixtral-8x7b", batch: int = 32
) -> tuple[Pricer, Space]:
    search = {"fix": {"cp": 1, "precision": "bf16", **fix}}
    given = (model, "h100-sxm-80gb", 16, 4096, batch)
    return priced_space(read_job(job_values(*given, trainer=trainer, search=search)))


SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "torchtitan": ("torchtitan", {}),
    "megatron": ("megatron", {}),
    "one schedule": ("torchtitan", {"pp_schedule": "Interleaved1F1B"}),
    "two stages a rank": ("torchtitan", {"virtual_stages": 2}),
    "both": ("torchtitan", {"pp_schedule": "DualPipeV", "virtual_stages": 2}),
}
Priced = tuple[Pricer, Space]


@pytest.fixture(scope="module", params=SPACES)
def priced(request: pytest.FixtureRequest) -> Priced:
    """A pricer and a space, of each of SPACES."""
    return small_space(*SPACES[request.param])


def test_schedules_of_cells_are_those_of_their_layouts(priced: Priced) -> None:
    _, space = priced
    layouts = space.expand(slice(None))
    owner = np.repeat(np.arange(len(space.cells)), space.cell_sizes)
    found = dict(space.schedules())
    assert set(np.unique(layouts.pp_schedule).tolist()) <= set(found)
    for code, stages in found.items():
        most = np.zeros(len(space.cells), dtype=np.int64)
        of_it = layouts.pp_schedule == code
        np.maximum.at(most, owner[of_it], layouts.virtual_stages[of_it])
        assert (stages >= most).all()
        assert ((stages > 0) == (most > 0)).all()


def test_a_cell_bounds_all_its_layouts(priced: Priced) -> None:
    pricer, space = priced
    idle = Idle.of(pricer, space.cells, space.schedules())
    by_kind = idle_of(pricer, space)  # asks of one cell of each kind
    assert np.array_equal(by_kind.overlaps, idle.overlaps)
    assert np.array_equal(by_kind.microbatches, idle.microbatches)
    bounds_of_cells, _ = pricer.lower_bounds(space.cells, idle)
    loose, _ = pricer.lower_bounds(space.cells)
    assert (bounds_of_cells >= loose * (1.0 - 1e-12)).all()
    order = np.random.default_rng(2).permutation(len(space.cells))[:600]
    own, _ = pricer.step_lower_bounds(space.expand(order))
    of_cells = np.repeat(bounds_of_cells[order], space.cell_sizes[order])
    assert (of_cells <= own * (1.0 + 1e-9)).all()


def test_cells_of_one_kind_compute_as_long(priced: Priced, monkeypatch: pytest.MonkeyPatch) -> None:
    pricer, space = priced
    idle = Idle.of(pricer, space.cells, space.schedules())
    monkeypatch.setattr(bounds, "BAND", 0)
    found = CellBounds(pricer, space.cells, idle)
    every = np.arange(len(space.cells))
    kinds, _ = found._alike(every)
    assert len(kinds) < len(every)
    none, nothing = np.full(len(every), NONE), np.zeros(len(every))
    bare = replace(space.cells.take(every), ac_kind=none, ac_value=nothing)
    own = pricer.compute_lower_bounds(bare, idle)
    assert found.coarse_bound_seconds.tolist() == own.tolist()


def bounds_of(pricer: Any, *sizes: int) -> CellBounds:
    return CellBounds(pricer, cells(*sizes))


def test_few_cells_are_taken_up_by_own_bounds_many_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bounds_of(Counting(), 1, 2)
    assert found.seconds.tolist() == found.coarse_bound_seconds.tolist() == [10.0, 11.0]
    assert found.device_bytes.tolist() == [BYTES, 2 * BYTES]
    monkeypatch.setattr(bounds, "BAND", 2)
    found = bounds_of(Counting(), 3, 1, 2)
    assert found.coarse_bound_seconds.tolist() == [3.0, 1.0, 2.0]
    assert np.isnan(found.seconds).all()
    assert np.isnan(found.device_bytes).all()


def test_own_bounds_are_worked_out_once_and_by_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BAND", 2)
    monkeypatch.setattr(bounds, "KNOWN_AT_ONCE", 2)
    pricer = Counting()
    found = bounds_of(pricer, 5, 4, 3, 2, 1)
    found.know(np.array([3]))
    found.know(np.array([0, 3, 1, 4]))
    assert pricer.asked == [[2], [5, 4], [1]]
    assert found.seconds[[0, 1, 3, 4]].tolist() == [14.0, 13.0, 11.0, 10.0]
    assert np.isnan(found.seconds[2])


def test_whether_a_cell_may_fit_is_asked_of_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BAND", 2)
    pricer = Counting()
    found = bounds_of(pricer, 9, 4, 8)
    assert found.may_fit(np.array([1, 2])).tolist() == [True, False]
    assert pricer.asked == [[4, 8]]


def test_a_cell_fits_up_to_a_chance_of_one_in_twenty_to_run_out() -> None:
    """What is left must be 1.645 deviations: that of 5% on one side."""
    found = bounds_of(Counting(), 1)
    deviation = float(memory_deviation(PRICER.profile, np.array([LIMIT * 0.9]))[0])
    for share, fits in ((0.99, True), (1.01, False)):
        found.device_bytes[:] = share * LIMIT * np.exp(-TWO_SIDED_90 * deviation)
        assert found.may_fit(np.array([0])).tolist() == [fits]
    found.device_bytes[:] = 0.0
    assert found.may_fit(np.array([0])).tolist() == [True], "a bound of no memory"


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_layouts_without_room_are_none_that_fit(trainer: str) -> None:
    pricer, space = small_space(trainer, {"tp": 1}, **DENSE)
    some, whole = (screen(pricer, space, Goal(count=10, everything=one)) for one in (False, True))
    assert some.num_priced < whole.num_priced
    shown = []
    for each in (some, whole):
        assert each.num_fitting > 0
        assert each.num_priced + each.bounded_out >= space.num_layouts - each.out_of_memory
        near = each.step_seconds <= PARETO_SLACK * each.step_seconds[0]
        shown.append((each.step_seconds[near].tolist(), each.batch.take(near).layouts()))
    assert shown[0] == shown[1]


def test_a_schedule_that_runs_all_forwards_first_has_less_room() -> None:
    shares = []
    for schedule in ("GPipe", "1F1B"):
        fix = {"tp": 1, "pp": 4, "pp_schedule": schedule}
        pricer, space = small_space("torchtitan", fix, **DENSE)
        cells, everything = space.cells, np.arange(len(space.cells))
        own = CellBounds(pricer, cells, Idle.of(pricer, cells, space.schedules()))
        own.know(everything)
        shares.append(float(own.has_room(space.expanded(everything)).mean()))
    assert shares[0] < shares[1] / 2.0


def test_room_is_asked_of_its_columns(priced: Priced, monkeypatch: pytest.MonkeyPatch) -> None:
    pricer, space = priced
    own = CellBounds(pricer, space.cells, idle_of(pricer, space))
    own.most_bytes = float(np.median(own.device_bytes))
    own.device_bytes[:] = np.nan
    own.know(np.arange(len(space.cells)))
    layouts = space.expanded(np.random.default_rng(5).permutation(len(space.cells))[:500])
    roomy = own.has_room(layouts)
    monkeypatch.setattr(bounds, "ROOM_FIELDS", COLUMNS)
    assert np.array_equal(roomy, own.has_room(layouts))
    assert roomy.any()
    assert not roomy.all()


def test_what_nothing_fits_for_is_priced_whole_but_below_a_limit_not_looked_at_again() -> None:
    """Then the answer is what comes closest, whatever its schedule holds."""
    narrow = {"pp": 4, "pp_schedule": "GPipe", "ac": "none"}
    pricer, space = small_space("torchtitan", narrow, **DENSE)
    found, whole = (screen(pricer, space, Goal(count=3, everything=one)) for one in (False, True))
    assert found.num_fitting == 0
    assert found.num_priced == whole.num_priced > 0
    np.testing.assert_array_equal(found.device_bytes, whole.device_bytes)
    assert screen(pricer, space, Goal(count=3, limit_seconds=1e3)).num_priced == 0


def same_layouts(first: LayoutBatch, second: LayoutBatch) -> bool:
    pairs = zip(first.columns(), second.columns(), strict=True)
    return all(np.array_equal(one, other) for (_, one), (_, other) in pairs)


def test_some_of_the_expanded_are_those_rows_of_all(priced: Priced) -> None:
    pricer, space = priced
    chosen = np.random.default_rng(3).permutation(len(space.cells))[:200]
    found = space.expanded(chosen)
    assert np.array_equal(found.owner, np.repeat(np.arange(len(chosen)), space.cell_sizes[chosen]))
    few = np.arange(len(found)) % 3 == 0
    assert same_layouts(found.take(few).batch(), space.expand(chosen).take(few))
    assert np.array_equal(found.take(few).cells, chosen[found.owner[few]])
    some, every = found.batch(pricer.unit_fields), found.batch()
    for field in pricer.unit_fields:
        assert np.array_equal(getattr(some, field), getattr(every, field))


def test_what_is_left_out_of_near_cells_is_slow(
    priced: Priced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_module, "FEW", 0)
    pricer, space = priced
    chosen = np.arange(len(space.cells))
    bounds_of_cells = CellBounds(pricer, space.cells, idle_of(pricer, space))
    everything = space.expand(chosen)
    computes = pricer.layout_lower_bounds(everything)
    limit = float(np.quantile(computes, 0.3))
    found = near_layouts(pricer, space, chosen, bounds_of_cells, limit)
    near = found.batch()
    kept = pricer.layout_lower_bounds(near) <= limit
    assert kept.sum() == (computes <= limit).sum() <= len(near) < len(everything)
    assert same_layouts(near.take(kept), everything.take(computes <= limit))
    assert (space.cells.tp[found.cells] == near.tp).all()


@pytest.mark.parametrize("num_gpus", [8, 16])
def test_a_budget_is_sought_of_cells_that_can_be_fast_enough_with_one(num_gpus: int) -> None:
    """The others are slower than the limit with the largest that fits, and are asked anew."""
    job = read_job(job_values("llama3-8b", "a100-sxm-40gb", num_gpus, 8192, 64))
    pricer, space = priced_space(job)
    cells, idle = space.cells, Idle.of(pricer, space.cells, space.schedules())
    rows = np.flatnonzero(cells.ac_kind == FULL)
    whole, some = CellBounds(pricer, cells, idle), CellBounds(pricer, cells, idle)
    rows = rows[whole.may_fit(rows)]
    most = whole.largest_budgets(rows, np.inf)
    assert (most > 0).any()
    least = pricer.time_lower_bounds(with_budget(cells.take(rows), most), idle.take(rows))
    limit = float(np.median(least))
    found = some.largest_budgets(rows, limit)
    left = found < 0
    assert 0 < left.sum() < len(rows)
    assert (found[~left] == most[~left]).all()
    assert (least[left] >= limit * (1.0 - 1e-12)).all()
    assert (some.largest_budgets(rows, np.inf) == most).all()


def test_cells_within_a_limit_compute_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 to 14 s with their recomputation, two at a time."""
    monkeypatch.setattr(bounds, "KNOWN_AT_ONCE", 2)
    found = bounds_of(Counting(), 5, 4, 3, 2, 1)
    assert found.within(np.arange(5), 12.0).tolist() == [2, 3, 4]
    assert found.within(np.array([4, 0, 1]), 13.0).tolist() == [4, 1]
    assert found.within(np.arange(0), 13.0).tolist() == []
