"""A study in ask and tell: what to evaluate next, and what a result shows about the others.

It neither runs nor stores probes. Equal candidates, settings and results give equal proposals.
Letters: N candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from planner.calibration import student
from planner.columns import BoolColumn
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import Layout
from planner.specs.measurement import Measured, Measurement
from planner.study.candidates import Candidates
from planner.study.evaluations import FULL, MOST_FAILURES, Evaluations, ProbeCost
from planner.study.fidelity import FidelityChoice, Prospect, choose_evaluation, direct
from planner.study.micro_probes import MicroProbe, ObservedEffect, evaluation_rate, most_valuable
from planner.study.posterior import EMULATED, FULL_FIDELITY, Knowledge
from planner.study.regret import TOLERANCE, ExpectedRegret
from planner.study.samplers import Pick, make_sampler
from planner.study.trials import Trials
from planner.units import counted

MICRO = "micro"
# judgement: expected gain (share of a step) below which a low-fidelity evaluation before the
# winner's own run is not worth a launch
LEAST_LOW_FIDELITY_GAIN = 2e-3
# judgement: low-fidelity evaluations per probe; each costs little but is a launch to wait for
LOW_FIDELITY_PER_PROBE = 4
INTERRUPTED = "interrupted"
BROKEN = "environment"  # no probe can run in this place; independent of the layout
UNABLE = "unable"  # the pool cannot make this evaluation, and knows before it starts
NO_REASONS: Mapping[str, str] = MappingProxyType({})
NO_COUNTS: Mapping[str, bool] = MappingProxyType({})
# judgement: expected gain (share of a step) below which timing kernels is not worth a launch
LEAST_MICRO_GAIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Budget of a study.

    probes: runs of whole layouts.
    gpu_seconds: of everything, micro-probes and low-fidelity evaluations included.
    """

    probes: int = 5
    gpu_seconds: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Settings by which a study spends its budget.

    tolerance: expected regret at which it stops.
    parallel: probes that run at once.
    risk_limit: largest probability of running out of memory, while anything safer is left.
    whole: whether the pool can run the layouts themselves; otherwise there are only emulated
        ranks, and they count as probes.
    emulates: whether it can emulate ranks.
    refused (N,): candidates that the probe program cannot run.
    observed: effects of earlier kernel timings.
    gpu_seconds_before: spent on timing kernels before this study was resumed.
    first: row of number 1 on paper, measured before all others.
    first_measures: what that measures for the first time, as a clause.
    isolating: row to measure next, which with number 1 isolates what nobody measured, and why.
    """

    sampler: str = "cost-model"
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    tolerance: float = TOLERANCE
    parallel: int = 1
    risk_limit: float = OOM_LIMIT
    cost: ProbeCost = field(default_factory=ProbeCost)
    whole: bool = True
    emulates: bool = False
    refused: BoolColumn | None = None
    micro_probes: tuple[MicroProbe, ...] = ()
    observed: tuple[ObservedEffect, ...] = ()
    gpu_seconds_before: float = 0.0
    first: int | None = None
    first_measures: str = ""
    isolating: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An evaluation to run.

    row, layout: the candidate; None for a micro-probe, which `micro` describes.
    fidelity: `probed` for the layout itself, `emulated` for ranks of it, or `micro`.
    num_gpus: used at once.
    counts: whether it counts against the budget of probes: a run of the layout, or the last
        possible evaluation of it.
    expected_seconds: of a step.
    gpu_seconds: expected cost.
    gpu_seconds_limit: most it may use; the runner's time limit follows from it.
    """

    number: int
    row: int | None
    layout: Layout | None
    fidelity: str
    num_gpus: int
    counts: bool
    reason: str
    expected_seconds: float | None
    gpu_seconds: float
    gpu_seconds_limit: float
    repeat: bool = False
    micro: MicroProbe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroResult:
    """Result of a micro-probe.

    observed: empty if no kernel could be timed; `message` gives the reason.
    """

    observed: tuple[ObservedEffect, ...]
    gpu_seconds: float
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Expenses of a study so far.

    low_fidelity: low-fidelity evaluations that do not count as probes.
    failures_in_a_row: probes without numbers since the last one with numbers.
    """

    probes: int = 0
    low_fidelity: int = 0
    gpu_seconds: float = 0.0
    failures_in_a_row: int = 0


class ProbeStudy:
    """Proposes evaluations of candidates and learns from their results."""

    def __init__(self, candidates: Candidates, settings: StudySettings) -> None:
        self.candidates, self.settings = candidates, settings
        self.knowledge = Knowledge(candidates)
        self.knowledge.first = settings.first
        self.knowledge.first_measures = settings.first_measures
        self.spent = Spent(gpu_seconds=settings.gpu_seconds_before)
        self._spent_on: dict[int, float] = {}
        self._observe_effects(settings.observed)
        self.trials = Trials(
            make_sampler(
                settings.sampler, self.knowledge, seed=settings.seed, risk_limit=settings.risk_limit
            ),
            self._about,
        )
        self.ignored: list[str] = []
        self._running: dict[int, Proposal] = {}
        self._open: dict[int, optuna.Trial] = {}
        if settings.refused is not None:
            self.knowledge.refused |= settings.refused
        self.evaluations = Evaluations(
            self.knowledge, settings.cost, whole=settings.whole, emulates=settings.emulates
        )
        self._micro_done: set[str] = set()
        self._next = 0
        self._stale = False
        self.broken: str | None = None

    def _about(self, row: int) -> dict[str, Any]:
        """What the model predicted of a candidate, and the GPU-seconds of its evaluations here."""
        prior = self.candidates.prior
        seconds = float(np.exp(prior.log_seconds[row]))
        sd = float(np.sqrt(prior.sd[row] ** 2 + (prior.factor[row] ** 2).sum()))
        width = float(np.exp(student.TWO_SIDED_90 * sd))
        return {
            "predicted_step_seconds": seconds,
            "interval_seconds": [seconds / width, seconds * width],
            "oom_probability": float(prior.oom_probability[row]),
            "gpu_seconds": self._spent_on.get(row, 0.0),
        }

    # ---- from the database ---------------------------------------------------------------------

    def restore(
        self,
        measurements: Sequence[Measurement],
        *,
        spent: bool,
        reasons: Mapping[str, str] = NO_REASONS,
        as_probes: Mapping[str, bool] = NO_COUNTS,
    ) -> None:
        """Learns from stored measurements, oldest first.

        spent: whether they belong to this study and count against its budget.
        reasons: why each was proposed, by measurement id.
        as_probes: whether each counted as a probe, by measurement id, if that is known.

        `ignored` gets the ids of those whose layout is no candidate or whose fidelity
        this study lacks.
        """
        nothing = []
        for measurement in measurements:
            measured, layout = measurement.measured, measurement.job.layout
            row = None if layout is None else self.candidates.find(layout)
            emulated = measured.rung == EMULATED and self.settings.emulates
            if row is None or not (emulated or measured.rung in FULL_FIDELITY):
                self.ignored.append(measurement.id)
                continue
            counts = not emulated or (
                spent and as_probes.get(measurement.id, not self._payable(row))
            )
            if measured.failure != INTERRUPTED:
                self._observe(row, measured, emulated=emulated, counts=counts)
                notes = {
                    "measurement": measurement.id,
                    "rung": measured.rung,
                    "reason": reasons.get(measurement.id, "measured before"),
                }
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
        spent, budget = self.spent, self.settings.budget
        if (
            self.knowledge.timed()
            and not self.knowledge.pending
            and (spent.probes >= budget.probes or self._unconfirmed() is None)
            and not self._isolates()
            and self._odd() is None
        ):
            regret = self.regret()
            if regret.expected_share <= self.settings.tolerance:
                return regret.statement(self.settings.tolerance)
        if spent.probes >= budget.probes:
            return f"the budget of {counted(budget.probes, 'probe')} is spent"
        if spent.failures_in_a_row >= MOST_FAILURES:
            return (
                f"{counted(spent.failures_in_a_row, 'probe')} in a row failed, the last with: "
                f"{self._last_failure()}"
            )
        share = self._share_left()
        if self.evaluations.runnable(share).any() or self.evaluations.emulable(share).any():
            return None
        if not self.settings.whole and not self.evaluations.emulation_works():
            return (
                f"the pool is smaller than {counted(self.candidates.size.num_gpus, 'GPU')}, and "
                "no scaled-down run on it could stand for a layout"
            )
        left = max(self.gpu_seconds_left(), 0.0)
        return f"the {left:.3g} GPU-seconds left do not pay for another probe"

    def ask(self) -> Proposal | None:
        """The next evaluation; None when the budget is used up or nothing is left to evaluate."""
        self._settle()
        under_way = sum(proposal.counts for proposal in self._running.values())
        runnable = self.evaluations.runnable(self._share_left())
        self.knowledge.whole_affordable = runnable
        self.knowledge.affordable = runnable | self._emulable()
        if self.spent.probes + under_way >= self.settings.budget.probes:
            return None
        if (self.knowledge.records or self._running) and self._isolates():
            return self._isolate()
        odd = self._odd()
        if odd is not None:
            return self._rerun(odd[0], f"again: one run took {odd[1]:.2f} times its prediction")
        micro = self._worthwhile_micro()
        if micro is not None:
            return self._start(micro)
        leader = self._unconfirmed()
        decided = (
            leader is not None
            and self.knowledge.posterior().regret(seed=self.settings.seed, of=leader).expected_share
            <= self.settings.tolerance
        )
        last = self.spent.probes + under_way + 1 >= self.settings.budget.probes
        if leader is not None and (decided or last or not self._low_fidelity_pays(beside=leader)):
            return self._rerun(
                leader, "it leads by a low-fidelity evaluation, and has not run itself"
            )
        if not self.trials.sampler.has_more():
            return None
        trial = self.trials.ask()
        pick = self.trials.sampler.picks[trial.number]
        return self._open_trial(trial, pick, self._choice(pick.row, repeat=pick.repeat))

    def ask_many(self) -> list[Proposal]:
        """As many evaluations as may run at once now."""
        proposals: list[Proposal] = []
        while len(self._running) < self.settings.parallel and (following := self.ask()) is not None:
            proposals.append(following)
        return proposals

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
            self.give_up(proposal, failure=failure)
            return []
        del self._running[proposal.number]
        if failure == UNABLE:
            return self._tell_unable(proposal, measured)
        self._pay(measured, row, emulated=emulated, counts=proposal.counts)
        trial = self._open.pop(proposal.number)
        known_before = self.evaluations.emulated[row] or row in self.knowledge.records
        ruled_out = self._observe(row, measured, emulated=emulated, counts=proposal.counts)
        record = self.knowledge.records.get(row)
        notes = {"measurement": result.id, "rung": proposal.fidelity}
        if record is not None:
            self.trials.finish(trial, record, notes)
        else:
            self.trials.close(trial, TrialState.FAIL, {**notes, "message": _nothing(measured)})
        self._stale |= known_before
        return ruled_out

    def _tell_micro(self, proposal: Proposal, result: MicroResult) -> list[int]:
        del self._running[proposal.number]
        assert proposal.micro is not None, "a micro-probe says which it is"
        self._micro_done.add(proposal.micro.name)
        self._observe_effects(result.observed)
        self.spent = replace(self.spent, gpu_seconds=self.spent.gpu_seconds + result.gpu_seconds)
        return []

    def _tell_unable(self, proposal: Proposal, measured: Measured) -> list[int]:
        """The pool cannot make this evaluation: nothing is learnt, and it is not proposed again."""
        assert proposal.row is not None, "an emulated rank is of a candidate"
        self.knowledge.forget(proposal.row)
        self.evaluations.observe_unable(proposal.row)
        self.trials.close(
            self._open.pop(proposal.number),
            TrialState.PRUNED,
            {"rung": proposal.fidelity, "reason": measured.message or UNABLE},
        )
        return []

    def give_up(self, proposal: Proposal, *, failure: str = INTERRUPTED) -> None:
        """Withdraws a proposal that will get no result, as if it had not been made."""
        del self._running[proposal.number]
        if proposal.row is not None:
            self.knowledge.forget(proposal.row)
        if proposal.number in self._open:
            self.trials.close(
                self._open.pop(proposal.number), TrialState.FAIL, {"failure": failure}
            )
            self._stale = True

    def regret(self) -> ExpectedRegret:
        return self.knowledge.posterior().regret(seed=self.settings.seed)

    def gpu_seconds_left(self) -> float:
        """GPU-seconds neither spent nor reserved by evaluations under way."""
        return (
            self.settings.budget.gpu_seconds
            - self.spent.gpu_seconds
            - sum(one.gpu_seconds_limit for one in self._running.values())
        )

    def optuna_study(self) -> optuna.Study:
        """The Optuna study, one trial a candidate once nothing is under way."""
        self._settle()
        return self.trials.study

    # ---- proposals -----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Merges repeats into one trial a candidate, unless trials are under way.

        Trials under way would lose their study.
        """
        if self._stale and not self._open:
            self.trials.rebuild(self.knowledge.records.values())
            self._stale = False

    def _share_left(self) -> float:
        """GPU-seconds for one more evaluation, so that all that may run at once stay in budget."""
        return self.gpu_seconds_left() / max(self.settings.parallel - len(self._running), 1)

    def _start(self, proposal: Proposal) -> Proposal:
        proposal = replace(proposal, gpu_seconds_limit=self._share_left())
        self._running[proposal.number] = proposal
        if proposal.row is not None:
            self.knowledge.expect(proposal.row)
        return proposal

    def _open_trial(self, trial: optuna.Trial, pick: Pick, choice: FidelityChoice) -> Proposal:
        row, evaluation = pick.row, choice.evaluation
        self._next += 1
        proposal = Proposal(
            number=self._next,
            row=row,
            layout=self.candidates.batch.row(row),
            fidelity=evaluation.name,
            num_gpus=evaluation.num_gpus,
            reason=f"{pick.reason}; {choice.reason(self.evaluations.full(row))}",
            counts=evaluation.name == FULL or choice.full_probability is None,
            expected_seconds=float(np.exp(self.knowledge.posterior().log_seconds[row])),
            gpu_seconds=evaluation.gpu_seconds,
            gpu_seconds_limit=0.0,
            repeat=pick.repeat,
        )
        trial.set_user_attr("reason", proposal.reason)
        self.trials.notes[row] = {"reason": proposal.reason}
        self._open[proposal.number] = trial
        return self._start(proposal)

    def _unconfirmed(self) -> int | None:
        """The leader, if it has only low-fidelity results and can be run itself."""
        leader = self.knowledge.posterior().leader
        record = self.knowledge.records.get(leader)
        unconfirmed = (
            record is not None
            and record.fidelity not in FULL_FIDELITY
            and leader not in self.knowledge.pending
        )
        return leader if unconfirmed and self._payable(leader) else None

    def _isolates(self) -> bool:
        """Whether the layout that isolates what nobody measured is still to be run, and can be."""
        if self.settings.isolating is None:
            return False
        row, _ = self.settings.isolating
        posterior = self.knowledge.posterior()
        return (
            row not in self.knowledge.records
            and bool(self.knowledge.untried()[row])
            and self._payable(row)
            and float(posterior.risk(np.array([row]))[0]) <= self.settings.risk_limit
        )

    def _isolate(self) -> Proposal:
        assert self.settings.isolating is not None, "only what isolates is asked"
        row, reason = self.settings.isolating
        pick = Pick(row=row, reason=reason)
        choice = direct(self._prospect(row), self.evaluations.full(row))
        return self._open_trial(self.trials.ask(pick), pick, choice)

    def _low_fidelity_pays(self, *, beside: int) -> bool:
        """Whether the most promising candidate should get a low-fidelity evaluation first.

        First means before the leader `beside` is run; enough must be left for that run.
        """
        posterior = self.knowledge.posterior()
        free = self.knowledge.untried()
        free[beside] = False
        rows = posterior.promising(free, 1, risk_limit=self.settings.risk_limit)
        if not rows or float(posterior.improvement(np.array(rows))[0]) < LEAST_LOW_FIDELITY_GAIN:
            return False
        choice = self._choice(rows[0], repeat=False)
        if choice.evaluation.name == FULL:
            return False
        return (
            choice.evaluation.gpu_seconds + self.evaluations.full(beside).gpu_seconds
            <= self._share_left()
        )

    def _odd(self) -> tuple[int, float] | None:
        """A layout whose run is not believed alone, and may run again; with how far it was off."""
        for row, factor in self.knowledge.odd().items():
            if row not in self.knowledge.pending and self._payable(row):
                return row, factor
        return None

    def _rerun(self, row: int, reason: str) -> Proposal:
        choice = direct(self._prospect(row), self.evaluations.full(row))
        pick = Pick(row=row, reason=reason, repeat=True)
        return self._open_trial(self.trials.ask(pick), pick, choice)

    def _choice(self, row: int, *, repeat: bool) -> FidelityChoice:
        """The affordable evaluation of this candidate that pays best."""
        full, prospect = self.evaluations.full(row), self._prospect(row)
        payable = self._payable(row)
        if repeat or not self._emulable()[row]:
            return direct(prospect, full)
        if payable and not self.knowledge.posterior().measured:
            return direct(prospect, full)
        emulation = self.evaluations.emulation(row)
        return choose_evaluation(prospect, emulation, full if payable else None)

    def _emulable(self) -> BoolColumn:
        """Candidates that may be emulated now: affordable, and not tried before, (N,)."""
        under_way = sum(one.row is not None and not one.counts for one in self._running.values())
        quota = LOW_FIDELITY_PER_PROBE * self.settings.budget.probes
        left = self.spent.low_fidelity + under_way < quota
        return self.evaluations.emulable(self._share_left()) & ~self.evaluations.emulated & left

    def _prospect(self, row: int) -> Prospect:
        posterior = self.knowledge.posterior()
        rows = np.array([row])
        return Prospect(
            gap=float(posterior.log_seconds[row] - posterior.best),
            sd=float(np.sqrt(posterior.time.variance(rows)[0])),
            fits=1.0 - float(posterior.risk(rows)[0]),
        )

    def _payable(self, row: int) -> bool:
        """Whether the layout itself can be run within the remaining budget."""
        return bool(self.evaluations.runnable(self._share_left())[row])

    # ---- micro-probes --------------------------------------------------------------------------

    def _worthwhile_micro(self) -> Proposal | None:
        """The micro-probe with the most gain per GPU-second.

        None if the most promising candidate gains more. Both are judged by the knowledge gradient.
        """
        affordable = [
            probe
            for probe in self.settings.micro_probes
            if probe.name not in self._micro_done and probe.gpu_seconds <= self._share_left()
        ]
        if not affordable:
            return None
        best, rate = most_valuable(affordable, self.knowledge.posterior())
        gain = rate * best.gpu_seconds
        candidate = self.knowledge.posterior().promising(
            self.knowledge.untried(), 1, risk_limit=self.settings.risk_limit
        )
        if gain < LEAST_MICRO_GAIN or (candidate and self._candidate_rate(candidate[0]) >= rate):
            return None
        self._next += 1
        return Proposal(
            number=self._next,
            row=None,
            layout=None,
            fidelity=MICRO,
            num_gpus=best.num_gpus,
            counts=False,
            expected_seconds=None,
            gpu_seconds=best.gpu_seconds,
            gpu_seconds_limit=0.0,
            micro=best,
            reason=f"{best.name}: could change the winner, worth {gain:.2%} of a step or more, "
            f"{rate:.2e} a GPU-second",
        )

    def _candidate_rate(self, row: int) -> float:
        """Gain per GPU-second of a run of this candidate, or of its emulation if it cannot run."""
        evaluated = self.evaluations.full if self._payable(row) else self.evaluations.emulation
        return evaluation_rate(evaluated(row), row, self.knowledge.posterior())

    # ---- results -------------------------------------------------------------------------------

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
        cost = measured.gpu_seconds
        if cost is None:
            cost = float(self.evaluations.full_costs()[row])
        self._spent_on[row] = self._spent_on.get(row, 0.0) + cost
        interrupted = measured.failure == INTERRUPTED
        if measured.gpu_seconds is not None and not interrupted and measured.step_seconds:
            self.evaluations.observe_start(measured, measured.gpu_seconds, emulated=emulated)
        failures = self.spent.failures_in_a_row
        if counts:
            failures = failures + 1 if measured.status == "failed" else 0
        extra = emulated and not counts and not interrupted and self.broken is None
        self.spent = Spent(
            probes=self.spent.probes + counts,
            low_fidelity=self.spent.low_fidelity + extra,
            gpu_seconds=self.spent.gpu_seconds + cost,
            failures_in_a_row=failures,
        )

    def _last_failure(self) -> str:
        failed = [record for record in self.knowledge.records.values() if record.status == "failed"]
        return failed[-1].message if failed else "no message"


def _nothing(measured: Measured) -> str:
    """The reason why an evaluation gave no information about its layout."""
    return (
        f"{measured.failure or 'crash'}: {measured.message or ''}"
        if measured.status == "failed"
        else "it gave no step time"
    )
