"""Samplers: legal and untried whatever they do, expected improvement exact, several at once apart,
quick for 100,000 candidates.
"""

import importlib.util
import re
import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from scipy import stats

from planner.errors import SpecError
from planner.samplers import GP, SAMPLERS, TPE
from planner.search.fit import OOM_LIMIT
from planner.study import samplers
from planner.study.candidates import Candidates
from planner.study.evaluations import Proposal
from planner.study.knowledge import Knowledge
from planner.study.ledger import StudySettings
from planner.study.samplers import CostModelSampler, FieldSpace, layout_of, make_sampler
from planner.study.study import ProbeStudy
from tests.conftest import ROOT
from tests.unit.probing_cases import MUCH, Machine, measurement, small, subset

AVAILABLE = [
    name for name, one in SAMPLERS.items() if all(map(importlib.util.find_spec, one.needs))
]


@pytest.fixture
def machine() -> Machine:
    return Machine.wrong_by(small(), 0.1)


def study_of(candidates: Candidates | None = None, **changes: Any) -> ProbeStudy:
    return ProbeStudy(candidates or small(), StudySettings(budget=MUCH, **changes))


def probe(study: ProbeStudy, machine: Machine) -> Proposal:
    """Asks once and tells what the machine measures."""
    asked = study.ask()
    study.tell(asked, machine.run(asked))
    return asked


def test_parameters_are_the_fields_of_the_layout() -> None:
    batch = small().batch
    space = FieldSpace(batch)
    for row in range(0, len(batch), 61):
        parameters, layout = space.parameters(row), batch.row(row)
        assert parameters == {**layout.model_dump(), "layers_per_stage": "trainer"}
        assert layout_of(parameters) == layout
        assert layout_of({**parameters, "layers_per_stage": "17,15"}).layers_per_stage == (17, 15)
        for name, value in parameters.items():
            distribution = space.distributions[name]
            assert distribution._contains(distribution.to_internal_repr(value))
        assert space.nearest(parameters, np.ones(len(batch), dtype=bool)) == row


def test_nearest_is_nearest_and_allowed() -> None:
    space, rows = FieldSpace(small().batch), np.arange(len(small()))
    wanted = space.parameters(10)
    found = space.nearest(wanted, rows != 10)
    differing = {name for name, value in space.parameters(found).items() if value != wanted[name]}
    assert found != 10
    assert 1 <= len(differing) <= 2
    assert space.nearest(wanted, rows == 77) == 77


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_trial_is_a_legal_layout_not_tried_before(name: str, machine: Machine) -> None:
    study = study_of(sampler=name, seed=1)
    asked = [probe(study, machine) for _ in range(12)]
    for one in asked:
        assert small().batch.row(one.row) == one.layout
        assert one.reason
    rows, trials = [one.row for one in asked if not one.repeat], study.optuna_study().trials
    assert len(set(rows)) == len(rows)
    parameters = [study.trials.sampler.space.parameters(row) for row in rows]
    assert [trial.params for trial in trials] == parameters
    assert all(trial.user_attrs["reason"] for trial in trials)


@pytest.mark.parametrize("name", AVAILABLE)
def test_all_candidates_are_tried_before_a_sampler_ends(name: str) -> None:
    candidates, rows = few(9), list[int]()
    machine, study = Machine.wrong_by(candidates, 0.1), study_of(candidates, sampler=name)
    while (asked := study.ask()) is not None and not asked.repeat:
        rows.append(asked.row)
        study.tell(asked, machine.run(asked))
    assert sorted(rows) == list(range(9))


def few(count: int) -> Candidates:
    chosen = subset(np.linspace(0, len(small()) - 1, count).astype(int))
    return replace(chosen, prior=replace(chosen.prior, oom_probability=np.full(count, 0.01)))


GP_LACKS = "needs torch and scipy; not installed: {}; install the probe extra"


@pytest.mark.parametrize(("name", "missing", "words"), [
    *(("gp", one, GP_LACKS.format(", ".join(one))) for one in (*zip(GP.needs), GP.needs)),
    ("cma-es", ("cmaes",), "not installed: cmaes; install the package cmaes")])  # fmt: skip
