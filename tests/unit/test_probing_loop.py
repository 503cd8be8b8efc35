"""The closed loop: budgets kept to, stopped with a number, resumed where a kill left it."""

from dataclasses import replace

import numpy as np
import pytest
from optuna.trial import TrialState

from planner.specs.measurement import Measured, Measurement
from planner.study.ask_tell import Event, run
from planner.study.evaluations import ProbeCost, Proposal
from planner.study.samplers import Pick
from planner.study.study import ProbeStudy
from tests.conftest import one_fast
from tests.unit import probing_cases
from tests.unit.probing_cases import Machine, failed, measurement, play, settings, small


@pytest.fixture
def machine() -> Machine:
    return Machine.wrong_by(small(), 0.1)


def test_gpu_seconds_are_kept_if_probes_use_their_limits(machine: Machine) -> None:
    most = 8000.0

    def greedy(asked: Proposal) -> Measurement:
        assert asked.gpu_seconds <= asked.gpu_seconds_limit + 1e-6
        spent = min(asked.gpu_seconds_limit, 1.5 * asked.gpu_seconds)
        measured = machine.run(asked).measured.model_copy(update={"gpu_seconds": spent})
        return measurement(asked, measured)

    outcome, asked = play(greedy, probes=50, gpu_seconds=most)
    assert outcome.spent.gpu_seconds <= most + 1e-6
    assert len(asked) >= 2
    assert "GPU-seconds left do not pay" in outcome.stopped


def test_the_cost_of_starting_is_learnt(machine: Machine) -> None:
    study = ProbeStudy(small(), settings(cost=ProbeCost(start_seconds=600.0, steps=13)))
    first = study.ask()
    study.tell(first, machine.run(first))
    second = study.ask()
    assert second.gpu_seconds < 0.5 * first.gpu_seconds
    expected = float(np.exp(study.knowledge.posterior().log_seconds[second.row]))
    assert second.gpu_seconds == pytest.approx(8 * (30.0 + 13 * expected), rel=1e-6)


def test_it_stops_with_the_number_when_regret_is_below_tolerance() -> None:
    right = Machine(small(), small().prior.log_seconds).run
    outcome, asked = play(right, probes=1000, tolerance=0.2)
    share = outcome.regret.expected_share
    assert share <= 0.2
    assert f"expected regret {share:.2%}, below the tolerance of 20.00%" in outcome.stopped
    assert len(asked) < 50
    again, _ = play(right, probes=len(asked), tolerance=0.2)
    assert again.stopped == outcome.stopped, "also where the budget ends with it"


def test_it_does_not_stop_before_the_run_that_isolates_what_nobody_measured() -> None:
    machine = Machine(small(), small().prior.log_seconds)
    isolating = Pick(row=3, reason="measures what no run used")
    study = ProbeStudy(small(), settings(1000, tolerance=1e6, first=0, isolating=isolating))
    for row in (0, 3):
        assert study.finished() is None
        asked = study.ask()
        assert asked.row == row
        study.tell(asked, machine.run(asked))
    assert "expected regret" in (study.finished() or "")


def test_asked_to_stop_it_returns_the_best_so_far(machine: Machine) -> None:
    outcome = run(small(), settings(), machine.run, should_stop=lambda: len(machine.asked) >= 2)
    assert outcome.stopped == "asked to stop"
    assert len(machine.asked) == 2
    assert outcome.ranked[0].row in [asked.row for asked in machine.asked]


def test_a_broken_machine_ends_the_study_before_the_budget() -> None:
    outcome, asked = play(lambda one: measurement(one, failed("lost-gpu")), probes=1000)
    assert len(asked) == 3
    assert "3 probes in a row failed" in outcome.stopped
    assert "lost-gpu" in outcome.stopped


def test_a_runner_without_an_answer_ends_the_study() -> None:
    outcome = run(small(), settings(), lambda asked: None)
    assert (outcome.stopped, outcome.spent.probes) == ("the runner gave no result", 0)


def test_resumed_after_a_kill_nothing_is_lost_or_measured_twice() -> None:
    candidates, stored = small(), list[Measurement]()
    whole, machine = (Machine.wrong_by(candidates, 0.12) for _ in range(2))
    uninterrupted = run(candidates, settings(), whole.run)

    def dies(asked: Proposal) -> Measurement:
        if len(stored) == 3:
            raise KeyboardInterrupt
        stored.append(machine.run(asked))
        return stored[-1]

    with pytest.raises(KeyboardInterrupt):
        run(candidates, settings(), dies)
    told = zip(stored, machine.asked, strict=True)
    before = {"resumed": stored, "asked_before": {one.id: (it.reason, None) for one, it in told}}
    resumed = run(candidates, settings(), machine.run, **before)
    rows = [asked.row for asked in machine.asked]
    assert len(rows) == 6
    assert rows == [asked.row for asked in whole.asked]
    first_looks = [asked.row for asked in machine.asked if not asked.repeat]
    assert len(first_looks) == len(set(first_looks)), "again only where the study says so"
    for found in (resumed, uninterrupted):
        assert found.spent.probes == 6
        assert found.spent.gpu_seconds == pytest.approx(uninterrupted.spent.gpu_seconds)
        assert [one.row for one in found.ranked] == [one.row for one in uninterrupted.ranked]
        assert found.regret == uninterrupted.regret
    said, expected = (
        [(trial.params, trial.user_attrs["reason"]) for trial in found.study.trials]
        for found in (resumed, uninterrupted)
    )
    assert said == expected


