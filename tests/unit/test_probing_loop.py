"""The closed loop: budgets kept to, results learnt by their kind, resumed where a kill left it,
stopped with a number.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from optuna.trial import TrialState

from planner.specs.measurement import Measured, Measurement
from planner.study import pruning
from planner.study.ask_tell import Event, Result, one_at_a_time, run
from planner.study.fidelity import KernelEffect, MicroProbe, ObservedEffect, direct
from planner.study.fidelity_options import FidelityOption, LowFidelity, ProbeCost
from planner.study.posterior import RUN_SD, Knowledge, noise_variance
from planner.study.samplers import Pick
from planner.study.study import (
    BROKEN,
    LOW_FIDELITY_PER_PROBE,
    UNABLE,
    Budget,
    MicroResult,
    ProbeStudy,
    Proposal,
    StudySettings,
)
from planner.study.trials import MEMORY_CONSTRAINT
from tests.conftest import one_fast
from tests.unit.probing_cases import Machine, failed, measurement, out_of_memory, small, subset

MUCH = Budget(probes=1000, gpu_seconds=1e12)


def settings(**changes: object) -> StudySettings:
    return replace(
        StudySettings(tolerance=-1.0, budget=Budget(probes=6, gpu_seconds=1e12)), **changes
    )  # type: ignore[arg-type]


# ---- what is spent -------------------------------------------------------------------------------


def test_the_budget_of_probes_is_kept() -> None:
    machine = Machine.wrong_by(small(), 0.1)
    outcome = run(
        small(), settings(budget=Budget(probes=4, gpu_seconds=1e12)), one_at_a_time(machine.run)
    )
    assert len(machine.asked) == outcome.spent.probes == 4
    assert "budget of 4 probes" in outcome.stopped


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_budget_of_gpu_seconds_is_kept_even_where_every_probe_uses_its_limit(
    parallel: int,
) -> None:
    machine = Machine.wrong_by(small(), 0.1)
    budget = Budget(probes=50, gpu_seconds=8000.0)
    limits: list[float] = []

    def greedy(asked: Proposal) -> Measurement:
        limits.append(asked.gpu_seconds_limit)
        assert asked.gpu_seconds <= asked.gpu_seconds_limit + 1e-6
        told = machine.run(asked)
        spent = min(asked.gpu_seconds_limit, 1.5 * asked.gpu_seconds)
        return told.model_copy(
            update={"measured": told.measured.model_copy(update={"gpu_seconds": spent})}
        )

    outcome = run(small(), settings(budget=budget, parallel=parallel), one_at_a_time(greedy))
    assert outcome.spent.gpu_seconds <= budget.gpu_seconds + 1e-6
    assert len(machine.asked) >= 2
    assert "GPU-seconds left do not pay" in outcome.stopped
    if parallel > 1:
        assert sum(limits[:parallel]) <= budget.gpu_seconds + 1e-6


def test_the_cost_of_starting_is_learnt() -> None:
    machine = Machine.wrong_by(small(), 0.1)
    study = ProbeStudy(small(), settings(cost=ProbeCost(start_seconds=600.0, steps=13)))
    first = study.ask()
    assert first is not None
    study.tell(first, machine.run(first))
    second = study.ask()
    assert second is not None
    assert second.gpu_seconds < 0.5 * first.gpu_seconds
    assert second.expected_seconds is not None
    assert second.gpu_seconds == pytest.approx(8 * (30.0 + 13 * second.expected_seconds), rel=1e-6)


def test_it_stops_with_the_number_when_regret_is_below_tolerance() -> None:
    machine = Machine(small(), small().prior.log_seconds)
    outcome = run(small(), settings(tolerance=0.2, budget=MUCH), one_at_a_time(machine.run))
    assert outcome.regret.expected_share <= 0.2
    assert (
        f"expected regret {outcome.regret.expected_share:.2%}, below the tolerance of 20.00%"
        in outcome.stopped
    )
    assert len(machine.asked) < 50
    just_enough = Budget(probes=len(machine.asked), gpu_seconds=MUCH.gpu_seconds)
    again = run(
        small(),
        settings(tolerance=0.2, budget=just_enough),
        one_at_a_time(Machine(small(), small().prior.log_seconds).run),
    )
    assert again.stopped == outcome.stopped, "also where the budget ends with it"


def test_asked_to_stop_it_returns_the_best_so_far() -> None:
    machine = Machine.wrong_by(small(), 0.1)
    outcome = run(
        small(), settings(), one_at_a_time(machine.run), should_stop=lambda: len(machine.asked) >= 2
    )
    assert outcome.stopped == "asked to stop"
    assert len(machine.asked) == 2
    measured = [asked.row for asked in machine.asked]
    assert outcome.ranked[0].row in measured


def test_a_broken_machine_ends_the_study_before_the_budget() -> None:
    machine = Machine.wrong_by(small(), 0.1)
    machine.outcomes = {row: failed("lost-gpu") for row in range(len(small()))}
    outcome = run(small(), settings(budget=MUCH), one_at_a_time(machine.run))
    assert len(machine.asked) == 3
    assert "3 probes in a row failed" in outcome.stopped
    assert "lost-gpu" in outcome.stopped


def test_a_runner_without_an_answer_ends_the_study() -> None:
    def silent(asked: Sequence[Proposal]) -> Iterable[tuple[Proposal, Result]]:
        return ()

    outcome = run(small(), settings(), silent)
    assert outcome.stopped == "the runner gave no result"
    assert outcome.spent.probes == 0


# ---- what results teach --------------------------------------------------------------------------


def test_out_of_memory_is_infeasible_with_its_margin_and_rules_out_what_is_larger() -> None:
    candidates = subset(np.arange(row_with_larger(), len(small())))
    usable = candidates.size.usable_bytes
    study = ProbeStudy(candidates, settings())
    asked = study.ask()
    assert asked is not None
    assert asked.row == 0
    ruled_out = study.tell(
        asked,
        measurement(
            asked, out_of_memory(attempted_bytes=0.2 * usable, allocated_bytes=0.95 * usable)
        ),
    )
    assert len(ruled_out) > 1
    assert set(ruled_out) == set(np.flatnonzero(pruning.at_least(candidates.batch, 0, 64).mask)) - {
        0
    }
    trial = study.optuna_study().trials[0]
    assert trial.state is TrialState.PRUNED
    assert trial.value is None
    assert trial.constraints[MEMORY_CONSTRAINT] == pytest.approx(0.15)
    for other in ruled_out:
        assert "candidate 0 ran out of memory, and here" in study.knowledge.excluded[other]
    assert not study.knowledge.untried()[ruled_out].any()


def test_the_memory_model_learns_from_what_ran_out() -> None:
    candidates = small()
    row = row_with_larger()
    knowledge = Knowledge(candidates)
    alike = np.flatnonzero(
        (candidates.prior.oom_probability > 0.001) & (candidates.prior.oom_probability < 0.5)
    )
    alike = alike[~pruning.at_least(candidates.batch, row, 64).mask[alike]]
    before = knowledge.posterior().risk(alike)
    knowledge.observe(row, out_of_memory())
    after = knowledge.posterior().risk(alike)
    assert np.all(after >= before - 1e-9)
    assert np.mean(after) > 1.5 * np.mean(before)


def row_with_larger() -> int:
    """A candidate that is likely to fit and below which others must be larger."""
    candidates = small()
    order = np.flatnonzero(candidates.prior.oom_probability < 0.02)
    return next(
        int(row)
        for row in order
        if pruning.at_least(candidates.batch, int(row), 64).mask[row:].sum() > 3
    )


def test_a_layout_that_ran_makes_smaller_ones_certain_to_fit() -> None:
    candidates = small()
    riskiest = map(int, np.argsort(-candidates.prior.oom_probability))
    row = next(row for row in riskiest if pruning.at_most(candidates.batch, row, 64).mask.sum() > 2)
    knowledge = Knowledge(candidates)
    below = np.flatnonzero(pruning.at_most(candidates.batch, row, 64).mask)
    assert knowledge.posterior().risk(below).max() > 0.01
    knowledge.observe(row, Measured(rung="probed", step_seconds=10.0))
    assert knowledge.posterior().risk(below).max() == 0.0


def test_a_failure_is_a_failed_trial_with_its_class_and_not_asked_again() -> None:
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.1)
    study = ProbeStudy(candidates, settings())
    asked = study.ask()
    assert asked is not None
    assert asked.row is not None
    study.tell(asked, measurement(asked, failed("invalid-layout")))
    trial = study.optuna_study().trials[0]
    assert trial.state is TrialState.FAIL
    assert "invalid-layout" in trial.user_attrs["message"]
    following = study.ask()
    assert following is not None
    assert following.row != asked.row
    assert study.knowledge.excluded[asked.row] == "failed: invalid-layout"
    assert machine.asked == []


@pytest.mark.parametrize("parallel", [1, 3])
def test_where_no_probe_can_run_the_study_stops_and_blames_no_layout(parallel: int) -> None:
    machine = Machine.wrong_by(small(), 0.1)
    told = Measured(
        status="failed", rung="probed", failure=BROKEN, message="no torch", gpu_seconds=5.0
    )

    def breaks_after_two(asked: Proposal) -> Measurement:
        return machine.run(asked) if len(machine.asked) < 2 else measurement(asked, told)

    outcome = run(small(), settings(parallel=parallel), one_at_a_time(breaks_after_two))
    assert (outcome.stopped, outcome.broken) == ("no probe can run here: no torch", "no torch")
    assert outcome.spent.probes == 2, "what could not run is no probe"
    assert {one.row for one in outcome.ranked if one.record} == {one.row for one in machine.asked}
    assert not outcome.pruned, "and rules nothing out"


def test_an_interrupted_probe_is_as_if_not_asked_but_paid_for() -> None:
    study = ProbeStudy(small(), settings())
    asked = study.ask()
    assert asked is not None
    study.tell(asked, measurement(asked, failed("interrupted")))
    assert study.spent.probes == 0
    assert study.spent.gpu_seconds == 200.0
    again = study.ask()
    assert again is not None
    assert again.row == asked.row
    assert not study.knowledge.records


def test_a_repeat_counts_by_its_faster_run_and_is_averaged_beside_it_in_one_trial() -> None:
    candidates = small()
    study = ProbeStudy(candidates, settings())
    asked = study.ask()
    assert asked is not None
    assert asked.row is not None
    study.tell(
        asked,
        measurement(
            asked, Measured(rung="probed", step_seconds=10.0, step_seconds_sd=0.5, steps=10)
        ),
    )
    first = noise_variance(Measured(step_seconds=10.0, step_seconds_sd=0.5, steps=10))
    second = noise_variance(Measured(step_seconds=10.4, step_seconds_sd=0.1, steps=10))
    pick = Pick(row=asked.row, reason="again", repeat=True)
    choice = direct(study._prospect(asked.row), study._full(asked.row))
    again = study._open_trial(study.trials.ask(pick), pick, choice)
    study.tell(
        again,
        measurement(
            again, Measured(rung="probed", step_seconds=10.4, step_seconds_sd=0.1, steps=10)
        ),
    )
    record = study.knowledge.records[asked.row]
    weights = np.array([1.0 / first, 1.0 / second])
    assert record.runs == 2
    assert record.step_seconds == pytest.approx(10.0), (
        "a run that was disturbed takes nothing from one that was not"
    )
    mean = float(np.exp(weights @ np.log([10.0, 10.4]) / weights.sum()))
    assert record.mean_step_seconds == pytest.approx(mean)
    assert record.variance == pytest.approx(1.0 / weights.sum())
    trials = study.optuna_study().trials
    assert len(trials) == 1
    assert trials[0].value == pytest.approx(record.step_seconds)
    assert trials[0].user_attrs["runs"] == 2
    assert study.spent.probes == 2


def test_what_ran_is_ranked_by_its_own_time_whatever_others_make_of_it() -> None:
    """One layout much faster than all that resemble it: the smoothed expectation takes that for
    noise, the answer does not.
    """
    candidates = small()
    knowledge = Knowledge(candidates)
    seconds = np.exp(candidates.prior.log_seconds)
    for row in range(8):
        factor = 0.85 if row == 3 else 1.0
        knowledge.observe(row, told_of(row, "probed", float(seconds[row]) * factor))
    posterior = knowledge.posterior()
    assert posterior.expected_seconds(3) == pytest.approx(0.85 * seconds[3])
    assert np.exp(posterior.log_seconds[3]) > 1.005 * posterior.expected_seconds(3), (
        "else this test shows nothing"
    )
    assert posterior.winner == min(
        range(8), key=lambda row: knowledge.records[row].log_seconds or 0.0
    )
    assert posterior.deviation(3) == pytest.approx(RUN_SD)


def test_the_fastest_is_not_run_again_for_no_run_could_change_that_it_is() -> None:
    machine, knowledge = Machine.wrong_by(small(), 0.1), Knowledge(small())
    for row in range(6):
        knowledge.observe(row, machine.timed(row, row))
    assert knowledge.posterior().winner not in [record.row for record in knowledge.repeatable()]
    assert len(knowledge.repeatable()) == 5


def test_noise_has_its_parts() -> None:
    assert noise_variance(Measured(step_seconds=2.0)) == pytest.approx(RUN_SD**2)
    steps = noise_variance(Measured(step_seconds=2.0, step_seconds_sd=0.2, steps=40))
    assert steps == pytest.approx(RUN_SD**2 + np.pi / 2.0 * 0.01 / 40.0)
    assert noise_variance(Measured(step_seconds=2.0), 0.1) == pytest.approx(RUN_SD**2 + 0.01)


def test_the_winner_is_the_fastest_measured_and_the_rest_is_ranked_again() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    outcome = run(
        small(), settings(budget=Budget(probes=8, gpu_seconds=1e12)), one_at_a_time(machine.run)
    )
    rows = [asked.row for asked in machine.asked]
    best = min(rows, key=lambda row: machine.log_seconds[row])
    winner = outcome.ranked[0]
    assert machine.log_seconds[winner.row] == pytest.approx(
        machine.log_seconds[best], abs=RUN_SD
    ), "the fastest, but for noise"
    assert winner.record is not None
    assert winner.expected_seconds == pytest.approx(
        np.exp(machine.log_seconds[winner.row]), rel=0.02
    )
    rest = [one.expected_seconds for one in outcome.ranked[1:]]
    assert rest == sorted(rest)
    assert {one.row for one in outcome.ranked} >= set(rows)
    prior = small().prior.log_seconds
    moved = [
        abs(np.log(one.expected_seconds) - prior[one.row])
        for one in outcome.ranked
        if one.record is None
    ]
    assert max(moved) > 0.01


# ---- resume --------------------------------------------------------------------------------------


def test_resumed_after_a_kill_nothing_is_lost_or_measured_twice() -> None:
    candidates = small()
    whole = Machine.wrong_by(candidates, 0.12)
    uninterrupted = run(candidates, settings(), one_at_a_time(whole.run))

    stored: list[Measurement] = []
    machine = Machine.wrong_by(candidates, 0.12)

    def dies(asked: Proposal) -> Measurement:
        if len(stored) == 3:
            raise KeyboardInterrupt
        stored.append(machine.run(asked))
        return stored[-1]

    with pytest.raises(KeyboardInterrupt):
        run(candidates, settings(), one_at_a_time(dies))
    reasons = {one.id: asked.reason for one, asked in zip(stored, machine.asked, strict=True)}
    resumed = run(
        candidates, settings(), one_at_a_time(machine.run), resumed=stored, reasons=reasons
    )
    rows = [asked.row for asked in machine.asked]
    assert len(rows) == 6
    assert rows == [asked.row for asked in whole.asked]
    first_looks = [asked.row for asked in machine.asked if not asked.repeat]
    assert len(first_looks) == len(set(first_looks)), "again only where the study says so"
    assert resumed.spent.probes == uninterrupted.spent.probes == 6
    assert resumed.spent.gpu_seconds == pytest.approx(uninterrupted.spent.gpu_seconds)
    assert [one.row for one in resumed.ranked] == [one.row for one in uninterrupted.ranked]
    assert resumed.regret == uninterrupted.regret
    assert [trial.params for trial in resumed.study.trials] == [
        trial.params for trial in uninterrupted.study.trials
    ]
    said, expected = (
        [trial.user_attrs["reason"] for trial in study.trials]
        for study in (resumed.study, uninterrupted.study)
    )
    assert said == expected


def test_resumed_out_of_memory_and_failures_are_kept() -> None:
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.1)
    asked: list[Measurement] = []
    first = ProbeStudy(candidates, settings())
    for outcome in (out_of_memory(), failed("timeout")):
        one = first.ask()
        assert one is not None
        asked.append(measurement(one, outcome))
        first.tell(one, asked[-1])
    second = ProbeStudy(candidates, settings())
    second.restore(asked, spent=True)
    assert second.knowledge.excluded == first.knowledge.excluded
    assert second.spent == first.spent
    assert [trial.state for trial in second.optuna_study().trials] == [
        TrialState.PRUNED,
        TrialState.FAIL,
    ]
    following, expected = second.ask(), first.ask()
    assert following is not None
    assert expected is not None
    assert following.row == expected.row
    assert machine.asked == []


def test_known_measurements_teach_but_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regrets of 1,024 draws are off by 7%, more than what the two studies differ by: draw more."""
    monkeypatch.setattr("planner.study.regret.DRAWS", 2**16)
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.12)
    before = run(candidates, settings(), one_at_a_time(machine.run))
    stored = [measurement(asked, machine.timed(asked.row or 0, 0)) for asked in machine.asked]
    fresh = Machine.wrong_by(candidates, 0.12)
    outcome = run(
        candidates,
        settings(budget=Budget(probes=2, gpu_seconds=1e12)),
        one_at_a_time(fresh.run),
        known=stored,
    )
    assert outcome.spent.probes == 2
    assert not {asked.row for asked in fresh.asked if not asked.repeat} & {
        asked.row for asked in machine.asked
    }
    assert outcome.regret.expected_share <= before.regret.expected_share


