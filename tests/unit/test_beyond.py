"""The space beyond enumeration and the sampler that walks it."""

from functools import cache
from itertools import product

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.price import Pricer
from planner.estimates import simulated_columns
from planner.intake.jobs import read_job, resolve_layout
from planner.search.paper_study import sample_beyond
from planner.search.sampled import Priced
from planner.search.variations.beyond import Beyond
from planner.specs.layout import Layout
from tests.conftest import job_values

LAYERS = 32
NO_LIMIT = float("inf")


@cache
def pricer(trainer: str = "megatron") -> Pricer:
    job = read_job(job_values("llama3-8b", "a100-sxm-40gb", 16, 8192, 64, trainer=trainer))
    return Pricer.build(job.model, job.cluster, job.training)


def layout(trainer: str = "megatron", **values: object) -> Layout:
    return resolve_layout({"tp": 2, "pp": 4, **values}, trainer=trainer, num_gpus=16)


INTERLEAVED = {"pp_schedule": "Interleaved1F1B", "virtual_stages": 2}


def beyond(*layouts: Layout, trainer: str = "megatron", **values: bool) -> Beyond:
    switches = {"budgets": True, "splits": True, **values}
    return Beyond(pricer=pricer(trainer), layouts=layouts, **switches)


def test_what_varies_nothing_is_no_parameter() -> None:
    assert beyond(layout(pp=1), budgets=False).ranges == {}
    assert set(beyond(layout(pp=1)).ranges) == {"recomputed"}
    assert set(beyond(layout(), budgets=False).ranges) == {"first", "last", "tilt"}
    assert set(beyond(layout(pp=2), layout(**INTERLEAVED)).ranges) == {
        "layout", "recomputed", "first", "last", "first_chunk", "last_chunk", "tilt",
    }  # fmt: skip
    eager = layout("torchtitan", compile=False)
    assert beyond(eager, trainer="torchtitan", splits=False).ranges == {}


@pytest.mark.parametrize(("trainer", "values"), [
    ("megatron", {"ac": "none"}),
    ("megatron", {"ac": "block-3"}),
    ("megatron", {"ac": "full", **INTERLEAVED}),
    ("torchtitan", {"ac": "memory-budget-0.62", "compile": True}),
    ("torchtitan", {"ac": "none", "compile": True}),
])  # fmt: skip
def test_a_walk_starts_at_the_layouts_themselves(trainer: str, values: dict[str, object]) -> None:
    start = layout(trainer, **values)
    space = beyond(layout(trainer, compile=trainer == "torchtitan"), start, trainer=trainer)
    assert space.layout(space.origins[1]) == start


@settings(max_examples=200)
@given(data=st.data())
def test_layers_move_and_none_is_lost(data: st.DataObject) -> None:
    space = beyond(layout(), layout(**INTERLEAVED), layout(pp=2))
    ranges = space.ranges.items()
    point = {name: data.draw(st.integers(*ends), label=name) for name, ends in ranges}
    found = space.layout(point)
    assert found == space.layout(point), "the same point is the same layout"
    if found.layers_per_stage is not None:
        assert sum(found.layers_per_stage) == LAYERS
        assert min(found.layers_per_stage) >= 1
        assert len(found.layers_per_stage) == found.pp * found.virtual_stages


def test_where_layers_come_from_and_go() -> None:
    space = beyond(layout(**INTERLEAVED))
    sizes = {
        name: space.layout({"first": 0, "last": 0, "tilt": 0, **moves}).layers_per_stage
        for name, moves in {
            "head": {"last": 1},
            "other chunk": {"last": 1, "last_chunk": 1},
            "embedding": {"first": -1},
            "late": {"tilt": 1},
        }.items()
    }
    assert (sizes["head"] or ())[-1] == (sizes["other chunk"] or ())[3] == 3
    assert [sum(split or ()) for split in sizes.values()] == [LAYERS] * 4
    assert (sizes["embedding"] or ())[0] == 5
    early = [index for index in range(8) if index % 4 < 2]
    assert sum((sizes["late"] or ())[index] for index in early) == LAYERS / 2 - 1


