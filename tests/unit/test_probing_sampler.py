"""Samplers: legal and untried whatever they do, expected improvement exact, several at once apart,
quick for 100,000 candidates.
"""

import importlib.util
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from scipy import stats

from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.rules import Context
from planner.samplers import SAMPLERS
from planner.samplers.gp import GP
from planner.samplers.tpe import TPE
from planner.search.fit import OOM_LIMIT
from planner.search.space.enumerate import build_space
from planner.specs.job import SearchSpec
from planner.study.candidates import Candidates, JobSize, Prior
from planner.study.posterior import Knowledge
from planner.study.samplers import (
    LEAST_REPEAT_GAIN,
    CostModelSampler,
    FieldSpace,
    SnappedSampler,
    layout_of,
    make_sampler,
    model_picks,
)
from planner.study.study import ProbeStudy, StudySettings
from tests.unit.probing_cases import MUCH, Machine, small, subset

AVAILABLE = [
    name for name, one in SAMPLERS.items() if all(map(importlib.util.find_spec, one.needs))
]


def test_parameters_are_the_fields_of_the_layout() -> None:
    candidates = small()
    space = FieldSpace(candidates.batch)
    for row in range(0, len(candidates), 61):
        parameters = space.parameters(row)
        layout = candidates.batch.row(row)
        expected = {**layout.model_dump(), "layers_per_stage": "trainer"}
        assert parameters == expected
        assert layout_of(parameters) == layout
        assert layout_of({**parameters, "layers_per_stage": "17,15"}).layers_per_stage == (17, 15)
        for name, value in parameters.items():
            distribution = space.distributions[name]
            assert distribution._contains(distribution.to_internal_repr(value))
        assert space.nearest(parameters, np.ones(len(candidates), dtype=bool)) == row


def test_nearest_is_nearest_and_allowed() -> None:
    candidates = small()
    space = FieldSpace(candidates.batch)
    wanted = space.parameters(10)
    allowed = np.ones(len(candidates), dtype=bool)
    allowed[10] = False
    found = space.nearest(wanted, allowed)
    differing = {name for name, value in space.parameters(found).items() if value != wanted[name]}
    assert found != 10
    assert 1 <= len(differing) <= 2
    allowed[:] = False
    allowed[77] = True
    assert space.nearest(wanted, allowed) == 77


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_trial_is_a_legal_layout_not_tried_before(name: str) -> None:
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.1)
    study = ProbeStudy(candidates, StudySettings(sampler=name, seed=1, budget=MUCH))
    rows = []
    for _ in range(12):
        asked = study.ask()
        assert asked.row is not None
        assert candidates.batch.row(asked.row) == asked.layout
        assert asked.reason
        if not asked.repeat:
            rows.append(asked.row)
        study.tell(asked, machine.run(asked))
    assert len(set(rows)) == len(rows)
    trials = study.optuna_study().trials
    assert [trial.params for trial in trials] == [
        study.trials.sampler.space.parameters(row) for row in rows
    ]
    assert all(trial.user_attrs["reason"] for trial in trials)


@pytest.mark.parametrize("name", AVAILABLE)
def test_all_candidates_are_tried_before_a_sampler_ends(name: str) -> None:
    candidates = few(9)
    machine = Machine.wrong_by(candidates, 0.1)
    study = ProbeStudy(candidates, StudySettings(sampler=name, budget=MUCH))
    rows: list[int] = []
    while (asked := study.ask()) is not None and not asked.repeat:
        assert asked.row is not None
        rows.append(asked.row)
        study.tell(asked, machine.run(asked))
    assert sorted(rows) == list(range(9))


def few(count: int) -> Candidates:
    chosen = subset(np.linspace(0, len(small()) - 1, count).astype(int))
    return replace(chosen, prior=replace(chosen.prior, oom_probability=np.full(count, 0.01)))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SpecError, match="no sampler of this name"):
        make_sampler("grid", Knowledge(small()), seed=0)


@pytest.mark.parametrize("missing", [("torch",), ("scipy",), ("torch", "scipy")])
def test_gp_says_what_it_needs_and_what_is_missing(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else object()
    )
    with pytest.raises(
        SpecError,
        match=rf"needs torch and scipy; not installed: {', '.join(missing)}; install "
        r"the probe extra",
    ):
        make_sampler("gp", Knowledge(small()), seed=0)