def test_measurements_of_other_layouts_are_named_and_ignored() -> None:
    candidates = small()
    study = ProbeStudy(candidates, settings())
    asked = study.ask()
    assert asked is not None
    assert asked.layout is not None
    other = replace(asked, layout=asked.layout.model_copy(update={"micro_batch_size": 64}))
    stranger = measurement(other, Measured(rung="probed", step_seconds=1.0))
    emulated = measurement(asked, Measured(rung="emulated", step_seconds=1.0)).model_copy(
        update={"id": "of a rung not used"}
    )
    outcome = run(
        candidates,
        settings(budget=Budget(probes=1, gpu_seconds=1e12)),
        one_at_a_time(Machine.wrong_by(candidates, 0.1).run),
        known=[stranger, emulated],
    )
    assert outcome.ignored == (stranger.id, "of a rung not used")


# ---- events --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", one_fast(*range(6)))
def test_the_best_so_far_never_gets_worse_and_is_the_answer(seed: int) -> None:
    """On a machine so noisy that most of what it says is chance, with repeats."""
    machine = replace(Machine.wrong_by(small(), 0.1, seed=seed), noise_sd=0.15)
    stored: list[Measurement] = []

    def measure(asked: Proposal) -> Measurement:
        stored.append(machine.run(asked))
        return stored[-1]

    events: list[Event] = []
    outcome = run(
        small(),
        settings(budget=Budget(probes=14, gpu_seconds=1e12)),
        one_at_a_time(measure),
        on_event=events.append,
    )
    best = [event.best_seconds for event in events if event.best_seconds is not None]
    assert best == sorted(best, reverse=True)
    assert {event.best_fidelity for event in events if event.best_seconds is not None} == {"probed"}
    fastest = min(one.measured.step_seconds or np.inf for one in stored)
    winner = outcome.ranked[0]
    assert winner.record is not None
    assert (
        winner.record.step_seconds == winner.expected_seconds == best[-1] == pytest.approx(fastest)
    )
    assert {one.row for one in outcome.ranked if one.record} == {
        asked.row for asked in machine.asked
    }


