"""The closed loop learns from results by their kind: times, repeats, out of memory, failures."""

from dataclasses import replace

import numpy as np
import pytest
from optuna.trial import TrialState

from planner.api.render.plan import ranked_table
from planner.plan.recommend import recommend
from planner.specs.measurement import Measured, Measurement
from planner.study import pruning
from planner.study.ask_tell import Ranked, outcome
from planner.study.evaluations import Proposal
from planner.study.knowledge import Knowledge
from planner.study.measured_search import with_measurement
from planner.study.records import EMULATED_SD, RUN_SD, noise_variance
from planner.study.samplers import Pick
from planner.study.study import BROKEN, ProbeStudy
from planner.study.trials import MEMORY_CONSTRAINT
from tests.conftest import fixed_now
from tests.unit import probing_cases
from tests.unit.probing_cases import Machine, failed, measurement, play, settings, small, told_of


@pytest.fixture
def study() -> ProbeStudy:
    return ProbeStudy(small(), settings())


def test_out_of_memory_is_infeasible_with_its_margin_and_rules_out_what_is_larger() -> None:
    candidates = probing_cases.subset(np.arange(row_with_larger(), len(small())))
    usable = candidates.size.usable_bytes
    study = ProbeStudy(candidates, settings())
    asked = study.ask()
    assert asked.row == 0
    bytes_of = {"attempted_bytes": 0.2 * usable, "allocated_bytes": 0.95 * usable}
    ruled_out = study.tell(asked, measurement(asked, probing_cases.out_of_memory(**bytes_of)))
    larger = np.flatnonzero(pruning.at_least(candidates.batch, 0, 64).mask)
    assert set(ruled_out) == {*larger} - {0} != set()
    trial = study.optuna_study().trials[0]
    assert (trial.state, trial.value) == (TrialState.PRUNED, None)
    assert trial.constraints[MEMORY_CONSTRAINT] == pytest.approx(0.15)
    for other in ruled_out:
        assert "candidate 0 ran out of memory, and here" in study.knowledge.excluded[other]
    assert not study.knowledge.untried()[ruled_out].any()


def test_the_memory_model_learns_from_what_ran_out() -> None:
    row, risk, knowledge = row_with_larger(), small().prior.oom_probability, Knowledge(small())
    alike = np.flatnonzero((risk > 0.001) & (risk < 0.5))
    alike = alike[~pruning.at_least(small().batch, row, 64).mask[alike]]
    before = knowledge.posterior().risk[alike]
    knowledge.observe(row, probing_cases.out_of_memory())
    after = knowledge.posterior().risk[alike]
    assert np.all(after >= before - 1e-9)
    assert np.mean(after) > 1.5 * np.mean(before)


def row_with_larger() -> int:
    """A candidate that is likely to fit and below which others must be larger."""
    order = map(int, np.flatnonzero(small().prior.oom_probability < 0.02))
    return next(
        row for row in order if pruning.at_least(small().batch, row, 64).mask[row:].sum() > 3
    )


def test_a_layout_that_ran_makes_smaller_ones_certain_to_fit() -> None:
    candidates = small()
    riskiest = map(int, np.argsort(-candidates.prior.oom_probability))
    row = next(row for row in riskiest if pruning.at_most(candidates.batch, row, 64).mask.sum() > 2)
    knowledge = Knowledge(candidates)
    below = np.flatnonzero(pruning.at_most(candidates.batch, row, 64).mask)
    assert knowledge.posterior().risk[below].max() > 0.01
    knowledge.observe(row, Measured(rung="probed", step_seconds=10.0))
    assert knowledge.posterior().risk[below].max() == 0.0


def test_a_failure_is_a_failed_trial_with_its_class_and_not_asked_again(study: ProbeStudy) -> None:
    asked = study.ask()
    study.tell(asked, measurement(asked, failed("invalid-layout")))
    trial = study.optuna_study().trials[0]
    assert trial.state is TrialState.FAIL
    assert "invalid-layout" in trial.user_attrs["message"]
    assert study.ask().row != asked.row
    assert study.knowledge.excluded[asked.row] == "failed: invalid-layout"