def test_the_seven_samplers_and_what_cma_es_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cost-model", "tpe", "gp", "nsga2", "cma-es", "random", "brute-force"}
    assert set(SAMPLERS) == names
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match="not installed: cmaes; install the package cmaes"):
        make_sampler("cma-es", Knowledge(small()), seed=0)


def test_the_probe_extra_brings_what_gp_needs() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {re.split("[<>=]", one)[0] for one in extras["probe"]} >= set(GP.needs)


def test_the_first_is_the_models_best_that_fits() -> None:
    candidates = small()
    asked = ProbeStudy(candidates, StudySettings(budget=MUCH)).ask()
    fits = candidates.prior.oom_probability <= OOM_LIMIT
    assert asked.row == int(np.flatnonzero(fits)[0])
    assert "the model's first" in asked.reason


def test_the_next_has_the_largest_expected_improvement_times_probability_of_fitting() -> None:
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.15)
    study = ProbeStudy(candidates, StudySettings(budget=MUCH, risk_limit=1.0))
    for _ in range(6):
        asked = study.ask()
        assert asked is not None
        study.tell(asked, machine.run(asked))
        posterior = study.knowledge.posterior()
        every = np.arange(len(candidates))
        sd = np.sqrt(posterior.time.variance())
        z = (posterior.best - posterior.log_seconds) / sd
        improvement = (
            sd * (stats.norm.pdf(z) + z * stats.norm.cdf(z)) * (1.0 - posterior.risk(every))
        )
        improvement[~study.knowledge.untried()] = -1.0
        assert posterior.promising(study.knowledge.untried(), 1) == [int(np.argmax(improvement))]
        assert posterior.promising(study.knowledge.untried(), 20) == [
            int(row) for row in np.argsort(-improvement, kind="stable")[:20]
        ]


def test_lazy_search_looks_at_all_that_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.study.posterior.CHUNK", 64)
    monkeypatch.setattr("planner.study.posterior.FIRST", 4)
    monkeypatch.setattr("planner.study.surrogate.FEW", 3)
    test_the_next_has_the_largest_expected_improvement_times_probability_of_fitting()