def test_resumed_out_of_memory_and_failures_are_kept() -> None:
    asked: list[Measurement] = []
    first, second = (ProbeStudy(small(), settings()) for _ in range(2))
    for outcome in (probing_cases.out_of_memory(), failed("timeout")):
        one = first.ask()
        asked.append(measurement(one, outcome))
        first.tell(one, asked[-1])
    second.restore(asked, spent=True)
    assert second.knowledge.excluded == first.knowledge.excluded
    assert second.spent == first.spent
    states = [trial.state for trial in second.optuna_study().trials]
    assert states == [TrialState.PRUNED, TrialState.FAIL]
    assert second.ask().row == first.ask().row


def test_known_measurements_teach_but_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regrets of 1,024 draws are off by 7%, more than what the two studies differ by: draw more."""
    monkeypatch.setattr("planner.study.regret.DRAWS", 2**16)
    machine = Machine.wrong_by(small(), 0.12)
    before, asked = play(machine.run)
    stored = [measurement(one, machine.timed(one.row or 0, 0)) for one in asked]
    outcome, fresh = play(Machine.wrong_by(small(), 0.12).run, known=stored, probes=2)
    assert outcome.spent.probes == 2
    assert not {one.row for one in fresh if not one.repeat} & {one.row for one in asked}
    assert outcome.regret.expected_share <= before.regret.expected_share


def test_measurements_of_other_layouts_are_named_and_ignored(machine: Machine) -> None:
    asked = ProbeStudy(small(), settings()).ask()
    other = replace(asked, layout=asked.layout.model_copy(update={"micro_batch_size": 64}))
    stranger = measurement(other, Measured(rung="probed", step_seconds=1.0))
    emulated = measurement(replace(asked, row=7), Measured(rung="emulated", step_seconds=1.0))
    outcome, _ = play(machine.run, known=[stranger, emulated], probes=1)
    assert outcome.ignored == (stranger.id, emulated.id)
    assert stranger.id != emulated.id


@pytest.mark.parametrize("seed", one_fast(*range(6)))
def test_the_best_so_far_never_gets_worse_and_is_the_answer(seed: int) -> None:
    """On a machine so noisy that most of what it says is chance, with repeats."""
    machine = replace(Machine.wrong_by(small(), 0.1, seed=seed), noise_sd=0.15)
    stored: list[Measurement] = []

    def measure(asked: Proposal) -> Measurement:
        stored.append(machine.run(asked))
        return stored[-1]

    events: list[Event] = []
    outcome, asked = play(measure, on_event=events.append, probes=14)
    best = [event.best_seconds for event in events if event.best_seconds is not None]
    assert best == sorted(best, reverse=True)
    assert {event.best_fidelity for event in events if event.best_seconds is not None} == {"probed"}
    fastest = min(one.measured.step_seconds or np.inf for one in stored)
    winner = outcome.ranked[0]
    assert winner.record.step_seconds == winner.expected_seconds == best[-1]
    assert best[-1] == pytest.approx(fastest)
    assert {one.row for one in outcome.ranked if one.record} == {one.row for one in asked}


def test_events_tell_the_best_so_far_the_regret_and_what_is_left(machine: Machine) -> None:
    events: list[Event] = []
    outcome, asked = play(machine.run, on_event=events.append, probes=3, gpu_seconds=1e6)
    assert len(asked) == outcome.spent.probes == 3
    assert "budget of 3 probes" in outcome.stopped
    assert [event.kind for event in events] == ["asked", "told"] * 3 + ["stopped"]
    assert [event.spent.probes_left() for event in events if event.kind == "told"] == [2, 1, 0]
    told = [event for event in events if event.kind == "told"]
    best = [event.best_seconds for event in told]
    assert best == sorted((value for value in best if value is not None), reverse=True)
    assert all(event.regret is not None and event.regret.expected_share >= 0.0 for event in told)
    assert told[-1].spent.gpu_seconds_left() == pytest.approx(1e6 - outcome.spent.gpu_seconds)
    assert told[-1].best_layout == outcome.ranked[0].layout
    assert events[0].message == machine.asked[0].reason
    assert events[0].spent.gpu_seconds_left() == 1e6, "nothing is spent yet"
    assert events[-1].message == outcome.stopped
