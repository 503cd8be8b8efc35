"""What enumeration leaves out is found, and Optuna proposes only where something is."""

from functools import cache
from typing import Any

import optuna
import pytest

from planner.cost.price import Pricer
from planner.estimates import simulated_columns
from planner.intake.jobs import read_job, resolve_layout
from planner.search.left_out import TRIALS, LeftOut, contract_values
from planner.search.one_size import NOTHING_LEFT_OUT, search_size
from planner.search.space import domains
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout
from tests.conftest import job_values
from tests.pricing import pricer_of

NO_LIMIT = float("inf")
LAYERS = 56
MIXTRAL = job_values("mixtral-8x22b", "h100-sxm-80gb", 128, 4096, 512, trainer="megatron")
EVEN = {"pp_schedule": "Interleaved1F1B", "virtual_stages": 7}
UNEVEN = {**EVEN, "virtual_stages": 4, "layers_per_stage": (1,) * 2 + (2,) * 24 + (1,) * 6}


@cache
def pricer() -> Pricer:
    return pricer_of(read_job(MIXTRAL))


def layout(**values: object) -> Layout:
    degrees = {"tp": 2, "pp": 8, "ep": 8, "ac": "none", "precision": "float8-delayed"}
    return resolve_layout({**degrees, **values}, trainer="megatron", num_gpus=128)


def left_out(*seeds: Layout, best: float | None = None, **search: Any) -> LeftOut:
    steps = [step for step, _, _ in simulated_columns(pricer(), seeds)]
    known = min(steps) if best is None else best
    asked = SearchSpec(**search)
    return LeftOut(pricer=pricer(), search=asked, seeds=seeds, best_seconds=known)


@pytest.fixture
def _without_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of stages as it was for a week, which cost 13%."""
    whole = domains.virtual_stages
    monkeypatch.setattr(domains, "virtual_stages", lambda c: tuple({*whole(c)} - {7}))


def test_sets_of_modules_that_no_domain_lists_are_tried() -> None:
    known = [one for one in contract_values(pricer())["ac"] if one.startswith("modules")]
    assert len({*known}) == len(known) == 2**4 - 2  # "modules-core_attn" is selective-attention
    assert "modules-core_attn+layernorm+moe_act+moe" in known


def test_complete_domains_leave_nothing_out_and_cost_no_trial() -> None:
    assert left_out(layout(**UNEVEN)).gains() == []


@pytest.mark.usefixtures("_without_seven")
def test_a_value_that_a_domain_misses_is_found() -> None:
    search = left_out(layout(**UNEVEN))
    before = search.best_seconds
    ((place, found),) = search.gains()
    assert (place, found) == (0, layout(**EVEN))
    assert search.best_seconds < 0.995 * before
    trials = search.propose([(place, found)], name="random", seed=0)
    proposed = [one.step_seconds for one in trials if one.fits and one.step_seconds]
    assert min(proposed) <= simulated_columns(pricer(), [found])[0][0]


CHOSEN = [{"fix": {"virtual_stages": 4}}, {"allow": {"virtual_stages": [2, 4]}}]


@pytest.mark.usefixtures("_without_seven")
@pytest.mark.parametrize("asked", CHOSEN, ids=str)
def test_what_the_user_chose_is_not_left_out(asked: dict[str, Any]) -> None:
    assert left_out(layout(**UNEVEN), **asked).gains() == []


@pytest.mark.slow
@pytest.mark.usefixtures("_without_seven")
def test_a_search_recovers_what_its_narrowed_domain_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    job = read_job({**MIXTRAL, "search": {"prefer": "fastest"}})
    narrowed = search_size(job, job.cluster, lambda _: None, samples=False)
    found = search_size(job, job.cluster, lambda _: None)
    monkeypatch.undo()
    whole = search_size(job, job.cluster, lambda _: None)
    assert narrowed.best_seconds > 1.005 * whole.best_seconds
    assert found.best_seconds == pytest.approx(whole.best_seconds, rel=1e-9)
    assert found.candidates[0][2].virtual_stages == 7
    assert (found.study or {})["trials"] == TRIALS
    assert (whole.study or {})["reason"] == NOTHING_LEFT_OUT


@pytest.mark.parametrize("name", ["tpe", "random", "cma-es", "nsga2"])
def test_the_same_seed_proposes_the_same_from_the_best_layouts(name: str) -> None:
    seeds = (layout(**UNEVEN), layout(**EVEN))
    first, again, other = (
        left_out(*seeds, best=NO_LIMIT).propose([], name=name, seed=seed) for seed in (0, 0, 1)
    )
    assert [one.layout for one in first] == [one.layout for one in again]
    assert [one.layout for one in first] != [one.layout for one in other]
    assert tuple(one.layout for one in first[:2]) == seeds
    assert len(first) == TRIALS
    splits = [one.layout.layers_per_stage for one in first if one.refused is None]
    assert all(split is None or sum(split) == LAYERS for split in splits)


def test_refused_and_hopeless_layouts_say_why_and_nothing_better_is_lost() -> None:
    search = left_out(layout(**EVEN))
    best = search.best_seconds
    changes = ({"pp_schedule": "ZB-1p"}, {**EVEN, "ac": "full"}, {"tp": 16}, EVEN)
    trials = search.at([layout(**change) for change in changes])
    assert str(trials[0].refused).startswith("pp_schedule=ZB-1p: "), "the first rule it breaks"
    bounded = [one.layout for one in trials if "by a lower bound" in str(one.refused)]
    assert bounded
    assert min(step for step, _, _ in simulated_columns(pricer(), bounded)) >= best


def test_optuna_hears_why_a_trial_was_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    studies: list[optuna.Study] = []
    create = optuna.create_study

    def kept(**given: object) -> optuna.Study:
        studies.append(create(**given))  # type: ignore[arg-type]
        return studies[-1]

    monkeypatch.setattr(optuna, "create_study", kept)
    left_out(layout(**EVEN), best=1e-6).propose([], name="random", seed=0)
    (study,) = studies
    assert {trial.state for trial in study.trials} == {optuna.trial.TrialState.PRUNED}
    assert all(trial.user_attrs["reason"] for trial in study.trials)
    assert "lower bound" in study.trials[0].user_attrs["reason"]