def test_events_tell_the_best_so_far_the_regret_and_what_is_left() -> None:
    machine = Machine.wrong_by(small(), 0.1)
    events: list[Event] = []
    outcome = run(
        small(),
        settings(budget=Budget(probes=3, gpu_seconds=1e6)),
        one_at_a_time(machine.run),
        on_event=events.append,
    )
    assert [event.kind for event in events] == ["asked", "told"] * 3 + ["stopped"]
    assert [event.probes_left for event in events if event.kind == "told"] == [2, 1, 0]
    told = [event for event in events if event.kind == "told"]
    best = [event.best_seconds for event in told]
    assert best == sorted((value for value in best if value is not None), reverse=True)
    assert all(event.regret is not None and event.regret.expected_share >= 0.0 for event in told)
    assert told[-1].gpu_seconds_left == pytest.approx(1e6 - outcome.spent.gpu_seconds)
    assert told[-1].best_layout == outcome.ranked[0].layout
    assert events[0].message == machine.asked[0].reason
    assert events[0].gpu_seconds_left == 1e6, "nothing is spent yet"
    assert events[-1].message == outcome.stopped


# ---- cheaper rungs -------------------------------------------------------------------------------


def rung(
    name: str = "emulated", *, sd: float = 0.05, num_gpus: int = 1, shows_memory: bool = True
) -> LowFidelity:
    """Looks at every candidate, in 30 s of a start and no time for steps."""
    least = np.full(len(small()), float(num_gpus))
    way = FidelityOption(num_gpus=num_gpus, runs=1, step_seconds=0.0, sd=sd)
    return LowFidelity(
        name=name, options=lambda _: (way,), least_gpus=least, shows_memory=shows_memory
    )