@pytest.mark.parametrize("kind", ["foreign", "lost-gpu", "machine", "preempted"])
def test_a_failure_of_the_machine_excludes_no_layout(kind: str, study: ProbeStudy) -> None:
    asked = study.ask()
    study.tell(asked, measurement(asked, failed(kind)))
    assert study.ask().row != asked.row
    assert study.knowledge.excluded == {}
    assert study.spent.failures_in_a_row == 1


def test_where_no_probe_can_run_the_study_stops_and_blames_no_layout() -> None:
    machine = Machine.wrong_by(small(), 0.1)
    told = failed(BROKEN).model_copy(update={"message": "no torch"})

    def breaks_after_two(asked: Proposal) -> Measurement:
        return machine.run(asked) if len(machine.asked) < 2 else measurement(asked, told)

    outcome, _ = play(breaks_after_two)
    assert (outcome.stopped, outcome.broken) == ("no probe can run here: no torch", "no torch")
    assert outcome.spent.probes == 2, "what could not run is no probe"
    assert {one.row for one in outcome.ranked if one.record} == {one.row for one in machine.asked}
    assert not outcome.pruned, "and rules nothing out"


def test_an_interrupted_probe_is_as_if_not_asked_but_paid_for(study: ProbeStudy) -> None:
    asked = study.ask()
    study.tell(asked, measurement(asked, failed("interrupted")))
    assert (study.spent.probes, study.spent.gpu_seconds) == (0, 200.0)
    assert (study.ask().row, study.knowledge.records) == (asked.row, {})


def test_a_repeat_counts_by_its_faster_run_in_one_trial(study: ProbeStudy) -> None:
    first, second = (
        Measured(rung="probed", step_seconds=seconds, step_seconds_sd=sd, steps=10)
        for seconds, sd in ((10.0, 0.5), (10.4, 0.1))
    )
    asked = study.ask()
    study.tell(asked, measurement(asked, first))
    again = study._evaluate(Pick(row=asked.row, reason="again", repeat=True))
    study.tell(again, measurement(again, second))
    record = study.knowledge.records[asked.row]
    weights = np.array([1.0 / noise_variance(first), 1.0 / noise_variance(second)])
    assert record.runs == 2
    assert record.step_seconds == pytest.approx(10.0), "a disturbed run takes nothing from another"
    mean = float(np.exp(weights @ np.log([10.0, 10.4]) / weights.sum()))
    assert record.mean_step_seconds == pytest.approx(mean)
    assert record.variance == pytest.approx(1.0 / weights.sum())
    (trial,) = study.optuna_study().trials
    assert trial.value == pytest.approx(record.step_seconds)
    assert (trial.user_attrs["runs"], study.spent.probes) == (2, 2)


def test_what_ran_is_ranked_by_its_own_time_whatever_others_make_of_it() -> None:
    """Much faster than all alike: the smoothed expectation takes that for noise, this does not."""
    knowledge, seconds = Knowledge(small()), np.exp(small().prior.log_seconds)
    for row in range(8):
        factor = 0.85 if row == 3 else 1.0
        knowledge.observe(row, told_of(row, "probed", float(seconds[row]) * factor))
    posterior = knowledge.posterior()
    assert posterior.expected_seconds(3) == pytest.approx(0.85 * seconds[3])
    smoothed = np.exp(posterior.log_seconds[3])
    assert smoothed > 1.005 * posterior.expected_seconds(3), "else this test shows nothing"
    measured = [knowledge.records[row].log_seconds or 0.0 for row in range(8)]
    assert posterior.winner == np.argmin(measured)
    assert knowledge.records[3].variance == pytest.approx(RUN_SD**2)


def test_the_fastest_is_not_run_again_for_no_run_could_change_that_it_is() -> None:
    machine, knowledge = Machine.wrong_by(small(), 0.1), Knowledge(small())
    for row in range(6):
        knowledge.observe(row, machine.timed(row, row))
    assert knowledge.posterior().winner not in [record.row for record in knowledge.repeatable()]
    assert len(knowledge.repeatable()) == 5


