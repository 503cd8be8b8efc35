"""A study in ask and tell: what to evaluate next, and what a result shows about the others.

It neither runs nor stores probes. Equal candidates, settings and results give equal proposals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import optuna
from optuna.trial import TrialState

from planner.specs.measurement import Measured, Measurement
from planner.study.candidates import Candidates
from planner.study.evaluations import FULL, MICRO, Evaluations, Proposal
from planner.study.knowledge import Knowledge
from planner.study.ledger import Ledger, StudySettings
from planner.study.micro_probes import MicroProbe, ObservedEffect
from planner.study.policy import Policy
from planner.study.records import EMULATED, FULL_FIDELITY
from planner.study.regret import ExpectedRegret
from planner.study.samplers import Pick, make_sampler
from planner.study.trials import Trials

INTERRUPTED = "interrupted"
BROKEN = "environment"  # no probe can run in this place; independent of the layout
UNABLE = "unable"  # the pool cannot make this evaluation, and knows before it starts
# Of earlier measurements, by id: why each was asked, and whether it counted as a probe, if known.
AskedBefore = Mapping[str, tuple[str, bool | None]]
NOTHING_ASKED: AskedBefore = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroResult:
    """Result of a micro-probe.

    observed: empty if no kernel could be timed; `message` gives the reason.
    """

    observed: tuple[ObservedEffect, ...]
    gpu_seconds: float
    message: str = ""


class ProbeStudy:
    """Proposes evaluations of candidates and learns from their results.

    ignored: ids of restored measurements whose layout is no candidate, or whose fidelity this
        study lacks.
    broken: why no probe can run; None while some can.
    """

    def __init__(self, candidates: Candidates, settings: StudySettings) -> None:
        self.candidates, self.settings = candidates, settings
        self.knowledge = Knowledge(candidates)
        self.knowledge.first = settings.first
        self.knowledge.first_measures = settings.first_measures
        if settings.refused is not None:
            self.knowledge.refused |= settings.refused
        self._observe_effects(settings.observed)
        self.evaluations = Evaluations(
            self.knowledge, settings.cost, whole=settings.whole, emulates=settings.emulates
        )
        self.spent = Ledger(budget=settings.budget, gpu_seconds=settings.gpu_seconds_before)
        self.policy = Policy(settings, self.knowledge, self.evaluations, self.spent)
        sampler = make_sampler(settings.sampler, self.knowledge, seed=settings.seed)
        self.trials = Trials(sampler, self._about)
        self.ignored: list[str] = []
        self.broken: str | None = None
        self._trial: optuna.Trial | None = None  # under way

    def regret(self) -> ExpectedRegret:
        return self.policy.regret()

    def _about(self, row: int) -> dict[str, Any]:
        spent = self.spent.by_row.get(row, 0.0)
        return {**self.candidates.prior.predicted(row), "gpu_seconds": spent}

    # ---- from the database ---------------------------------------------------------------------

    def restore(
        self,
        measurements: Sequence[Measurement],
        *,
        spent: bool,
        asked: AskedBefore = NOTHING_ASKED,
    ) -> None:
        """Learns from stored measurements, oldest first.

        spent: whether they belong to this study and count against its budget.
        """
        nothing = []
        for measurement in measurements:
            measured, layout = measurement.measured, measurement.job.layout
            row = None if layout is None else self.candidates.find(layout)
            emulated = measured.rung == EMULATED and self.settings.emulates
            if row is None or not (emulated or measured.rung in FULL_FIDELITY):
                self.ignored.append(measurement.id)
                continue
            reason, counted = asked.get(measurement.id, ("measured before", None))
            counts = not emulated or (
                spent and (not self.policy.payable(row) if counted is None else counted)
            )
            if measured.failure != INTERRUPTED:
                self._observe(row, measured, emulated=emulated, counts=counts)
                notes = {"measurement": measurement.id, "rung": measured.rung, "reason": reason}
                record = self.knowledge.records.get(row)
                if record is None:
                    nothing.append((row, {**notes, "message": _nothing(measured)}))
                elif not emulated or record.fidelity not in FULL_FIDELITY:
                    self.trials.notes[row] = notes
            if spent:
                counts = counts and measured.failure != INTERRUPTED
                self._pay(measured, row, emulated=emulated, counts=counts)
        for row, attributes in nothing:
            self.trials.note(row, attributes)
        self.trials.rebuild(self.knowledge.records.values())

    # ---- ask -----------------------------------------------------------------------------------

    def finished(self) -> str | None:
        """Why the study should stop; None while another evaluation can pay and is affordable."""
        if self.broken is not None:
            return f"no probe can run here: {self.broken}"
        return self.policy.finished()

    def ask(self) -> Proposal | None:
        """The next evaluation; None when the budget is used up or nothing is left to evaluate."""
        self.trials.settle(self.knowledge.records.values())
        policy, knowledge = self.policy, self.knowledge
        knowledge.whole_affordable = self.evaluations.runnable(self.spent.gpu_seconds_left())
        knowledge.affordable = knowledge.whole_affordable | policy.emulable()
        if self.spent.probes_left() <= 0:
            return None
        pick = policy.required()
        if pick is None and (micro := policy.micro()) is not None:
            return self._time_kernels(*micro)
        pick = pick or policy.confirming()
        if pick is not None:
            return self._evaluate(pick)
        return self._evaluate() if self.trials.sampler.has_more() else None

    def _evaluate(self, pick: Pick | None = None) -> Proposal:
        """Starts a run of the layout of `pick`, or the best evaluation of the sampler's pick."""
        itself = pick is not None
        trial = self.trials.ask(pick)
        pick = self.trials.sampler.picks[trial.number]
        row = pick.row
        choice = self.policy.choice(row, itself=itself or pick.repeat)
        evaluation = choice.evaluation
        reason = f"{pick.reason}; {choice.reason(self.evaluations.full(row))}"
        trial.set_user_attr("reason", reason)
        self.trials.notes[row] = {"reason": reason}
        self._trial = trial
        return Proposal(
            row=row,
            layout=self.candidates.batch.row(row),
            fidelity=evaluation.name,
            reason=reason,
            counts=evaluation.name == FULL or choice.full_probability is None,
            gpu_seconds=evaluation.gpu_seconds,
            gpu_seconds_limit=self.spent.gpu_seconds_left(),
            repeat=pick.repeat,
        )

    def _time_kernels(self, micro: MicroProbe, reason: str) -> Proposal:
        return Proposal(
            fidelity=MICRO,
            gpu_seconds=micro.gpu_seconds,
            gpu_seconds_limit=self.spent.gpu_seconds_left(),
            micro=micro,
            reason=reason,
        )

    # ---- tell ----------------------------------------------------------------------------------

    def tell(self, proposal: Proposal, result: Measurement | MicroResult) -> list[int]:
        """Learns from a result; returns the rows that it rules out."""
        if isinstance(result, MicroResult):
            return self._tell_micro(proposal, result)
        row = proposal.row
        assert row is not None, "only a micro-probe has no candidate"
        measured, emulated = result.measured, proposal.fidelity == EMULATED
        failure = measured.failure
        if failure is not None and failure in (INTERRUPTED, BROKEN):
            if failure == BROKEN:
                self.broken = measured.message or failure
            self._pay(measured, row, emulated=emulated, counts=False)
            self.give_up(failure=failure)
            return []
        trial, self._trial = self._trial, None
        assert trial is not None, "a result answers the evaluation under way"
        notes = {"measurement": result.id, "rung": proposal.fidelity}
        if failure == UNABLE:  # nothing is learnt, and it is not proposed again
            self.evaluations.observe_unable(row)
            why = {"rung": proposal.fidelity, "reason": measured.message or UNABLE}
            self.trials.close(trial, TrialState.PRUNED, why)
            return []
        self._pay(measured, row, emulated=emulated, counts=proposal.counts)
        known_before = self.evaluations.emulated[row] or row in self.knowledge.records
        ruled_out = self._observe(row, measured, emulated=emulated, counts=proposal.counts)
        record = self.knowledge.records.get(row)
        if record is not None:
            self.trials.finish(trial, record, notes)
        else:
            self.trials.close(trial, TrialState.FAIL, {**notes, "message": _nothing(measured)})
        self.trials.stale |= known_before
        return ruled_out

    def _tell_micro(self, proposal: Proposal, result: MicroResult) -> list[int]:
        assert proposal.micro is not None, "a micro-probe says which it is"
        self.evaluations.timed.add(proposal.micro.name)
        self._observe_effects(result.observed)
        self.spent.pay(result.gpu_seconds)
        return []

    def give_up(self, *, failure: str = INTERRUPTED) -> None:
        """Withdraws the evaluation under way, as if it had not been proposed."""
        if self._trial is not None:
            self.trials.close(self._trial, TrialState.FAIL, {"failure": failure})
            self._trial, self.trials.stale = None, True

    def optuna_study(self) -> optuna.Study:
        """The Optuna study, one trial a candidate once nothing is under way."""
        self.trials.settle(self.knowledge.records.values())
        return self.trials.study

    def _observe_effects(self, found: Sequence[ObservedEffect]) -> None:
        for one in found:
            self.knowledge.observe_direction(one.effect.loading, *one.along_loading)

    def _observe(self, row: int, measured: Measured, *, emulated: bool, counts: bool) -> list[int]:
        if emulated:
            self.evaluations.observe_emulated(row, failed=measured.status == "failed")
        return self.knowledge.observe(row, measured, counts=counts or not emulated)

    def _pay(self, measured: Measured, row: int, *, emulated: bool, counts: bool) -> None:
        """Adds a result to what is spent.

        counts: whether it counts against the budget of probes.
        """
        cost, interrupted = measured.gpu_seconds, measured.failure == INTERRUPTED
        if cost is not None and not interrupted and measured.step_seconds:
            self.evaluations.observe_start(measured, cost, emulated=emulated)
        self.spent.pay(
            float(self.evaluations.full_costs()[row]) if cost is None else cost,
            row=row,
            probe=counts,
            low_fidelity=emulated and not counts and not interrupted and self.broken is None,
            failed=measured.status == "failed",
        )


def _nothing(measured: Measured) -> str:
    """The reason why an evaluation gave no information about its layout."""
    return (
        f"{measured.failure or 'crash'}: {measured.message or ''}"
        if measured.status == "failed"
        else "it gave no step time"
    )