def test_a_cheaper_rung_goes_first_and_who_leads_by_it_is_run() -> None:
    candidates = small()
    machine = Machine.wrong_by(candidates, 0.15, seed=3)
    looked: list[Proposal] = []

    def measure(asked: Proposal) -> Measurement:
        looked.append(asked)
        if asked.fidelity != "emulated":
            return machine.run(asked)
        assert asked.row is not None
        seconds = float(np.exp(machine.log_seconds[asked.row]))
        return measurement(asked, Measured(rung="emulated", step_seconds=seconds, gpu_seconds=30.0))

    outcome = run(
        candidates,
        settings(fidelities=(rung(sd=0.02),), budget=Budget(probes=4, gpu_seconds=2e4)),
        one_at_a_time(measure),
    )
    rungs = [asked.fidelity for asked in looked]
    assert rungs[0] == "probed"
    assert rungs.count("probed") == outcome.spent.probes == 4
    assert rungs.count("emulated") == outcome.spent.low_fidelity > 2
    assert outcome.spent.gpu_seconds <= 2e4
    assert "GPU-second" in next(asked.reason for asked in looked if asked.fidelity == "emulated")
    confirmed = [
        asked for asked in looked if "it leads by a low-fidelity evaluation" in asked.reason
    ]
    assert confirmed
    assert all(asked.fidelity == "probed" for asked in confirmed)
    by_row = {asked.row: asked.fidelity for asked in looked}
    assert len(outcome.study.trials) == len(by_row), (
        "one trial a candidate, whatever rungs it went through"
    )
    for trial in outcome.study.trials:
        assert trial.state is TrialState.COMPLETE
        assert trial.user_attrs["rung"] == by_row[trial.user_attrs["candidate"]]
    winner = outcome.ranked[0]
    assert winner.record is not None
    assert winner.record.fidelity == "probed"
    assert machine.regret(winner.row) < machine.regret(looked[0].row or 0)