def test_refused_and_hopeless_layouts_say_why_and_nothing_better_is_lost() -> None:
    space = beyond(layout(ac="full"), layout(ac="full", **INTERLEAVED))
    points = [
        {"layout": place, "recomputed": share, "first": first, "last": last, "tilt": 0}
        for place, share, first, last in product((0, 1), (0, 40, 80, 100), (0, 1), (0, 1))
    ]
    ((best, _, _),) = simulated_columns(space.pricer, [layout(**INTERLEAVED)])
    priced = Priced(beyond=space, best_seconds=best)
    trials = priced.at(points)
    refused = [trial for trial in trials if trial.refused is not None]
    assert refused
    assert any("by a lower bound; the best takes" in str(trial.refused) for trial in refused)
    legal = [trial.layout for trial in refused if "lower bound" in str(trial.refused)]
    assert min(step for step, _, _ in simulated_columns(space.pricer, legal)) >= best
    assert priced.num_priced == len({t.layout for t in trials if t.refused is None})
    (rule,) = Priced(beyond=beyond(layout(pp_schedule="ZB-1p")), best_seconds=NO_LIMIT).at(
        [{"recomputed": 0, "first": 1}]
    )
    assert str(rule.refused).startswith("pp_schedule=ZB-1p: "), "the first rule that it breaks"


@pytest.mark.parametrize("name", ["tpe", "random", "cma-es", "nsga2"])
def test_the_same_seed_walks_the_same_way_from_the_best_layouts(name: str) -> None:
    space = beyond(layout(), layout(**INTERLEAVED))
    first, again, other = (
        sample_beyond(space, name=name, seed=seed, num_trials=48, best_seconds=NO_LIMIT)
        for seed in (0, 0, 1)
    )
    assert [t.layout for t in first.trials] == [t.layout for t in again.trials]
    assert [t.layout for t in first.trials] != [t.layout for t in other.trials]
    assert [t.layout for t in first.trials[:2]] == list(space.layouts)
    assert first.num_trials == 48


def test_samplers_differ() -> None:
    space = beyond(layout(), layout(**INTERLEAVED))
    walks = {
        name: tuple(
            trial.layout
            for trial in sample_beyond(
                space, name=name, seed=0, num_trials=64, best_seconds=NO_LIMIT
            ).trials
        )
        for name in ("tpe", "random", "cma-es", "nsga2")
    }
    assert len(set(walks.values())) == len(walks)


def test_all_points_of_a_small_space_are_the_exhaustive_best() -> None:
    space = beyond(layout(pp=2, ac="full"), budgets=False)
    ranges = space.ranges
    points = [
        dict(zip(ranges, values, strict=True))
        for values in product(*(range(low, high + 1) for low, high in ranges.values()))
    ]
    exhaustive = Priced(beyond=space, best_seconds=NO_LIMIT)
    exhaustive.at(points)
    asked = {"name": "brute-force", "seed": 0, "num_trials": len(points)}
    sampled = sample_beyond(space, **asked, best_seconds=NO_LIMIT)
    steps = [trial.step_seconds for trial in sampled.trials if trial.fits and trial.step_seconds]
    assert min(steps) == exhaustive.best_seconds


def test_optuna_hears_why_a_trial_was_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    studies: list[optuna.Study] = []
    create = optuna.create_study

    def kept(**given: object) -> optuna.Study:
        studies.append(create(**given))  # type: ignore[arg-type]
        return studies[-1]

    monkeypatch.setattr(optuna, "create_study", kept)
    asked = {"name": "random", "seed": 0, "num_trials": 32}
    sample_beyond(beyond(layout(ac="full")), **asked, best_seconds=1e-6)
    (study,) = studies
    states = {trial.state for trial in study.trials}
    assert states == {optuna.trial.TrialState.PRUNED}
    assert all("lower bound" in trial.user_attrs["reason"] for trial in study.trials)
