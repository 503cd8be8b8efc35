"""Floors under a class of splits and budgets, against every split of small pipelines."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import simulated_step_seconds
from planner.intake.jobs import read_job
from planner.search.fit import fitting, most_device_bytes
from planner.search.one_size import NEAR
from planner.search.variations.floors import (
    FEW_RANKS,
    RANKS_AT_ONCE,
    Fullest,
    Pace,
    floors,
    floors_with_room,
    open_classes,
    parts,
    with_budget,
)
from planner.specs.layout import Layout
from tests.conftest import job_values
from tests.pricing import H100, pricer_of
from tests.unit.test_splits_twin import EXPERTS, WIDE, splits_of

PIPELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1F1B": (WIDE, {"pp": 4, "pp_schedule": "1F1B"}),
    "two stages a rank": (WIDE,
        {"pp": 2, "tp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "all forwards first": (WIDE, {"pp": 4, "pp_schedule": "GPipe"}),
    "weight gradients later": (WIDE, {"pp": 2, "tp": 2, "pp_schedule": "InterleavedZeroBubble",
        "virtual_stages": 2, "ac": "none"}),
    "dense layers first": (EXPERTS, {"pp": 4, "pp_schedule": "1F1B"}),
}  # fmt: skip


def pipeline(name: str, memory_fraction: float = 0.95) -> tuple[Pricer, Layout]:
    """A pricer on 8 GPUs and the layout with the trainer's split."""
    model, fields = PIPELINES[name]
    shard = 8 // fields["pp"] // fields.get("tp", 1)
    layout = {"dp_shard": shard, "micro_batch_size": 1, "ac": "full", "zero_stage": 2, **fields}
    values = job_values(model, H100, 8, 4096, 32, layout=layout)
    values["cluster"]["memory_fraction"] = memory_fraction
    job = read_job(values)
    return pricer_of(job), job.layout


def every_split(pricer: Pricer, layout: Layout, acs: tuple[str, ...]) -> LayoutBatch:
    splits = splits_of(pricer.model.num_hidden_layers, layout.pp * layout.virtual_stages)
    changes = ({"layers_per_stage": split, "ac": ac} for split, ac in product(splits, acs))
    return LayoutBatch.from_layouts([layout.model_copy(update=one) for one in changes])


@pytest.mark.parametrize("name", PIPELINES)
def test_no_split_is_faster_than_its_floor(name: str) -> None:
    pricer, layout = pipeline(name)
    own = LayoutBatch.from_layouts([layout])
    least = floors(pricer, own, pricer.price(own), pricer.layout_lower_bounds(own))[0]
    splits = every_split(pricer, layout, (layout.ac,))
    steps = simulated_step_seconds(pricer, splits, pricer.price(splits))
    assert least <= NEAR * steps.min()
    assert least > 0.75 * steps.min()


@pytest.mark.parametrize("name", ["1F1B", "two stages a rank", "dense layers first"])
@pytest.mark.parametrize("fraction", [0.35, 0.5, 0.95])
def test_no_split_and_budget_that_fit_are_faster_than_the_class(name: str, fraction: float) -> None:
    pricer, layout = pipeline(name, fraction)
    compiled = layout.model_copy(update={"compile": True})
    budgets = tuple(f"memory-budget-{part / 10:g}" for part in range(1, 10))
    tried = every_split(pricer, compiled, ("full", *budgets, "none"))
    prices = pricer.price(tried)
    steps = simulated_step_seconds(pricer, tried, prices)
    steps = np.where(fitting(pricer, prices.least_device_bytes), steps, np.inf)
    own = with_budget(LayoutBatch.from_layouts([compiled]), np.array([100]))
    classes, least = open_classes(pricer, own, np.array([100]), np.inf)
    if np.isfinite(steps).any():
        assert least[0] <= NEAR * steps.min()
        above, _ = open_classes(pricer, own, np.array([100]), float(least[0]))
        assert not len(above)
    assert len(classes) <= 1


@pytest.mark.parametrize("name", ["1F1B", "two stages a rank", "dense layers first"])
def test_no_split_that_fits_has_more_layers_on_a_rank_than_it_has_room_for(name: str) -> None:
    pricer, layout = pipeline(name, 0.5)
    own = LayoutBatch.from_layouts([layout])
    room = pricer.most_layers(own, most_device_bytes(pricer)).max(axis=0)[:, 0]
    prices = pricer.price(every_split(pricer, layout, (layout.ac,)), every_rank=True)
    held = prices.rank_units[:, :-2].sum(axis=1)
    fits = fitting(pricer, prices.least_device_bytes)
    assert fits.any()
    assert (held[:, fits].max(axis=1) <= room).all()


def test_a_class_without_room_is_left_out() -> None:
    pricer, layout = pipeline("1F1B", 0.1)
    own = LayoutBatch.from_layouts([layout])
    assert np.isinf(floors_with_room(pricer, own, np.inf)[0])
    assert not len(open_classes(pricer, own, np.array([100]), np.inf)[0])


@given(
    room=st.lists(st.integers(min_value=0, max_value=9), min_size=1, max_size=5),
    layers=st.integers(min_value=1, max_value=20),
)
def test_the_fullest_rank_is_that_of_the_most_even_split(room: list[int], layers: int) -> None:
    rooms = np.array(room, dtype=float)[None, :, None]
    found = Fullest.of(np.array([float(layers)]), rooms, np.array([len(room)]))
    ways = product(*(range(min(most, layers) + 1) for most in room))
    possible = [split for split in ways if sum(split) == layers]
    if not possible:
        assert np.isinf(found.layers[0, 0])
        return
    most = min(max(split) for split in possible)
    assert found.layers[0, 0] == most
    fewest = min(split.count(most) for split in possible if max(split) == most)
    assert found.ranks[0, 0] == fewest


def test_pipelines_with_room_put_whole_layers_on_ranks() -> None:
    found = Fullest.anywhere(np.array([58.0, 61.0]), np.array([16]))
    assert found.layers[:, 0].tolist() == [4.0, 4.0]
    assert found.ranks[:, 0].tolist() == [10.0, 13.0]


@pytest.mark.parametrize(
    ("stages", "ranks", "seconds"), [(1.0, 3.0, 48.0), (2.0, 3.0, 41.0), (1.0, 9.0, 50.0)]
)
def test_ranks_before_the_fullest_count_once(stages: float, ranks: float, seconds: float) -> None:
    """Four layers of 10 s on each of 3 ranks, 1 s a layer before them; at most a fifth layer."""
    one = np.ones(1)
    parts = {"shared": 0.0 * one, "outside": 0.0 * one, "layer": 10.0 * one[None]}
    pace = Pace(**parts, before=one[None], stages=stages * one)
    fullest = Fullest(layers=4.0 * one[None], ranks=ranks * one[None])
    assert pace.floor(fullest)[0] == seconds


@pytest.mark.parametrize("size", [0, 1, 40, 3000])
def test_every_pipeline_is_in_one_part_and_parts_have_room(size: int) -> None:
    pp = np.random.default_rng(size).choice([2, 4, 8, 16, 64, 2**17], size)
    found = parts(pp)
    assert sorted(np.concatenate([np.zeros(0, dtype=np.int64), *found])) == list(range(size))
    for part in found:
        ranks = len(part) * int(pp[part].max())
        alike = len(np.unique(pp[part])) == 1
        assert ranks <= FEW_RANKS or len(part) == 1 or (alike and ranks <= RANKS_AT_ONCE)


def test_few_pipelines_of_all_lengths_are_one_part() -> None:
    assert [len(part) for part in parts(np.array([16, 2, 8, 4, 2]))] == [5]