def promising_looks(machine: Machine, asked: list[Proposal]) -> Callable[[Proposal], Measurement]:
    """Answers as the machine does, looks much faster than it; keeps what was asked."""

    def measure(one: Proposal) -> Measurement:
        asked.append(one)
        return machine.run(one) if one.fidelity == "probed" else imitated(one, machine, off=-0.5)

    return measure


def test_a_winner_that_has_only_been_looked_at_is_run_before_the_study_ends() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    asked: list[Proposal] = []
    measure = promising_looks(machine, asked)
    question = ProbeStudy(small(), settings()).ask()
    assert question is not None
    look = imitated(
        replace(question, row=7, layout=small().batch.row(7), fidelity="imitated", num_gpus=2),
        machine,
        off=-0.5,
    )
    outcome = run(
        small(),
        settings(fidelities=(IMITATION,), tolerance=0.9),
        one_at_a_time(measure),
        known=[look],
    )
    assert [(one.row, one.fidelity) for one in asked] == [(7, "probed")]
    assert "it leads by a low-fidelity evaluation" in asked[0].reason
    assert "expected regret" in outcome.stopped


def test_an_emulated_rank_out_of_memory_spares_the_layout() -> None:
    candidates = small()
    study = ProbeStudy(candidates, settings(fidelities=(rung(),)))
    machine = Machine.wrong_by(candidates, 0.1)
    first = study.ask()
    assert first is not None
    study.tell(first, machine.run(first))
    second = study.ask()
    assert second is not None
    assert second.fidelity == "emulated"
    study.tell(
        second, measurement(second, Measured(status="oom", rung="emulated", gpu_seconds=30.0))
    )
    third = study.ask()
    assert third is not None
    assert third.row != second.row
    assert study.spent.probes == 1
    assert second.row is not None
    assert study.knowledge.records[second.row].fidelity == "emulated"


def imitated(
    asked: Proposal, machine: Machine, *, error: float = 0.02, off: float = 0.0
) -> Measurement:
    """What a smaller layout says of this one, and how wrong it may be by its own word."""
    assert asked.row is not None
    seconds = float(np.exp(machine.log_seconds[asked.row] + off))
    numbers = {
        "rung": "imitated",
        "step_seconds": seconds,
        "gpu_seconds": asked.num_gpus * (30.0 + 13 * seconds),
        "ranks": [{"step_seconds": seconds}] * asked.num_gpus,
        "relative_error": {"step_seconds": error, "peak_reserved_bytes": 0.05},
    }
    return measurement(asked, Measured.model_validate(numbers))


def look_failed(asked: Proposal, kind: str = "oom") -> Measurement:
    return measurement(
        asked,
        Measured(
            status="failed",
            rung="imitated",
            failure=kind,
            message="of a smaller run",
            gpu_seconds=20.0,
        ),
    )


def after_the_first(study: ProbeStudy, machine: Machine) -> Proposal:
    """The second question, once a layout itself has been measured."""
    first = study.ask()
    assert first is not None
    assert first.fidelity == "probed"
    study.tell(first, machine.run(first))
    second = study.ask()
    assert second is not None
    return second


IMITATION = rung("imitated", num_gpus=2, sd=0.02, shows_memory=False)


def test_a_look_that_failed_says_nothing_of_the_layout_and_is_not_repeated() -> None:
    study, machine = (
        ProbeStudy(small(), settings(fidelities=(IMITATION,))),
        Machine.wrong_by(small(), 0.15),
    )
    look = after_the_first(study, machine)
    assert (look.fidelity, look.num_gpus, look.counts) == ("imitated", 2, False)
    assert look.row is not None
    assert study.tell(look, look_failed(look)) == []
    assert look.row not in study.knowledge.excluded
    assert not study.knowledge.barred[look.row]
    assert (study.spent.probes, study.spent.low_fidelity, study.spent.failures_in_a_row) == (
        1,
        1,
        0,
    )
    again = study.ask()
    assert again is not None
    assert (again.row, again.fidelity) != (look.row, "imitated")


def test_a_rung_that_keeps_failing_is_dropped_and_the_layouts_are_still_probed() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    asked: list[Proposal] = []

    def measure(one: Proposal) -> Measurement:
        asked.append(one)
        return machine.run(one) if one.fidelity == "probed" else look_failed(one, "crash")

    outcome = run(
        small(),
        settings(fidelities=(IMITATION,), budget=Budget(probes=12, gpu_seconds=1e12)),
        one_at_a_time(measure),
    )
    rungs = [one.fidelity for one in asked]
    assert rungs.count("imitated") == 3
    assert outcome.spent.probes == rungs.count("probed") == 12
    assert "in a row failed" not in outcome.stopped
    tried = {
        trial.user_attrs.get("candidate")
        for trial in outcome.study.trials
        if trial.state is TrialState.COMPLETE
    }
    assert len(tried) == len({one.row for one in asked if one.fidelity == "probed"})


def test_a_look_counts_by_the_error_that_it_claims() -> None:
    claims = {
        "rung": "imitated",
        "step_seconds": 2.0,
        "step_seconds_sd": 0.5,
        "relative_error": {"step_seconds": 0.03},
    }
    sure = Measured.model_validate(claims)
    assert noise_variance(sure, 0.5) == pytest.approx(0.03**2)
    row = 3
    moved = []
    for error in (0.01, 0.5):
        knowledge = Knowledge(small())
        before = knowledge.posterior().log_seconds[row]
        seconds = float(np.exp(before + 0.2))
        told = Measured.model_validate(
            {"rung": "imitated", "step_seconds": seconds, "relative_error": {"step_seconds": error}}
        )
        knowledge.observe(row, told, counts=False)
        moved.append(float(knowledge.posterior().log_seconds[row] - before))
        assert knowledge.records[row].fidelity == "imitated"
        assert knowledge.untried()[row], "the layout itself may still be run"
        assert not knowledge.fits.any(), (
            "a smaller layout that ran does not show that this one fits"
        )
    assert moved[0] > 2 * moved[1] > 0