def test_the_bounds_of_the_lazy_search_leave_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After results all over the candidates: bounds are loose in places and tight in others."""
    for name, value in (("posterior.CHUNK", 16), ("posterior.FIRST", 1), ("surrogate.FEW", 3)):
        monkeypatch.setattr(f"planner.study.{name}", value)
    candidates, rng = small(), np.random.default_rng(0)
    machine, knowledge = Machine.wrong_by(candidates, 0.3), Knowledge(candidates)
    for number, row in enumerate(rng.choice(len(candidates), 25, replace=False)):
        knowledge.observe(int(row), machine.timed(int(row), number))
        posterior, rows = knowledge.posterior(), np.flatnonzero(knowledge.untried())
        risk = posterior.risk(rows)
        value = np.where(risk <= OOM_LIMIT, posterior.improvement(rows) * (1.0 - risk), -1.0)
        for count in (1, 5):
            expected = list(rows[np.lexsort((rows, -value))[:count]])
            assert posterior.promising(knowledge.untried(), count, risk_limit=OOM_LIMIT) == expected


def test_several_at_once_are_apart() -> None:
    candidates = small()
    study = ProbeStudy(candidates, StudySettings(budget=MUCH, parallel=4))
    machine = Machine.wrong_by(candidates, 0.1)
    first = study.ask_many()
    assert len({asked.row for asked in first}) == 4
    for asked in first:
        study.tell(asked, machine.run(asked))
    alone = study.knowledge.posterior().promising(
        study.knowledge.untried(), 1, risk_limit=study.settings.risk_limit
    )[0]
    second = study.ask_many()
    assert second[0].row == alone
    believed = study.knowledge.posterior()
    rows = np.array([asked.row for asked in second])
    assert np.all(believed.time.variance(rows) < 2e-4)
    assert len({asked.row for asked in second}) == 4
    known = {asked.row for asked in first}
    assert all(asked.repeat == (asked.row in known) for asked in second)


def test_risky_layouts_wait_until_memory_is_known() -> None:
    candidates = small()
    risky = np.flatnonzero(candidates.prior.oom_probability > 0.2)
    assert len(risky)
    machine = Machine.wrong_by(candidates, 0.1)
    study = ProbeStudy(candidates, StudySettings(budget=MUCH))
    before = study.knowledge.posterior().risk(risky)
    for _ in range(3):
        asked = study.ask()
        assert asked.row is not None
        assert study.knowledge.posterior().risk(np.array([asked.row]))[0] <= OOM_LIMIT
        less = 0.8 * float(candidates.memory["peak_reserved_bytes"][asked.row])
        machine.outcomes[asked.row] = machine.timed(asked.row, 0).model_copy(
            update={"peak_reserved_bytes": less}
        )
        study.tell(asked, machine.run(asked))
    assert np.median(study.knowledge.posterior().risk(risky)) < 0.2 * np.median(before)


def test_noise_is_settled_by_a_second_look() -> None:
    """Two layouts tie within noise and nothing else can win: one of them is asked again."""
    candidates = few(3)
    truth = candidates.prior.log_seconds.copy()
    machine = Machine(candidates, truth)
    machine.log_seconds = np.array([truth[0], truth[0] + 0.001, truth[0] + 2.0])
    study = ProbeStudy(candidates, StudySettings(budget=MUCH))
    for _ in range(3):
        asked = study.ask()
        assert asked is not None
        study.tell(asked, machine.run(asked))
    again = study.ask()
    assert again.repeat
    assert again.row in (0, 1)
    assert "to tell it from its rival" in again.reason


def test_no_second_look_beside_a_faster_one_under_way() -> None:
    """What two slower layouts settle between them is worth nothing if a third beats both."""
    candidates, seconds = few(4), np.array([2.0, 2.2, 2.201, 4.0])
    candidates = replace(candidates, prior=replace(candidates.prior, log_seconds=seconds))
    knowledge, machine = Knowledge(candidates), Machine(candidates, seconds)
    for number, row in enumerate((1, 2, 3)):
        knowledge.observe(row, machine.timed(row, number))
    sampler = CostModelSampler(knowledge)
    again = sampler._repeat(knowledge.posterior(), LEAST_REPEAT_GAIN)
    assert again.row == 2
    knowledge.expect(0)
    assert sampler._repeat(knowledge.posterior(), LEAST_REPEAT_GAIN) is None


def test_the_tree_starts_warm_with_the_models_picks() -> None:
    knowledge = Knowledge(small())
    picks = model_picks(knowledge, TPE.warm_starts)
    sampler = make_sampler("tpe", knowledge, seed=0)
    assert isinstance(sampler, SnappedSampler)
    assert list(sampler.first) == picks
    assert len(set(picks)) == TPE.warm_starts
    study = ProbeStudy(small(), StudySettings(sampler="tpe", budget=MUCH))
    machine = Machine.wrong_by(small(), 0.1)
    asked = []
    for _ in range(TPE.warm_starts + 1):
        asked.append(study.ask())
        study.tell(asked[-1], machine.run(asked[-1]))
    assert [one.row for one in asked[: TPE.warm_starts]] == picks
    assert "tpe's choice" in asked[-1].reason


def test_it_serves_a_study_of_optunas_own() -> None:
    """`Study.optimize` drives it too; there is no field beside the layout's."""
    knowledge = Knowledge(few(6))
    study = optuna.create_study(sampler=CostModelSampler(knowledge))
    distributions = FieldSpace(knowledge.candidates.batch).distributions

    def objective(trial: optuna.Trial) -> float:
        values = {
            name: trial._suggest(name, distribution) for name, distribution in distributions.items()
        }
        return float(values["micro_batch_size"])

    study.optimize(objective, n_trials=2)
    assert len(study.trials) == 2
    with pytest.raises(ValueError, match="is no field of a layout"):
        study.ask({"learning_rate": optuna.distributions.FloatDistribution(0.0, 1.0)})


def many(count: int) -> Candidates:
    """Distinct legal layouts of a large job, priced with its own model."""
    training = {"seq_len": 8192, "global_batch_size": 512}
    job = read_job(
        {
            "model": "llama3.1-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
            "training": training,
        }
    )
    space = build_space(
        Context(model=job.model, cluster=job.cluster, training=job.training), SearchSpec()
    )
    cells = np.arange(len(space.cells))[
        : int(np.searchsorted(np.cumsum(space.cell_sizes), count)) + 1
    ]
    batch = space.expand(cells).take(slice(0, count))
    rng = np.random.default_rng(0)
    prior = Prior.alike(
        10.0 * np.exp(0.3 * rng.standard_normal(count)), 0.15, np.full(count, 0.01), 0.05
    )
    prior = replace(prior, factor=0.05 * rng.standard_normal((count, 7)))
    memory = {"peak_reserved_bytes": np.full(count, 40e9)}
    return Candidates.build(
        batch, prior, memory, JobSize(usable_bytes=76e9, num_gpus=64, global_batch_size=512)
    )