def test_one_run_64_times_its_prediction_reorders_nothing_and_is_run_again_first() -> None:
    prior = small().prior.log_seconds
    machine, study = Machine.wrong_by(small(), 0.0), ProbeStudy(small(), settings(99))

    def odd(row: int) -> Measured:
        seconds = 64.0 * float(np.exp(prior[row]))
        return machine.timed(row, 0).model_copy(update={"step_seconds": seconds})

    def ranked_as_predicted() -> list[Ranked]:
        ranked = outcome(study, "asked to stop").ranked
        seconds = [np.log(one.expected_seconds) for one in ranked]
        assert seconds == pytest.approx(prior[[one.row for one in ranked]], abs=0.02)
        return ranked

    second = study.ask()
    study.tell(second, machine.run(second))
    first = study.ask()
    study.tell(first, measurement(first, odd(first.row)))
    assert study.knowledge.odd() == {first.row: pytest.approx(64.0)}
    ranked = ranked_as_predicted()
    assert ranked[0].row == second.row
    assert {one.row: one.odd for one in ranked}[first.row] == pytest.approx(64.0)
    again = study.ask()
    assert (again.row, again.repeat) == (first.row, True)
    assert "took 64.00 times its prediction" in again.reason
    study.tell(again, machine.run(again))
    assert not study.knowledge.odd()
    assert ranked_as_predicted()[0].row in (first.row, second.row)
    knowledge = Knowledge(small())
    for row in (first.row, second.row):  # two layouts that are as far off show the same machine
        knowledge.observe(row, odd(row))
    assert not knowledge.odd()
    assert float(np.median(knowledge.posterior().time.mean)) > 1.0


def test_rows_that_measurements_moved_or_did_not_say_so(study: ProbeStudy) -> None:
    plan = recommend(probing_cases.JOB, now=fixed_now)
    best, other = plan.ranked[:2]
    study.knowledge.observe(0, told_of(0, "probed", float(np.exp(small().prior.log_seconds[0]))))
    first, *rest = outcome(study, "asked to stop").ranked
    paper = other.estimate.step_seconds
    moved = with_measurement(other, replace(rest[0], expected_seconds=1.1 * paper), first)
    assert moved.moved == pytest.approx(1.1)
    assert "ranked by 1.10 times its prediction, as others measured" in moved.reasons
    kept = with_measurement(other, replace(rest[0], expected_seconds=paper), first)
    assert kept.moved is None
    odd = with_measurement(best, replace(first, odd=64.0), first)
    assert odd.measured_step_seconds is None
    assert "one run took 64.00 times its prediction and is not believed alone" in odd.reasons[0]
    text = str(ranked_table(plan.model_copy(update={"ranked": [best, moved]}), 120))
    assert f"{moved.source} x1.10" in text


def test_noise_has_its_parts() -> None:
    assert noise_variance(Measured(step_seconds=2.0)) == pytest.approx(RUN_SD**2)
    steps = noise_variance(Measured(step_seconds=2.0, step_seconds_sd=0.2, steps=40))
    assert steps == pytest.approx(RUN_SD**2 + np.pi / 2.0 * 0.01 / 40.0)
    one_rank = noise_variance(Measured(rung="emulated", step_seconds=2.0))
    assert one_rank == pytest.approx(RUN_SD**2 + EMULATED_SD**2)


def test_what_was_not_measured_is_ranked_again_by_what_was() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    outcome, asked = play(machine.run, probes=8)
    winner, *others = outcome.ranked
    truth = np.exp(machine.log_seconds[winner.row])
    assert winner.expected_seconds == pytest.approx(truth, rel=0.02)
    rest = [one.expected_seconds for one in others]
    assert rest == sorted(rest)
    assert {one.row for one in outcome.ranked} >= {one.row for one in asked}
    unrun = [one for one in outcome.ranked if one.record is None]
    moved = [np.log(one.expected_seconds) - small().prior.log_seconds[one.row] for one in unrun]
    assert np.abs(moved).max() > 0.01