def test_a_layout_that_cannot_run_is_looked_at_alone_and_every_look_counts() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    asked: list[Proposal] = []

    def measure(one: Proposal) -> Measurement:
        asked.append(one)
        return imitated(one, machine)

    outcome = run(small(), settings(whole=False, fidelities=(IMITATION,)), one_at_a_time(measure))
    assert [(one.fidelity, one.counts) for one in asked] == [("imitated", True)] * 6
    assert len({one.row for one in asked}) == 6, (
        "the same look again would be wrong in the same way"
    )
    assert (outcome.spent.probes, outcome.spent.low_fidelity) == (6, 0)
    assert "budget of 6 probes" in outcome.stopped
    winner = outcome.ranked[0]
    assert winner.record is not None
    assert winner.record.fidelity == "imitated"
    assert winner.record.variance == pytest.approx(0.02**2)
    assert [trial.state for trial in outcome.study.trials] == [TrialState.COMPLETE] * 6
    assert machine.regret(winner.row) < machine.regret(asked[0].row or 0) + 0.05


def test_looks_that_fail_where_nothing_else_can_run_exclude_nothing_and_end_the_study() -> None:
    outcome = run(
        small(), settings(whole=False, fidelities=(IMITATION,)), one_at_a_time(look_failed)
    )
    assert outcome.spent.probes == 3
    assert "3 probes in a row failed, the last with: oom: of a smaller run" in outcome.stopped
    assert outcome.pruned == ()
    assert [trial.state for trial in outcome.study.trials] == [TrialState.FAIL] * 3


def test_a_budget_that_pays_for_no_layout_pays_for_looks() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    asked: list[Proposal] = []

    def measure(one: Proposal) -> Measurement:
        asked.append(one)
        return imitated(one, machine)

    budget = Budget(probes=20, gpu_seconds=4.0 * 2 * 60.0)
    assert run(small(), settings(budget=budget), one_at_a_time(measure)).spent.probes == 0
    outcome = run(small(), settings(budget=budget, fidelities=(IMITATION,)), one_at_a_time(measure))
    assert outcome.spent.probes == len(asked) >= 1
    assert outcome.spent.gpu_seconds <= budget.gpu_seconds + max(one.gpu_seconds for one in asked)
    assert "GPU-seconds left do not pay" in outcome.stopped
    assert {one.fidelity for one in asked} == {"imitated"}


def test_a_pool_on_which_nothing_stands_for_a_layout_says_so() -> None:
    nothing = replace(IMITATION, least_gpus=np.full(len(small()), np.inf))
    outcome = run(small(), settings(whole=False, fidelities=(nothing,)), one_at_a_time(look_failed))
    assert (outcome.spent.probes, outcome.study.trials) == (0, [])
    assert (
        outcome.stopped
        == "the pool is smaller than 8 GPUs, and no scaled-down run on it could stand for a layout"
    )


def test_candidates_that_no_rung_can_look_at_are_passed_over() -> None:
    odd = replace(IMITATION, options=lambda row: IMITATION.options(row) if row % 2 else ())
    machine = Machine.wrong_by(small(), 0.15)
    outcome = run(
        small(),
        settings(whole=False, fidelities=(odd,)),
        one_at_a_time(lambda asked: imitated(asked, machine)),
    )
    assert outcome.spent.probes == 6
    assert all(one.row % 2 for one in outcome.ranked if one.record is not None)
    passed = [trial for trial in outcome.study.trials if trial.state is TrialState.PRUNED]
    assert passed
    assert all("no evaluation of it fits" in trial.user_attrs["reason"] for trial in passed)


def test_looks_are_launches_and_have_a_limit_too() -> None:
    machine = Machine.wrong_by(small(), 0.3)
    free = rung("imitated", num_gpus=1, sd=0.02, shows_memory=False)
    looks: list[Proposal] = []

    def measure(one: Proposal) -> Measurement:
        if one.fidelity == "probed":
            return machine.run(one)
        looks.append(one)
        return imitated(one, machine, off=0.3)

    outcome = run(
        small(),
        settings(fidelities=(free,), budget=Budget(probes=2, gpu_seconds=1e12)),
        one_at_a_time(measure),
    )
    assert outcome.spent.low_fidelity == len(looks) == 2 * LOW_FIDELITY_PER_PROBE
    assert outcome.spent.probes == 2


def test_resumed_a_look_is_neither_repeated_nor_forgotten() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    study = ProbeStudy(small(), settings(fidelities=(IMITATION,)))
    first = study.ask()
    assert first is not None
    one = machine.run(first)
    study.tell(first, one)
    look = study.ask()
    assert look is not None
    assert look.fidelity == "imitated"
    assert look.row is not None
    for told, failures in ((imitated(look, machine), 0), (look_failed(look), 1)):
        heir = ProbeStudy(small(), settings(fidelities=(IMITATION,)))
        heir.restore([one, told], spent=True)
        assert (heir.spent.probes, heir.spent.low_fidelity, heir.spent.failures_in_a_row) == (
            1,
            1,
            0,
        )
        assert heir.spent.gpu_seconds == pytest.approx(
            sum(each.measured.gpu_seconds or 0.0 for each in (one, told))
        )
        assert heir._fidelities_left(look.row) == []
        assert heir.fidelities.failures["imitated"] == failures
        assert len(heir.knowledge.time_observations()) == 2 - failures
        assert look.row not in heir.knowledge.excluded


def told_of(row: int, rung: str, seconds: float, error: float | None = None) -> Measured:
    claims = {} if error is None else {"relative_error": {"step_seconds": error}}
    return Measured.model_validate(
        {"rung": rung, "step_seconds": seconds, "gpu_seconds": 60.0, **claims}
    )


