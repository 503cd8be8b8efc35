"""A study in ask and tell: what to probe next within the budget, and what a result means for what is left.

Knows nothing of how probes are run or stored; the same candidates, settings and results give the same questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import optuna
from optuna.trial import TrialState

from planner.columns import BoolColumn, FloatColumn
from planner.search.probing import fidelity
from planner.search.probing.candidates import Candidates
from planner.search.probing.fidelity import Belief, MicroProbe, Observed, Rung
from planner.search.probing.knowledge import RUN_SD, Knowledge
from planner.search.probing.sampler import sampler_for
from planner.search.probing.stopping import TOLERANCE, Regret
from planner.search.probing.trials import Trials
from planner.search.screen import OOM_LIMIT
from planner.specs.layout import Layout
from planner.specs.measurement import Measured, Measurement
from planner.units import counted

FULL, MICRO = "probed", "micro"
WHOLE = ("probed", "published")
MOST_FAILURES = 3  # in a row; then it is the machine and not the layout
INTERRUPTED = "interrupted"
NO_REASONS: Mapping[str, str] = MappingProxyType({})
LEAST_MICRO_GAIN = 1e-3  # of a step; below it timing kernels is not worth a launch, however cheap; judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be spent. probes: runs of whole layouts.  gpu_seconds: of everything, micro-probes and cheaper rungs included."""

    probes: int = 5
    gpu_seconds: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds that all GPUs of a probe are held: start_seconds (launch, compile, first step) + steps x step seconds.

    start_seconds is a judgement until the first results replace it by their mean.
    """

    start_seconds: float = 60.0
    steps: int = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperRung:
    """A rung below the whole layout. gpu_seconds (N,): of one look.  sd: error of its log time as the layout's, beyond run-to-run noise.

    log_offset (N,): predicted log ratio of the time it measures to the layout's step.  shows_memory: tells whether the layout fits.
    """

    name: str
    gpu_seconds: FloatColumn
    sd: float
    log_offset: FloatColumn
    shows_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a study goes about it. parallel: probes asked at once.  tolerance: of the expected regret at which it stops.

    risk_limit: largest probability of running out of memory that a probe may have, while there is anything safer.
    observed: what kernels timed before say.  gpu_seconds_before: spent by this study on timing kernels, before it was resumed.
    """

    sampler: str = "cost-model"
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    tolerance: float = TOLERANCE
    parallel: int = 1
    risk_limit: float = OOM_LIMIT
    cost: ProbeCost = field(default_factory=ProbeCost)
    rungs: tuple[CheaperRung, ...] = ()
    micro_probes: tuple[MicroProbe, ...] = ()
    observed: tuple[Observed, ...] = ()
    gpu_seconds_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A probe to run. rung: `probed`, a cheaper one, or `micro` (then `micro` says which and there is no layout).

    expected_seconds: of a step.  gpu_seconds: expected cost.  gpu_seconds_limit: what it may use at most; the runner's time limit follows.
    """

    number: int
    row: int | None
    layout: Layout | None
    rung: str
    reason: str
    expected_seconds: float | None
    gpu_seconds: float
    gpu_seconds_limit: float
    repeat: bool = False
    micro: MicroProbe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroResult:
    """What a micro-probe found, and what it cost. observed: empty where no kernel could be timed.  message: why, then."""

    observed: tuple[Observed, ...]
    gpu_seconds: float
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """So far. failures_in_a_row: probes that gave no numbers since the last that did."""

    probes: int = 0
    gpu_seconds: float = 0.0
    failures_in_a_row: int = 0


class ProbeStudy:
    """Asks for probes and learns from them."""

    def __init__(self, candidates: Candidates, settings: Settings) -> None:
        self.candidates, self.settings = candidates, settings
        self.knowledge = Knowledge(candidates)
        self.spent = Spent(gpu_seconds=settings.gpu_seconds_before)
        self._observe(settings.observed)
        self.trials = Trials(sampler_for(settings.sampler, self.knowledge, seed=settings.seed, risk_limit=settings.risk_limit))
        self.ignored: list[str] = []
        self._running: dict[int, Asked] = {}
        self._open: dict[int, optuna.Trial] = {}
        self._going_on: list[Asked] = []
        self._starts: list[float] = []
        self._micro_done: set[str] = set()
        self._next = 0
        self._stale = False

    # ---- from the database ----

    def remember(self, measurements: Sequence[Measurement], *, spent: bool, reasons: Mapping[str, str] = NO_REASONS) -> None:
        """Learns stored measurements, oldest first. spent: they belong to this study and count against its budget.

        reasons: why each was asked, by its id, where that is known.
        Measurements of layouts that are no candidates, or of a rung that this study does not use, are named in `ignored`.
        """
        for measurement in measurements:
            measured, layout = measurement.measured, measurement.job.layout
            row = None if layout is None else self.candidates.find(layout)
            rung = self._rung(measured.rung)
            if row is None or (rung is None and measured.rung not in WHOLE):
                self.ignored.append(measurement.id)
                continue
            if measured.failure != INTERRUPTED:
                self._learn(row, measured, rung)
                reason = reasons.get(measurement.id, "measured before")
                self.trials.said[row] = {"measurement": measurement.id, "rung": measured.rung, "reason": reason}
            if spent:
                self._pay(measured, row, whole=rung is None and measured.failure != INTERRUPTED)
        self.trials.rebuild(self.knowledge.records.values())

    # ---- asking ----

    def finished(self) -> str | None:
        """Why no more should be asked; None while measuring can pay and may be paid for."""
        spent, budget = self.spent, self.settings.budget
        if self.knowledge.timed() and not self.knowledge.pending:
            regret = self.regret()
            if regret.expected_share <= self.settings.tolerance:
                return regret.statement(self.settings.tolerance)
        if spent.probes >= budget.probes:
            return f"the budget of {counted(budget.probes, 'probe')} is spent"
        if spent.failures_in_a_row >= MOST_FAILURES:
            return f"{spent.failures_in_a_row} probes in a row failed, the last with: {self._last_failure()}"
        if not self._affordable().any():
            return f"the {self.gpu_seconds_left():.3g} GPU-seconds left do not pay for another probe"
        return None

    def ask(self) -> Asked | None:
        """The next probe; None when the budget has no room beside what is under way, or nothing is left to try."""
        if self._going_on:
            return self._start(self._going_on.pop(0))
        self._settle()
        whole_runs = sum(asked.rung == FULL for asked in self._running.values())
        self.knowledge.affordable = self._affordable()
        if self.spent.probes + whole_runs >= self.settings.budget.probes or not self.trials.sampler.has_more():
            return None
        micro = self._worthwhile_micro()
        if micro is not None:
            return self._start(micro)
        trial = self.trials.ask()
        pick = self.trials.sampler.picks[trial.number]
        choice = self._choice(pick.row, repeat=pick.repeat)
        asked = self._asked(pick.row, choice.rung, f"{pick.reason}; {choice.reason(self._full(pick.row))}", repeat=pick.repeat)
        trial.set_user_attr("reason", asked.reason)
        self.trials.said[pick.row] = {"reason": asked.reason}
        self._open[asked.number] = trial
        return self._start(asked)

    def ask_many(self) -> list[Asked]:
        """As many probes as may run side by side now."""
        asked: list[Asked] = []
        while len(self._running) < self.settings.parallel and (following := self.ask()) is not None:
            asked.append(following)
        return asked

    # ---- telling ----

    def tell(self, asked: Asked, result: Measurement | MicroResult) -> list[int]:
        """Learns a result; returns the rows that it rules out."""
        if isinstance(result, MicroResult):
            return self._tell_micro(asked, result)
        assert asked.row is not None, "only a micro-probe has no candidate"
        measured, rung = result.measured, self._rung(asked.rung)
        if measured.failure == INTERRUPTED:
            self._pay(measured, asked.row, whole=False)
            self.give_up(asked)
            return []
        del self._running[asked.number]
        self._pay(measured, asked.row, whole=rung is None)
        trial = self._open.pop(asked.number)
        ruled_out = self._learn(asked.row, measured, rung)
        if rung is not None and measured.status == "ok":
            self._after_rung(asked, trial, measured)
        else:
            self.trials.finish(trial, self.knowledge.records[asked.row], {"measurement": result.id, "rung": asked.rung})
            self._stale |= asked.repeat
        return ruled_out

    def give_up(self, asked: Asked) -> None:
        """The probe will not answer (interrupted, or its runner is gone): as if it had not been asked."""
        del self._running[asked.number]
        if asked.row is not None:
            self.knowledge.forget(asked.row)
        if asked.number in self._open:
            self.trials.close(self._open.pop(asked.number), TrialState.FAIL, {"failure": INTERRUPTED})
            self._stale = True

    def regret(self) -> Regret:
        """Expected regret of the current winner."""
        return self.knowledge.regret(seed=self.settings.seed)

    def gpu_seconds_left(self) -> float:
        """Not spent, and not what probes under way may use."""
        return self.settings.budget.gpu_seconds - self.spent.gpu_seconds - sum(one.gpu_seconds_limit for one in self._running.values())

    def optuna_study(self) -> optuna.Study:
        """The study with one trial a candidate, once nothing is under way."""
        self._settle()
        return self.trials.study

    # ---- parts ----

    def _settle(self) -> None:
        """Averages repeats into one trial a candidate; trials under way would lose their study, so not while there are any."""
        if self._stale and not self._open:
            self.trials.rebuild(self.knowledge.records.values())
            self._stale = False

    def _share_left(self) -> float:
        """GPU-seconds that one more probe may use, so that as many as may run side by side stay within the budget together."""
        return self.gpu_seconds_left() / max(self.settings.parallel - len(self._running), 1)

    def _start(self, asked: Asked) -> Asked:
        asked = replace(asked, gpu_seconds_limit=self._share_left())
        self._running[asked.number] = asked
        if asked.row is not None:
            self.knowledge.expect(asked.row)
        return asked

    def _tell_micro(self, asked: Asked, result: MicroResult) -> list[int]:
        del self._running[asked.number]
        assert asked.micro is not None, "a micro-probe says which it is"
        self._micro_done.add(asked.micro.name)
        self._observe(result.observed)
        self.spent = replace(self.spent, gpu_seconds=self.spent.gpu_seconds + result.gpu_seconds)
        return []

    def _observe(self, found: Sequence[Observed]) -> None:
        for one in found:
            self.knowledge.learn_direction(one.look.loading, *one.seen)

    def _asked(self, row: int, rung: Rung, reason: str, *, repeat: bool = False) -> Asked:
        self._next += 1
        return Asked(
            number=self._next, row=row, layout=self.candidates.batch.row(row), rung=rung.name, reason=reason,
            expected_seconds=float(np.exp(self.knowledge.beliefs().log_seconds[row])), gpu_seconds=rung.gpu_seconds, gpu_seconds_limit=0.0,
            repeat=repeat,
        )  # fmt: skip

    def _choice(self, row: int, *, repeat: bool) -> fidelity.Choice:
        full = self._full(row)
        belief = self._belief(row)
        if repeat or not self.knowledge.beliefs().measured:
            return fidelity.direct(belief, full)
        rungs = [
            Rung(name=rung.name, gpu_seconds=float(rung.gpu_seconds[row]), sd=rung.sd, shows_memory=rung.shows_memory)
            for rung in self.settings.rungs
        ]
        return fidelity.choose_rung(belief, rungs, full)

    def _belief(self, row: int) -> Belief:
        beliefs = self.knowledge.beliefs()
        rows = np.array([row])
        return Belief(
            gap=float(beliefs.log_seconds[row] - beliefs.best), sd=float(np.sqrt(beliefs.time.variance(rows)[0])),
            fits=1.0 - float(beliefs.risk(rows)[0]),
        )  # fmt: skip

    def _full(self, row: int) -> Rung:
        return Rung(name=FULL, gpu_seconds=float(self._costs()[row]), sd=0.0, shows_memory=True)

    def _costs(self) -> FloatColumn:
        """Expected GPU-seconds of a probe of every candidate, (N,)."""
        cost = self.settings.cost
        start = float(np.mean(self._starts)) if self._starts else cost.start_seconds
        return np.asarray(self.candidates.setting.num_gpus * (start + cost.steps * np.exp(self.knowledge.beliefs().log_seconds)))

    def _affordable(self) -> BoolColumn:
        return np.asarray(self._costs() <= self._share_left())

    def _worthwhile_micro(self) -> Asked | None:
        """The micro-probe that tells most a GPU-second, if that is more than a probe of the most promising candidate would.

        Both by the same measure, what knowing it is expected to gain before anything else is measured.
        """
        open_probes = [probe for probe in self.settings.micro_probes if probe.name not in self._micro_done]
        affordable = [probe for probe in open_probes if probe.gpu_seconds <= self._share_left()]
        if not affordable:
            return None
        rates = [self._micro_rate(probe) for probe in affordable]
        best = int(np.argmax(rates))
        gain = rates[best] * affordable[best].gpu_seconds
        candidate = self.knowledge.beliefs().promising(self.knowledge.untried(), 1, risk_limit=self.settings.risk_limit)
        if gain < LEAST_MICRO_GAIN or (candidate and self._whole_rate(candidate[0]) >= rates[best]):
            return None
        self._next += 1
        return Asked(
            number=self._next, row=None, layout=None, rung=MICRO, expected_seconds=None, gpu_seconds=affordable[best].gpu_seconds,
            gpu_seconds_limit=0.0, micro=affordable[best],
            reason=f"{affordable[best].name}: could change the winner, worth {gain:.2%} of a step or more, {rates[best]:.2e} a GPU-second",
        )  # fmt: skip

    def _micro_rate(self, probe: MicroProbe) -> float:
        """By its most telling look; all of them together tell at least that."""
        beliefs = self.knowledge.beliefs()
        values = [0.0]
        for look in probe.looks:
            effect, variance = beliefs.time.along(look.loading)
            values.append(fidelity.value_of_look(beliefs.log_seconds, effect, variance, look.sd))
        return max(values) / probe.gpu_seconds

    def _whole_rate(self, row: int) -> float:
        """Of a probe of this candidate, by what it tells about all."""
        beliefs = self.knowledge.beliefs()
        effect = beliefs.time.with_row(row)
        return fidelity.value_of_look(beliefs.log_seconds, effect, float(effect[row]), RUN_SD) / self._full(row).gpu_seconds

    def _rung(self, name: str) -> CheaperRung | None:
        return next((rung for rung in self.settings.rungs if rung.name == name), None)

    def _learn(self, row: int, measured: Measured, rung: CheaperRung | None) -> list[int]:
        if rung is None:
            return self.knowledge.learn(row, measured)
        return self.knowledge.learn(row, measured, rung_sd=rung.sd, log_offset=float(rung.log_offset[row]), whole=False)

    def _pay(self, measured: Measured, row: int, *, whole: bool) -> None:
        cost = measured.gpu_seconds if measured.gpu_seconds is not None else float(self._costs()[row])
        if whole and measured.step_seconds and measured.gpu_seconds is not None:
            start = measured.gpu_seconds / self.candidates.setting.num_gpus - self.settings.cost.steps * measured.step_seconds
            self._starts.append(max(start, 0.0))
        failures = self.spent.failures_in_a_row + 1 if measured.status == "failed" and measured.failure != INTERRUPTED else 0
        self.spent = Spent(probes=self.spent.probes + whole, gpu_seconds=self.spent.gpu_seconds + cost, failures_in_a_row=failures)

    def _last_failure(self) -> str:
        failed = [record for record in self.knowledge.records.values() if record.status == "failed"]
        return failed[-1].message if failed else "no message"

    def _after_rung(self, asked: Asked, trial: optuna.Trial, measured: Measured) -> None:
        """Goes on to the layout itself where that still gains more a GPU-second than the best other candidate; else gives it up."""
        assert asked.row is not None, "a rung is a look at a candidate"
        if measured.step_seconds:
            trial.report(measured.step_seconds, [rung.name for rung in self.settings.rungs].index(asked.rung))
        choice = fidelity.direct(self._belief(asked.row), self._full(asked.row))
        beliefs = self.knowledge.beliefs()
        promising = beliefs.promising(self.knowledge.untried(), 2, risk_limit=self.settings.risk_limit)
        others = [fidelity.direct(self._belief(row), self._full(row)).rate for row in promising if row != asked.row]
        if choice.rate >= max(others, default=0.0):
            following = self._asked(asked.row, choice.rung, f"after {asked.rung} it still leads: {choice.reason(choice.rung)}")
            self._open[following.number] = trial
            self._going_on.append(following)
            return
        reason = f"given up after {asked.rung}: gains {choice.rate:.2e} a GPU-second, another layout {max(others):.2e}"
        self.knowledge.close(asked.row)
        self.trials.close(trial, TrialState.PRUNED, {"reason": reason, "rung": asked.rung})
