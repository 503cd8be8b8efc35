"""The Optuna study of a plan: its trials are what the plan ranked, considered and refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

import planner
from planner.errors import SpecError
from planner.intake.jobs import resolve_layout
from planner.plan.considered import MOST_CONSIDERED, Fitting, _looked_at
from planner.search.choice import pareto
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import Layout
from planner.specs.measurement import Measured
from planner.specs.plan import Plan
from planner.study.ask_tell import run
from planner.study.ledger import Budget, StudySettings
from planner.study.measured_search import summary
from planner.study.of_plan import VALUES
from planner.study.samplers import layout_of
from tests.conftest import JOB, SHORT_OF_MEMORY
from tests.unit.probing_cases import Machine, small
from tests.unit.test_measured_plan import Pool


def layout_in(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> Layout:
    return layout_of({**study.user_attrs["fixed"], **trial.params})


def layouts_of(study: optuna.Study, *states: TrialState) -> dict[Layout, Any]:
    """Trials of a study that are layouts, by layout. states: all, unless given."""
    trials = [one for one in study.trials if one.params and (not states or one.state in states)]
    found = {layout_in(study, one): one for one in trials}
    assert len(found) == len(trials), "a layout stands once"
    return found


@pytest.fixture(scope="module")
def study(plan: Plan) -> optuna.Study:
    return planner.study_of(plan)


NARROW = {"precision": "bf16", "tp": 1, "cp": 1, "pp": 1}


def test_the_whole_front_is_looked_at_however_few_are_asked_for() -> None:
    layouts = [
        resolve_layout({"dp_shard": size}, trainer="torchtitan", num_gpus=size)
        for size in (1, 2, 4, 8, 16)
    ]
    seconds, sizes = np.arange(1.0, 6.0), np.array([50.0, 40.0, 60.0, 20.0, 10.0])
    fitting = Fitting(layouts=layouts, step_seconds=seconds, device_bytes=sizes)
    none_of_it = SimpleNamespace(layouts=list)
    at_size = SimpleNamespace(sampled=(), screened=SimpleNamespace(unfit=none_of_it))
    job = SimpleNamespace(search=SimpleNamespace(objective="throughput"))
    found = _looked_at(job, at_size, fitting, [], 2)  # type: ignore[arg-type]
    assert sorted(found, key=layouts.index) == [one for one in layouts if one is not layouts[2]]


def test_the_first_trials_are_the_ranked_layouts(plan: Plan, study: optuna.Study) -> None:
    assert study.study_name == plan.id
    for entry, trial in zip(plan.ranked, study.trials, strict=False):
        assert layout_in(study, trial) == entry.layout
        assert trial.value == pytest.approx(entry.estimate.step_seconds, rel=1e-9)
        attributes = trial.user_attrs
        assert attributes["rank"] == entry.rank
        assert attributes["predicted_step_seconds"] == trial.value
        assert attributes["interval_seconds"] == pytest.approx(entry.estimate.interval.step_seconds)
        assert attributes["device_bytes"] == pytest.approx(entry.estimate.device_bytes, rel=1e-9)
        assert (attributes["gpu_seconds"], attributes["reasons"]) == (0.0, entry.reasons)


def test_parameters_have_the_names_of_the_layouts_fields(study: optuna.Study) -> None:
    names = {name for trial in study.trials for name in trial.params}
    fixed = study.user_attrs["fixed"].keys()
    assert (names | fixed, names & fixed) == (set(Layout.model_fields), set())
    assert {"dp_shard", "ac"} <= names


def test_memory_is_a_constraint_and_the_best_trial_is_the_fastest_fit(study: optuna.Study) -> None:
    complete = layouts_of(study, TrialState.COMPLETE).values()
    for trial in complete:
        over = trial.user_attrs["oom_probability"] - OOM_LIMIT
        assert trial.system_attrs["constraints"] == [over]  # as Optuna 4 and its dashboard read it
        assert list(trial.constraints.values()) == [over]
    unfit = [one for one in complete if one.user_attrs["oom_probability"] > OOM_LIMIT]
    assert study.best_value == min(one.value for one in complete if one not in unfit)
    assert unfit, "the fastest of what was priced and does not fit is there"


def test_what_was_left_out_is_pruned_by_reason_and_number(plan: Plan, study: optuna.Study) -> None:
    said = [trial.user_attrs for trial in study.trials if not trial.params]
    assert {one["reason"]: one["layouts"] for one in said} == plan.rejected
    refused = {step.layout: step.refused for step in plan.sensitivity if step.refused is not None}
    pruned = layouts_of(study, TrialState.PRUNED).items()
    assert refused
    assert refused.items() <= {(one, trial.user_attrs["reason"]) for one, trial in pruned}


def test_not_too_many_layouts_are_considered(plan: Plan) -> None:
    fitting = [one for one in plan.considered if (one.oom_probability or 0.0) <= OOM_LIMIT]
    assert MOST_CONSIDERED <= len(fitting) < MOST_CONSIDERED + 32


def test_the_same_plan_gives_the_same_study(plan: Plan) -> None:
    again = Plan.model_validate_json(plan.model_dump_json())
    for values in (None, "time-memory", "time-cost"):
        first, second = planner.study_of(plan, values), planner.study_of(again, values)
        assert first.trials == second.trials
        assert first.user_attrs == second.user_attrs


def test_what_a_sampler_tried_is_there() -> None:
    plan = planner.recommend(SHORT_OF_MEMORY)
    trials = planner.study_of(plan).trials
    sampled = [one for one in trials if one.user_attrs.get("sampled_by") == "cost-model"]
    study = plan.searched.study
    assert 0 < len(sampled) <= study["trials"]
    assert study["gain"] > 0, "splits and recomputation together beat each alone"
    pruned = [trial for trial in sampled if trial.state is TrialState.PRUNED]
    assert (len(pruned) > 0) == (study["pruned"] > 0)
    assert all(trial.user_attrs["reason"] for trial in pruned)


def test_a_plan_says_why_nothing_was_sampled(plan: Plan) -> None:
    reason = "no value that enumeration leaves out makes the best layouts faster"
    assert plan.searched.study.items() >= {"trials": 0, "reason": reason}.items()


def test_the_front_is_the_plans_front(plan: Plan) -> None:
    study = planner.study_of(plan, "time-memory")
    assert study.study_name == f"{plan.id}-time-memory"
    assert study.metric_names == ["step_seconds", "device_bytes"]
    usable = plan.ranked[0].estimate.usable_bytes
    theirs = {tuple(trial.values) for trial in study.best_trials}
    ours = {(point.step_seconds, usable - point.headroom_bytes) for point in plan.pareto}
    assert len(ours) > 3
    assert ours <= theirs  # a plan shows at most 20 points
    complete = layouts_of(study, TrialState.COMPLETE).values()
    fitting = [one.values for one in complete if one.user_attrs["oom_probability"] <= OOM_LIMIT]
    step, device = np.array(fitting).T
    rows = pareto.front(step, device, most=len(step))
    assert theirs == {(step[row], device[row]) for row in rows}
    assert len(ours) == min(len(rows), 20)


def test_the_front_of_time_and_cost_is_the_plans_over_its_sizes() -> None:
    cluster = {**JOB["cluster"], "num_gpus": [8, 16]}
    plan = planner.recommend({**JOB, "cluster": cluster, "search": {"fix": NARROW, "top_k": 2}})
    found = layouts_of(planner.study_of(plan, "time-cost"))
    values = {one.layout: tuple(found[one.layout].values) for one in plan.sizes}
    for one in plan.sizes:
        assert values[one.layout] == pytest.approx((one.time_to_train_seconds, one.cost))
    beaten = {
        layout
        for layout, (time, cost) in values.items()
        for other in values.values()
        if other[0] <= time and other[1] <= cost and other != (time, cost)
    }
    assert {one.layout for one in plan.sizes if not one.on_front} == beaten
    assert planner.study_of(plan).metric_names == ["seconds_per_token"]


@pytest.mark.parametrize(("objective", "name"), [
    ("memory", "device_bytes"), ("cost", "cost_usd"), ("energy", "joules_per_token")])  # fmt: skip
def test_the_value_is_what_the_plan_minimises(objective: str, name: str) -> None:
    search = {"objective": objective, "top_k": 3, "prefer": "fastest", "fix": NARROW}
    plan = planner.recommend({**JOB, "search": search})
    study = planner.study_of(plan)
    assert study.metric_names == [name]
    assert study.best_value == study.trials[0].value
    without = planner.study_of(plan.model_copy(update={"considered": []}))
    assert without.trials[0].value == pytest.approx(study.best_value, rel=1e-6)


def test_an_older_plan_has_ranked_layouts_and_its_front(plan: Plan, study: optuna.Study) -> None:
    values = plan.model_dump(mode="json")
    for name in ("considered", "sizes", "regret"):
        del values[name]
    for entry in values["ranked"]:
        del entry["run"]
    stored = Plan.model_validate(values)
    assert (stored.sizes, stored.regret, stored.ranked[0].run) == ([], None, None)
    older = planner.study_of(stored)
    for old, new in zip(older.trials[: len(plan.ranked)], study.trials, strict=False):
        assert (layout_in(older, old), old.value) == (layout_in(study, new), new.value)
    complete = layouts_of(older, TrialState.COMPLETE)
    assert complete.keys() == {one.layout for one in (*plan.ranked, *plan.pareto)}


def test_values_that_do_not_exist_are_refused(plan: Plan) -> None:
    with pytest.raises(SpecError, match=f"use one of {', '.join(VALUES)}"):
        planner.study_of(plan, "speed")
    with pytest.raises(SpecError, match="is of a plan that spent probes"):
        planner.study_of(plan, "measured")


@pytest.fixture(scope="module")
def probed() -> Plan:
    return Pool(1, noise_sd=0.02).plan(3)


def test_a_plan_with_probes_has_them_as_trials(probed: Plan) -> None:
    study = planner.study_of(probed)
    assert (study.study_name, study.metric_names) == (probed.id, ["step_seconds"])
    complete = layouts_of(study, TrialState.COMPLETE)
    entries = [entry for entry in probed.ranked if entry.measurement]
    measured = {entry.layout: entry.measurement["step_seconds"] for entry in entries}
    assert {one: trial.value for one, trial in complete.items()} == pytest.approx(measured)
    for trial in complete.values():
        attributes = trial.user_attrs
        low, high = attributes["interval_seconds"]
        assert low < attributes["predicted_step_seconds"] < high
        assert attributes["measured_step_seconds"] == trial.value
        assert attributes["asked_because"]
    spent = sum(one.user_attrs.get("gpu_seconds", 0.0) for one in study.trials)
    assert spent == pytest.approx(probed.probing["gpu_seconds"])


def test_its_predictions_are_a_study_beside_it(probed: Plan) -> None:
    study = planner.study_of(probed, "predicted")
    assert study.study_name == f"{probed.id}-predicted"
    first = study.trials[0].user_attrs
    assert first["measured_step_seconds"] != first["predicted_step_seconds"]
    assert planner.study_of(probed, "measured").study_name == probed.id


def test_probes_that_ran_out_of_memory_or_failed(probed: Plan) -> None:
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.1)
    settings = StudySettings(budget=Budget(probes=4, gpu_seconds=1e12), tolerance=-1.0)
    machine.outcomes = {
        row: Measured(status="oom", message="no room") if row % 2 else Measured(status="failed")
        for row in range(len(candidates))
    }
    probing: dict[str, Any] = summary(run(candidates, settings, machine.run))
    shown = planner.study_of(probed.model_copy(update={"probing": probing})).trials
    states = [trial.state for trial in shown if trial.params]
    assert {TrialState.PRUNED, TrialState.FAIL} & set(states)
    for trial in shown:
        if trial.user_attrs.get("status") == "oom":
            assert trial.state is TrialState.PRUNED
            assert trial.system_attrs["constraints"][0] > 0
            assert trial.user_attrs["reason"]