def test_a_layout_that_ran_stands_for_itself_and_shows_what_its_looks_are_worth() -> None:
    """A look 14 times too fast, as on a CPU with fewer cores than processes."""
    knowledge = Knowledge(small())
    knowledge.observe(3, told_of(3, "probed", 0.25))
    for row in (5, 9):
        knowledge.observe(row, told_of(row, "imitated", 0.024, 0.065))
    assert knowledge.posterior().leader in (5, 9), "to be run next"
    assert knowledge.posterior().winner == 3, (
        "no answer yet: only what ran is one where anything did"
    )
    assert knowledge.variance_inflation() == 1.0
    knowledge.observe(5, told_of(5, "probed", 0.34))
    posterior = knowledge.posterior()
    assert posterior.winner == posterior.leader == 3
    assert np.exp(posterior.log_seconds[5]) == pytest.approx(0.34, rel=0.05)
    assert knowledge.variance_inflation() > 100, (
        "what else was said by such looks counts for little"
    )
    assert knowledge.records[5].runs == 1
    later = Knowledge(small())
    later.observe(3, told_of(3, "probed", 0.25))
    later.observe(3, told_of(3, "imitated", 0.05, 0.05))
    assert later.records[3].step_seconds == pytest.approx(0.25)
    assert later.variance_inflation() > 100, "also when the look comes after"


def test_looks_that_hold_keep_their_trust() -> None:
    machine, knowledge = Machine.wrong_by(small(), 0.15), Knowledge(small())
    rng = np.random.default_rng(0)
    for row in range(0, 200, 10):
        seconds = float(np.exp(machine.log_seconds[row]))
        knowledge.observe(
            row,
            told_of(row, "imitated", seconds * float(np.exp(0.03 * rng.standard_normal())), 0.03),
        )
        knowledge.observe(row, told_of(row, "probed", seconds))
    assert knowledge.variance_inflation() < 2.0


def test_a_look_that_may_be_far_off_makes_no_winner() -> None:
    knowledge = Knowledge(small())
    knowledge.observe(3, told_of(3, "probed", 10.0))
    knowledge.observe(7, told_of(7, "imitated", 0.5, 1.05))
    assert knowledge.posterior().winner == 3
    assert knowledge.records[7].step_seconds == pytest.approx(0.5), (
        "it is shown all the same, with its error"
    )


def test_the_same_look_again_says_nothing_new() -> None:
    once, often = Knowledge(small()), Knowledge(small())
    once.observe(7, told_of(7, "imitated", 5.0, 0.1))
    for _ in range(25):
        often.observe(7, told_of(7, "imitated", 5.0, 0.1))
    often.observe(7, told_of(7, "imitated", 6.0, 0.5))
    assert often.records[7].variance == once.records[7].variance
    assert often.records[7].step_seconds == pytest.approx(5.0), "the surer one counts"
    assert len(often.time_observations()) == 1
    often.observe(7, told_of(7, "emulated", 5.0))
    assert len(often.time_observations()) == 2


def test_a_look_that_fails_takes_nothing_from_what_answered() -> None:
    knowledge = Knowledge(small())
    failing = Measured(status="failed", rung="imitated", failure="oom")
    for rung_name in ("emulated", "probed"):
        knowledge.observe(1, told_of(1, rung_name, 5.0))
        assert knowledge.observe(1, failing, counts=True) == []
        assert (knowledge.records[1].status, knowledge.records[1].fidelity) == ("ok", rung_name)
    knowledge.observe(2, failing, counts=True)
    assert knowledge.records[2].status == "failed"
    assert 2 not in knowledge.excluded


@pytest.mark.parametrize("claim", ["far", True, float("nan"), 1e200, -0.5, [0.1], None])
def test_strange_claims_are_none(claim: object) -> None:
    measured = Measured.model_validate(
        {"rung": "imitated", "step_seconds": 2.0, "relative_error": {"step_seconds": claim}}
    )
    assert noise_variance(measured) == pytest.approx(RUN_SD**2)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_do_not_run_what_a_look_has_shown_to_be_slow(sampler: str) -> None:
    machine = Machine.wrong_by(small(), 0.0)
    asked: list[Proposal] = []

    def measure(one: Proposal) -> Measurement:
        asked.append(one)
        return machine.run(one) if one.fidelity == "probed" else imitated(one, machine, off=0.5)

    run(
        small(),
        settings(
            sampler=sampler, fidelities=(IMITATION,), budget=Budget(probes=5, gpu_seconds=1e12)
        ),
        one_at_a_time(measure),
    )
    looked = {one.row for one in asked if one.fidelity == "imitated"}
    assert looked
    assert not looked & {one.row for one in asked if one.fidelity == "probed"}


def test_a_look_that_the_pool_cannot_make_is_no_probe_and_no_failure() -> None:
    def unable(asked: Proposal) -> Measurement:
        return measurement(
            asked,
            Measured(status="failed", rung="imitated", failure=UNABLE, message="needs 512 GPUs"),
        )

    odd = Machine.wrong_by(small(), 0.15)
    outcome = run(
        small(),
        settings(whole=False, fidelities=(IMITATION,)),
        one_at_a_time(
            lambda asked: imitated(asked, odd) if (asked.row or 0) % 2 else unable(asked)
        ),
    )
    assert outcome.spent.probes == 6
    assert all(one.row % 2 for one in outcome.ranked if one.record is not None)
    never = run(small(), settings(whole=False, fidelities=(IMITATION,)), one_at_a_time(unable))
    assert (never.spent.probes, never.spent.gpu_seconds, never.spent.failures_in_a_row) == (
        0,
        0.0,
        0,
    )
    assert "no scaled-down run on it could stand for a layout" in never.stopped


def test_what_the_program_cannot_run_is_not_asked() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    refused = np.arange(len(small())) % 3 != 1
    run(small(), settings(refused=refused), one_at_a_time(machine.run))
    assert machine.asked
    assert not [one.row for one in machine.asked if refused[one.row or 0]]


def test_many_candidates_that_cannot_be_looked_at_do_not_end_the_study() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    blind = replace(IMITATION, options=lambda row: IMITATION.options(row) if row >= 60 else ())
    outcome = run(
        small(),
        settings(whole=False, fidelities=(blind,)),
        one_at_a_time(lambda asked: imitated(asked, machine)),
    )
    assert outcome.spent.probes == 6
    known = [imitated(one, machine) for one in asked_of(range(40))]
    again = run(
        small(),
        settings(whole=False, fidelities=(IMITATION,)),
        one_at_a_time(lambda asked: imitated(asked, machine)),
        known=known,
    )
    assert again.spent.probes > 0