def test_a_sampler_says_what_it_needs_and_what_is_missing(
    name: str, missing: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"torch": object(), "scipy": object()} | dict.fromkeys(missing)
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    with pytest.raises(SpecError, match=words):
        make_sampler(name, Knowledge(small()), seed=0)


def test_the_probe_extra_brings_what_gp_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["probe"]
    assert {re.split("[<>=]", one)[0] for one in extra} >= set(GP.needs)


def test_the_first_is_the_models_best_that_fits() -> None:
    asked = study_of().ask()
    assert asked.row == np.flatnonzero(small().prior.oom_probability <= OOM_LIMIT)[0]
    assert "the model's first" in asked.reason


def test_the_next_has_the_largest_expected_improvement_times_probability_of_fitting() -> None:
    machine, study = Machine.wrong_by(small(), 0.15), study_of()
    for _ in range(6):
        probe(study, machine)
        posterior, untried = study.knowledge.posterior(), study.knowledge.untried()
        sd = np.sqrt(posterior.time.variance)
        z = (posterior.best - posterior.log_seconds) / sd
        improvement = sd * (stats.norm.pdf(z) + z * stats.norm.cdf(z))
        improvement *= 1.0 - posterior.risk
        improvement[~untried] = -1.0
        order = np.argsort(-improvement, kind="stable").tolist()
        assert posterior.promising(untried, 1) == order[:1]
        assert posterior.promising(untried, 20) == order[:20]


def test_risky_layouts_wait_until_memory_is_known(machine: Machine) -> None:
    risky = np.flatnonzero(small().prior.oom_probability > 0.2)
    assert len(risky)
    study = study_of()
    before = study.knowledge.posterior().risk[risky]
    for _ in range(3):
        asked = study.ask()
        assert study.knowledge.posterior().risk[asked.row] <= OOM_LIMIT
        less = {"peak_reserved_bytes": 0.8 * small().memory["peak_reserved_bytes"][asked.row]}
        told = machine.timed(asked.row, 0).model_copy(update=less)
        study.tell(asked, measurement(asked, told))
    assert np.median(study.knowledge.posterior().risk[risky]) < 0.2 * np.median(before)


def test_noise_is_settled_by_a_second_look() -> None:
    """Two layouts tie within noise and nothing else can win: one of them is asked again."""
    candidates = few(3)
    truth = candidates.prior.log_seconds[0] + np.array([0.0, 0.001, 2.0])
    machine, study = Machine(candidates, truth), study_of(candidates)
    for _ in range(3):
        probe(study, machine)
    again = study.ask()
    assert again.repeat
    assert again.row in (0, 1)
    assert "to tell it from its rival" in again.reason


def test_the_tree_starts_warm_with_the_models_picks(machine: Machine) -> None:
    picks, study = (
        samplers.model_picks(Knowledge(small()), TPE.warm_starts),
        study_of(sampler="tpe"),
    )
    assert len(set(picks)) == TPE.warm_starts
    asked = [probe(study, machine) for _ in range(TPE.warm_starts + 1)]
    assert [one.row for one in asked[: TPE.warm_starts]] == picks
    assert "tpe's choice" in asked[-1].reason


def test_it_serves_a_study_of_optunas_own() -> None:
    """`Study.optimize` drives it too; there is no field beside the layout's."""
    knowledge = Knowledge(few(6))
    study = optuna.create_study(sampler=CostModelSampler(knowledge))
    distributions = FieldSpace(knowledge.candidates.batch).distributions

    def objective(trial: optuna.Trial) -> float:
        values = {name: trial._suggest(name, one) for name, one in distributions.items()}
        return float(values["micro_batch_size"])

    study.optimize(objective, n_trials=2)
    assert len(study.trials) == 2
    with pytest.raises(ValueError, match="is no field of a layout"):
        study.ask({"learning_rate": optuna.distributions.FloatDistribution(0.0, 1.0)})
