"""The closed loop with cheaper evaluations of a layout: emulated ranks and kernels."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from optuna.trial import TrialState

from planner.specs.measurement import Measured, Measurement
from planner.study.evaluations import ProbeCost, Proposal
from planner.study.knowledge import Knowledge
from planner.study.ledger import LOW_FIDELITY_PER_PROBE
from planner.study.micro_probes import KernelEffect, MicroProbe, ObservedEffect
from planner.study.records import EMULATED_SD, RUN_SD
from planner.study.study import UNABLE, MicroResult, ProbeStudy
from tests.unit.probing_cases import Machine, measurement, play, settings, small, told_of

Answer = Callable[[Proposal], Measurement]
EMULATES = {"emulates": True}
LOOKS_ALONE = {"whole": False, **EMULATES}


@pytest.fixture
def machine() -> Machine:
    return Machine.wrong_by(small(), 0.15)


def emulated(asked: Proposal, machine: Machine, *, off: float = 0.0) -> Measurement:
    """What emulated ranks say of a layout, and how wrong they are."""
    seconds = float(np.exp(machine.log_seconds[asked.row] + off))
    ranks = min(asked.layout.pp, 3)
    numbers = {
        "rung": "emulated",
        "step_seconds": seconds,
        "gpu_seconds": ranks * (30.0 + 13 * seconds),
        "ranks": [{"step_seconds": seconds}] * ranks,
    }
    return measurement(asked, Measured.model_validate(numbers))


def look_failed(asked: Proposal, kind: str = "oom") -> Measurement:
    said = {"failure": kind, "message": "of its rank", "gpu_seconds": 20.0}
    return measurement(asked, Measured(status="failed", rung="emulated", **said))


def runs_and(look: Answer, machine: Machine) -> Answer:
    """Layouts themselves run as the machine does; looks at them are answered by `look`."""
    return lambda one: machine.run(one) if one.fidelity == "probed" else look(one)


def looks(machine: Machine, off: float) -> Answer:
    """As `runs_and`, with looks that are off by this."""
    return runs_and(lambda one: emulated(one, machine, off=off), machine)


def rungs_of(asked: list[Proposal]) -> list[str]:
    return [one.fidelity for one in asked]


def rows_of(asked: list[Proposal], fidelity: str) -> set[int | None]:
    return {one.row for one in asked if one.fidelity == fidelity}


def after_the_first(study: ProbeStudy, machine: Machine) -> Proposal:
    """The second question, once a layout itself has been measured."""
    first = study.ask()
    assert first.fidelity == "probed"
    study.tell(first, machine.run(first))
    return study.ask()


def asked_of(rows: Iterable[int]) -> list[Proposal]:
    """Looks at these candidates."""
    question, layouts = ProbeStudy(small(), settings()).ask(), small().batch.row
    look = replace(question, fidelity="emulated")
    return [replace(look, row=row, layout=layouts(row)) for row in rows]


def test_an_emulated_rank_goes_first_and_who_leads_by_it_is_run() -> None:
    machine = Machine.wrong_by(small(), 0.15, seed=3)
    few = {"probes": 4, "gpu_seconds": 2e4}
    outcome, looked = play(looks(machine, -0.1), **EMULATES, **few)
    rungs = rungs_of(looked)
    assert rungs[0] == "probed"
    assert rungs.count("probed") == outcome.spent.probes == 4
    assert rungs.count("emulated") == outcome.spent.low_fidelity > 2
    assert outcome.spent.gpu_seconds <= 2e4
    assert "GPU-second" in next(asked.reason for asked in looked if asked.fidelity == "emulated")
    led = [one.fidelity for one in looked if "it leads by a low-fidelity evaluation" in one.reason]
    assert set(led) == {"probed"}
    last = {asked.row: asked.fidelity for asked in looked}
    trials = outcome.study.trials
    assert len(trials) == len(last), "one trial a candidate, whatever rungs it went through"
    assert {trial.user_attrs["candidate"]: trial.user_attrs["rung"] for trial in trials} == last
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    winner = outcome.ranked[0]
    assert winner.record.fidelity == "probed"
    assert machine.regret(winner.row) < machine.regret(looked[0].row or 0)


def test_a_winner_only_looked_at_is_run_before_the_study_ends(machine: Machine) -> None:
    look = emulated(*asked_of([7]), machine, off=-0.5)
    outcome, asked = play(looks(machine, -0.5), known=[look], tolerance=0.9, **EMULATES)
    assert [(one.row, one.fidelity) for one in asked] == [(7, "probed")]
    assert "it leads by a low-fidelity evaluation" in asked[0].reason
    assert "expected regret" in outcome.stopped


def test_an_emulated_rank_out_of_memory_spares_the_layout() -> None:
    study = ProbeStudy(small(), settings(**EMULATES))
    second = after_the_first(study, Machine.wrong_by(small(), 0.1))
    assert second.fidelity == "emulated"
    full = Measured(status="oom", rung="emulated", gpu_seconds=30.0)
    study.tell(second, measurement(second, full))
    assert study.ask().row != second.row
    assert study.spent.probes == 1
    assert study.knowledge.records[second.row].fidelity == "emulated"


def test_a_failed_look_says_nothing_of_the_layout_and_is_not_repeated(machine: Machine) -> None:
    study = ProbeStudy(small(), settings(**EMULATES))
    look = after_the_first(study, machine)
    assert (look.fidelity, look.counts) == ("emulated", False)
    assert study.tell(look, look_failed(look)) == []
    assert look.row not in study.knowledge.excluded
    assert not study.knowledge.barred[look.row]
    spent = study.spent
    assert (spent.probes, spent.low_fidelity, spent.failures_in_a_row) == (1, 1, 0)
    again = study.ask()
    assert (again.row, again.fidelity) != (look.row, "emulated")


def test_emulation_that_keeps_failing_is_dropped_and_layouts_still_probed(machine: Machine) -> None:
    crashing = runs_and(lambda one: look_failed(one, "crash"), machine)
    outcome, asked = play(crashing, probes=12, **EMULATES)
    rungs, trials = rungs_of(asked), outcome.study.trials
    assert rungs.count("emulated") == 3
    assert outcome.spent.probes == rungs.count("probed") == 12
    assert "in a row failed" not in outcome.stopped
    complete = (trial for trial in trials if trial.state is TrialState.COMPLETE)
    tried = {trial.user_attrs.get("candidate") for trial in complete}
    assert len(tried) == len(rows_of(asked, "probed"))
    params = [sorted((key, str(value)) for key, value in one.params.items()) for one in trials]
    assert len(params) == len(set(map(tuple, params))), "one trial, whatever failed on the way"


def test_a_look_teaches_by_its_error_and_leaves_the_layout_to_be_run() -> None:
    row, knowledge = 3, Knowledge(small())
    before = knowledge.posterior().log_seconds[row]
    told = told_of(row, "emulated", float(np.exp(before + 0.2)))
    knowledge.observe(row, told, counts=False)
    assert 0.0 < knowledge.posterior().log_seconds[row] - before < 0.2
    assert knowledge.records[row].fidelity == "emulated"
    assert knowledge.untried()[row], "the layout itself may still be run"
    assert not knowledge.fits.any(), "one rank does not show that the whole layout fits"


def test_what_cannot_run_is_looked_at_alone_and_every_look_counts(machine: Machine) -> None:
    outcome, asked = play(lambda one: emulated(one, machine), **LOOKS_ALONE)
    assert [(one.fidelity, one.counts) for one in asked] == [("emulated", True)] * 6
    same = "the same look again would be wrong in the same way"
    assert len({one.row for one in asked}) == 6, same
    assert (outcome.spent.probes, outcome.spent.low_fidelity) == (6, 0)
    assert "budget of 6 probes" in outcome.stopped
    winner = outcome.ranked[0]
    assert winner.record.fidelity == "emulated"
    assert winner.record.variance == pytest.approx(RUN_SD**2 + EMULATED_SD**2)
    assert [trial.state for trial in outcome.study.trials] == [TrialState.COMPLETE] * 6
    assert machine.regret(winner.row) < machine.regret(asked[0].row or 0) + 0.05


def test_looks_that_fail_where_nothing_else_can_run_exclude_nothing_and_end_the_study() -> None:
    outcome, _ = play(look_failed, **LOOKS_ALONE)
    assert outcome.spent.probes == 3
    assert "3 probes in a row failed, the last with: oom: of its rank" in outcome.stopped
    assert outcome.pruned == ()
    assert [trial.state for trial in outcome.study.trials] == [TrialState.FAIL] * 3


def test_a_budget_that_pays_for_no_layout_pays_for_looks(machine: Machine) -> None:
    budget = {"probes": 20, "gpu_seconds": 4.0 * 2 * 60.0}
    none, _ = play(lambda one: emulated(one, machine), **budget)
    assert none.spent.probes == 0
    outcome, asked = play(lambda one: emulated(one, machine), **budget, **EMULATES)
    assert outcome.spent.probes == len(asked) >= 1
    most = budget["gpu_seconds"] + max(one.gpu_seconds for one in asked)
    assert outcome.spent.gpu_seconds <= most
    assert "GPU-seconds left do not pay" in outcome.stopped
    assert {*rungs_of(asked)} == {"emulated"}


def test_a_pool_on_which_nothing_stands_for_a_layout_says_so() -> None:
    outcome, _ = play(look_failed, whole=False)
    assert (outcome.spent.probes, outcome.study.trials) == (0, [])
    assert (
        outcome.stopped
        == "the pool is smaller than 8 GPUs, and no scaled-down run on it could stand for a layout"
    )


def test_what_was_looked_at_is_passed_over_where_nothing_else_can_run(machine: Machine) -> None:
    known = [emulated(one, machine) for one in asked_of(range(40))]
    outcome, asked = play(lambda one: emulated(one, machine), known=known, **LOOKS_ALONE)
    assert outcome.spent.probes == 6
    assert all((one.row or 0) >= 40 for one in asked)


def test_a_budget_that_pays_for_few_layouts_names_no_others(machine: Machine) -> None:
    """Ranks of a pipeline cost up to three times as much: those too dear are never asked."""
    costs = ProbeStudy(small(), settings(**LOOKS_ALONE)).evaluations.emulated_costs()
    budget = float(np.quantile(costs, 0.1))
    outcome, asked = play(lambda one: emulated(one, machine), gpu_seconds=budget, **LOOKS_ALONE)
    assert asked
    assert costs[asked[0].row] <= budget
    assert "GPU-seconds left do not pay" in outcome.stopped
    assert len(outcome.study.trials) == len(asked)


def test_looks_are_launches_and_have_a_limit_too() -> None:
    machine = Machine.wrong_by(small(), 0.3)
    outcome, asked = play(looks(machine, 0.3), probes=2, **EMULATES)
    most = 2 * LOW_FIDELITY_PER_PROBE
    assert outcome.spent.low_fidelity == rungs_of(asked).count("emulated") == most
    assert outcome.spent.probes == 2


def test_resumed_a_look_is_neither_repeated_nor_forgotten(machine: Machine) -> None:
    study = ProbeStudy(small(), settings(**EMULATES))
    first = study.ask()
    one = machine.run(first)
    study.tell(first, one)
    look = study.ask()
    assert look.fidelity == "emulated"
    for told, failures in ((emulated(look, machine), 0), (look_failed(look), 1)):
        heir = ProbeStudy(small(), settings(**EMULATES))
        heir.restore([one, told], spent=True)
        spent = heir.spent
        assert (spent.probes, spent.low_fidelity, spent.failures_in_a_row) == (1, 1, 0)
        used = sum(each.measured.gpu_seconds or 0.0 for each in (one, told))
        assert spent.gpu_seconds == pytest.approx(used)
        assert not heir.policy.emulable()[look.row]
        assert heir.evaluations.failures == failures
        assert len(heir.knowledge.time_observations()) == 2 - failures
        assert look.row not in heir.knowledge.excluded


def test_resumed_a_look_counts_as_it_was_asked(machine: Machine) -> None:
    """Also where what was spent since would not pay for the layout any more."""
    study = ProbeStudy(small(), settings(2, 3000.0, **EMULATES))
    look = after_the_first(study, machine)
    assert (look.fidelity, look.counts) == ("emulated", False)
    told = emulated(look, machine)
    run = machine.run(replace(look, row=1, layout=small().batch.row(1), fidelity="probed"))
    stored = [run.model_copy(update={"id": "one"}), told]
    for counts, spent in ((False, (1, 1)), (True, (2, 0))):
        heir = ProbeStudy(small(), replace(study.settings, gpu_seconds_before=2500.0))
        heir.restore(stored, spent=True, asked={"one": ("", True), told.id: ("", counts)})
        assert (heir.spent.probes, heir.spent.low_fidelity) == spent


def test_a_layout_that_ran_stands_for_itself_and_shows_what_its_looks_are_worth() -> None:
    """A look 14 times too fast, as on a CPU with fewer cores than processes."""
    knowledge = Knowledge(small())
    knowledge.observe(3, told_of(3, "probed", 0.25))
    for row in (5, 9):
        knowledge.observe(row, told_of(row, "emulated", 0.024))
    assert knowledge.posterior().leader in (5, 9), "to be run next"
    assert knowledge.posterior().winner == 3, "only what ran is an answer, where anything did"
    assert knowledge.emulated.variance_inflation() == 1.0
    knowledge.observe(5, told_of(5, "probed", 0.34))
    posterior = knowledge.posterior()
    assert posterior.winner == posterior.leader == 3
    assert np.exp(posterior.log_seconds[5]) == pytest.approx(0.34, rel=0.05)
    assert knowledge.emulated.variance_inflation() > 100, "such looks count for little"
    assert knowledge.records[5].runs == 1
    later = Knowledge(small())
    later.observe(3, told_of(3, "probed", 0.25))
    later.observe(3, told_of(3, "emulated", 0.05))
    assert later.records[3].step_seconds == pytest.approx(0.25)
    assert later.emulated.variance_inflation() > 100, "also when the look comes after"


def test_looks_that_hold_keep_their_trust(machine: Machine) -> None:
    knowledge, rng = Knowledge(small()), np.random.default_rng(0)
    for row in range(0, 200, 10):
        seconds = float(np.exp(machine.log_seconds[row]))
        heard = seconds * float(np.exp(0.03 * rng.standard_normal()))
        knowledge.observe(row, told_of(row, "emulated", heard))
        knowledge.observe(row, told_of(row, "probed", seconds))
    assert knowledge.emulated.variance_inflation() < 2.0


def test_looks_that_were_far_off_make_no_winner() -> None:
    knowledge = Knowledge(small())
    for row in (3, 5):
        knowledge.observe(row, told_of(row, "emulated", 5.0))
        knowledge.observe(row, told_of(row, "probed", 10.0))
    knowledge.observe(7, told_of(7, "emulated", 0.5))
    assert knowledge.posterior().winner in (3, 5)
    assert 7 not in [record.row for record in knowledge.timed()]
    assert knowledge.records[7].step_seconds == pytest.approx(0.5), "shown all the same"


def test_the_same_look_again_says_nothing_new() -> None:
    once, often = Knowledge(small()), Knowledge(small())
    once.observe(7, told_of(7, "emulated", 5.0))
    for _ in range(25):
        often.observe(7, told_of(7, "emulated", 5.0))
    unsure = {"step_seconds_sd": 1.0, "steps": 1}
    often.observe(7, told_of(7, "emulated", 6.0).model_copy(update=unsure))
    assert often.records[7].variance == once.records[7].variance
    assert often.records[7].step_seconds == pytest.approx(5.0), "the surer one counts"
    assert len(often.time_observations()) == 1


def test_a_look_that_fails_takes_nothing_from_what_answered() -> None:
    knowledge = Knowledge(small())
    failing = Measured(status="failed", rung="emulated", failure="oom")
    for rung_name in ("emulated", "probed"):
        knowledge.observe(1, told_of(1, rung_name, 5.0))
        assert knowledge.observe(1, failing, counts=True) == []
        assert (knowledge.records[1].status, knowledge.records[1].fidelity) == ("ok", rung_name)
    knowledge.observe(2, failing, counts=True)
    assert knowledge.records[2].status == "failed"
    assert 2 not in knowledge.excluded


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_do_not_run_what_a_look_has_shown_to_be_slow(sampler: str) -> None:
    right = Machine.wrong_by(small(), 0.0)
    _, asked = play(looks(right, 0.5), probes=5, sampler=sampler, **EMULATES)
    looked = rows_of(asked, "emulated")
    assert looked
    assert not looked & rows_of(asked, "probed")


def test_a_look_that_the_pool_cannot_make_is_no_probe_and_no_failure(machine: Machine) -> None:
    said = {"failure": UNABLE, "message": "needs 512 GPUs"}

    def unable(asked: Proposal) -> Measurement:
        return measurement(asked, Measured(status="failed", rung="emulated", **said))

    def odd(asked: Proposal) -> Measurement:
        return emulated(asked, machine) if (asked.row or 0) % 2 else unable(asked)

    outcome, _ = play(odd, **LOOKS_ALONE)
    assert outcome.spent.probes == 6
    assert all(one.row % 2 for one in outcome.ranked if one.record is not None)
    never, _ = play(unable, **LOOKS_ALONE)
    spent = never.spent
    assert (spent.probes, spent.gpu_seconds, spent.failures_in_a_row) == (0, 0.0, 0)
    assert "no scaled-down run on it could stand for a layout" in never.stopped


def test_a_look_at_what_is_slower_than_predicted_costs_as_much_more() -> None:
    """Its steps are those of the same model on the same machine; its start is not."""
    cost = ProbeCost(start_seconds=60.0, steps=13)
    study = ProbeStudy(small(), settings(cost=cost, **EMULATES))
    ranks, seconds = min(small().batch.row(1).pp, 3), np.exp(small().prior.log_seconds[1])
    before = study.evaluations.emulation(1)
    assert before.sd == EMULATED_SD
    assert before.gpu_seconds == pytest.approx(ranks * (60.0 + 13 * seconds))
    machine = Machine(small(), small().prior.log_seconds + np.log(2.0))
    again = after_the_first(study, machine)
    assert again.repeat, "one run so slow is not believed alone"
    study.tell(again, machine.run(again))
    slower = float(np.exp(study.knowledge.posterior().time.mean[1]))
    assert slower > 1.5, "run again, it teaches that all are slower"
    start = study.evaluations.emulated_start_seconds()
    after = study.evaluations.emulation(1)
    assert after.gpu_seconds == pytest.approx(ranks * (start + 13 * slower * seconds))


def test_quick_starts_of_looks_promise_nothing_for_the_layouts() -> None:
    study = ProbeStudy(small(), settings(cost=ProbeCost(start_seconds=60.0, steps=13)))
    before = study.evaluations.full_costs()[0]
    for start, expected in ((1.0, 60.0), (90.0, 90.0)):
        study.evaluations.emulated_starts = [start]
        assert study.evaluations.start_seconds() == expected
        assert study.evaluations.emulated_start_seconds() == start
    seconds = np.exp(study.knowledge.posterior().log_seconds[0])
    assert before == pytest.approx(8 * (60.0 + 13 * seconds))


def test_micro_probes_go_first_where_they_can_change_the_winner() -> None:
    candidates = small()
    factor = 0.4 * np.where(candidates.batch.pp > 1, 1.0, -1.0)[:, None]
    close = np.log(10.0) + 0.01 * np.sort(np.random.default_rng(0).random(len(candidates)))
    divided = replace(candidates, prior=replace(candidates.prior, log_seconds=close, factor=factor))
    look = KernelEffect(name="send", loading=(1.0,), sd=0.05)
    probe = MicroProbe(name="send between stages", effects=(look,), gpu_seconds=5.0)
    study = ProbeStudy(divided, settings(micro_probes=(probe,)))
    asked = study.ask()
    assert (asked.fidelity, asked.micro, asked.row, asked.layout) == ("micro", probe, None, None)
    seen = (ObservedEffect(effect=look, log_ratio=1.0),)
    study.tell(asked, MicroResult(observed=seen, gpu_seconds=4.0))
    assert (study.spent.probes, study.spent.gpu_seconds) == (0, 4.0)
    following = study.ask()
    assert (following.fidelity, following.layout.pp) == ("probed", 1)
    assert not study.optuna_study().trials[0].state.is_finished()


def test_micro_probes_that_can_change_nothing_are_not_asked() -> None:
    prior = replace(small().prior, factor=np.full((len(small()), 1), 0.3))
    look = KernelEffect(name="clock", loading=(1.0,), sd=0.05)
    probe = MicroProbe(name="clock", effects=(look,), gpu_seconds=5.0)
    study = ProbeStudy(replace(small(), prior=prior), settings(micro_probes=(probe,)))
    assert study.ask().fidelity == "probed"