def asked_of(rows: Iterable[int]) -> list[Proposal]:
    question = ProbeStudy(small(), settings()).ask()
    assert question is not None
    return [
        replace(
            question,
            number=100 + row,
            row=row,
            layout=small().batch.row(row),
            fidelity="imitated",
            num_gpus=2,
        )
        for row in rows
    ]


def test_resumed_a_look_counts_as_it_was_asked() -> None:
    """Also where what was spent since would not pay for the layout any more."""
    machine = Machine.wrong_by(small(), 0.15)
    study = ProbeStudy(
        small(), settings(fidelities=(IMITATION,), budget=Budget(probes=2, gpu_seconds=3000.0))
    )
    look = after_the_first(study, machine)
    assert (look.fidelity, look.counts) == ("imitated", False)
    told = imitated(look, machine)
    stored = [
        machine.run(
            replace(look, row=1, layout=small().batch.row(1), fidelity="probed")
        ).model_copy(update={"id": "one"}),
        told,
    ]
    for counts, spent in ((False, (1, 1)), (True, (2, 0))):
        heir = ProbeStudy(small(), replace(study.settings, gpu_seconds_before=2500.0))
        heir.restore(stored, spent=True, as_probes={"one": True, told.id: counts})
        assert (heir.spent.probes, heir.spent.low_fidelity) == spent


def test_a_candidate_is_one_trial_whatever_failed_on_the_way() -> None:
    machine = Machine.wrong_by(small(), 0.15)

    def measure(one: Proposal) -> Measurement:
        return machine.run(one) if one.fidelity == "probed" else look_failed(one, "crash")

    outcome = run(
        small(),
        settings(fidelities=(IMITATION,), budget=Budget(probes=12, gpu_seconds=1e12)),
        one_at_a_time(measure),
    )
    params = [
        tuple(sorted((key, str(value)) for key, value in trial.params.items()))
        for trial in outcome.study.trials
    ]
    assert len(params) == len(set(params))


def test_a_look_at_what_is_slower_than_predicted_costs_as_much_more() -> None:
    """Its steps are those of the same model on the same machine; its start is not."""
    way = FidelityOption(num_gpus=2, runs=1, step_seconds=3.0, sd=0.02)
    look = replace(rung("imitated", num_gpus=2), options=lambda _: (way,))
    study = ProbeStudy(
        small(), settings(fidelities=(look,), cost=ProbeCost(start_seconds=60.0, steps=13))
    )
    (before,) = study._evaluations(look, 1)
    assert before.gpu_seconds == pytest.approx(2 * (60.0 + 13 * 3.0))
    machine = Machine(small(), small().prior.log_seconds + np.log(2.0))
    after_the_first(study, machine)
    slower = float(np.exp(study.knowledge.posterior().time.mean[1]))
    assert slower > 1.5, "one run teaches that all are slower"
    start = study.fidelities.low_fidelity_start_seconds()
    (after,) = study._evaluations(look, 1)
    assert after.gpu_seconds == pytest.approx(2 * (start + 13 * slower * 3.0))


def test_quick_starts_of_looks_promise_nothing_for_the_layouts() -> None:
    study = ProbeStudy(small(), settings(cost=ProbeCost(start_seconds=60.0, steps=13)))
    before = study._costs()[0]
    for start, expected in ((1.0, 60.0), (90.0, 90.0)):
        study.fidelities.low_fidelity_starts = [start]
        assert study.fidelities.start_seconds() == expected
        assert study.fidelities.low_fidelity_start_seconds() == start
    assert before == pytest.approx(
        8 * (60.0 + 13 * np.exp(study.knowledge.posterior().log_seconds[0]))
    )


def test_probes_side_by_side_that_may_be_followed_keep_the_budget() -> None:
    machine = Machine.wrong_by(small(), 0.15)
    asked: list[Proposal] = []
    measure = promising_looks(machine, asked)
    outcome = run(
        small(),
        settings(fidelities=(IMITATION,), parallel=4, budget=Budget(probes=3, gpu_seconds=1e12)),
        one_at_a_time(measure),
    )
    assert outcome.spent.probes == sum(one.fidelity == "probed" for one in asked) <= 3
    assert not [trial for trial in outcome.study.trials if not trial.state.is_finished()]


def test_micro_probes_go_first_where_they_can_change_the_winner() -> None:
    candidates = small()
    factor = 0.4 * np.where(candidates.batch.pp > 1, 1.0, -1.0)[:, None]
    close = np.log(10.0) + 0.01 * np.sort(np.random.default_rng(0).random(len(candidates)))
    divided = replace(candidates, prior=replace(candidates.prior, log_seconds=close, factor=factor))
    look = KernelEffect(name="send", loading=(1.0,), sd=0.05)
    probe = MicroProbe(name="send between stages", effects=(look,), gpu_seconds=5.0)
    study = ProbeStudy(divided, settings(micro_probes=(probe,)))
    asked = study.ask()
    assert asked is not None
    assert (asked.fidelity, asked.micro, asked.row, asked.layout) == ("micro", probe, None, None)
    study.tell(
        asked, MicroResult(observed=(ObservedEffect(effect=look, log_ratio=1.0),), gpu_seconds=4.0)
    )
    assert study.spent.probes == 0
    assert study.spent.gpu_seconds == 4.0
    following = study.ask()
    assert following is not None
    assert following.layout is not None
    assert following.fidelity == "probed"
    assert following.layout.pp == 1
    assert not study.optuna_study().trials[0].state.is_finished()


def test_micro_probes_that_can_change_nothing_are_not_asked() -> None:
    candidates = small()
    common = replace(
        candidates, prior=replace(candidates.prior, factor=np.full((len(candidates), 1), 0.3))
    )
    probe = MicroProbe(
        name="clock",
        effects=(KernelEffect(name="clock", loading=(1.0,), sd=0.05),),
        gpu_seconds=5.0,
    )
    asked = ProbeStudy(common, settings(micro_probes=(probe,))).ask()
    assert asked is not None
    assert asked.fidelity == "probed"
