"""A study in ask and tell: what to probe next within the budget, and what a result means for what
is left.

Knows nothing of how probes are run or stored; the same candidates, settings and results give the
same questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import optuna
from optuna.trial import TrialState

from planner.columns import BoolColumn, FloatColumn
from planner.search.screen import OOM_LIMIT
from planner.specs.layout import Layout
from planner.specs.measurement import Measured, Measurement
from planner.study import fidelity
from planner.study.candidates import Candidates
from planner.study.fidelity import Belief, MicroProbe, Observed, Rung
from planner.study.fidelity_options import MOST_FAILURES, CheaperRung, ProbeCost, Rungs
from planner.study.posterior import REALLY, RUN_SD, Knowledge
from planner.study.regret import TOLERANCE, Regret
from planner.study.samplers import Pick, sampler_for
from planner.study.trials import Trials
from planner.units import counted

FULL, MICRO = "probed", "micro"
# of a step; below it a look before the winner is run is not worth a launch; judgement
LEAST_LOOK_GAIN = 2e-3
# judgement: a look may cost hardly any GPU-seconds, but each is a launch that somebody waits for
LOOKS_A_PROBE = 4
# candidates that no rung can look at within the budget, before a question is given up
MOST_PASSED_OVER = 300
INTERRUPTED = "interrupted"
BROKEN = "environment"  # the place that runs probes cannot run any: nothing of the layout
UNABLE = "unable"  # a look that cannot be had: the pool knows before it starts anything
NO_REASONS: Mapping[str, str] = MappingProxyType({})
NO_COUNTS: Mapping[str, bool] = MappingProxyType({})
# of a step; below it timing kernels is not worth a launch, however cheap; judgement
LEAST_MICRO_GAIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be spent. probes: runs of whole layouts.  gpu_seconds: of everything, micro-probes
    and cheaper rungs included.
    """

    probes: int = 5
    gpu_seconds: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a study goes about it. parallel: probes asked at once.  tolerance: of the expected regret
    at which it stops.

    risk_limit: largest probability of running out of memory that a probe may have, while there is
    anything safer.  whole: the layouts themselves can be run; else looks at them are all there is,
    and count as probes.
    refused (N,): what the program of the probes cannot run.  observed: what kernels timed before
        say.
    gpu_seconds_before: spent by this study on timing kernels, before it was resumed.
    first: the row of number 1 on paper, measured before all others: what would be run without
        probes.
    """

    sampler: str = "cost-model"
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    tolerance: float = TOLERANCE
    parallel: int = 1
    risk_limit: float = OOM_LIMIT
    cost: ProbeCost = field(default_factory=ProbeCost)
    whole: bool = True
    rungs: tuple[CheaperRung, ...] = ()
    refused: BoolColumn | None = None
    micro_probes: tuple[MicroProbe, ...] = ()
    observed: tuple[Observed, ...] = ()
    gpu_seconds_before: float = 0.0
    first: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A probe to run. rung: `probed`, a cheaper one, or `micro` (then `micro` says which and there
    is no layout).

    num_gpus: held at once.  counts: against the budget of probes, as a run of the layout or because
        nothing more can be known of it.
    expected_seconds: of a step.  gpu_seconds: expected cost.  gpu_seconds_limit: what it may use at
        most; the runner's time limit follows.
    """

    number: int
    row: int | None
    layout: Layout | None
    rung: str
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
    """What a micro-probe found, and what it cost. observed: empty where no kernel could be timed.
    message: why, then.
    """

    observed: tuple[Observed, ...]
    gpu_seconds: float
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """So far. looks: runs of cheaper rungs that do not count as probes.  failures_in_a_row: probes
    without numbers since the last with.
    """

    probes: int = 0
    looks: int = 0
    gpu_seconds: float = 0.0
    failures_in_a_row: int = 0


class ProbeStudy:
    """Asks for probes and learns from them."""

    def __init__(self, candidates: Candidates, settings: Settings) -> None:
        self.candidates, self.settings = candidates, settings
        self.knowledge = Knowledge(candidates)
        self.knowledge.first = settings.first
        self.spent = Spent(gpu_seconds=settings.gpu_seconds_before)
        self._observe(settings.observed)
        self.trials = Trials(
            sampler_for(
                settings.sampler, self.knowledge, seed=settings.seed, risk_limit=settings.risk_limit
            )
        )
        self.ignored: list[str] = []
        self._running: dict[int, Asked] = {}
        self._open: dict[int, optuna.Trial] = {}
        if settings.refused is not None:
            self.knowledge.closed |= settings.refused
        self.rungs = Rungs(settings.rungs, settings.cost)
        self._micro_done: set[str] = set()
        self._next = 0
        self._stale = False
        self.broken: str | None = None

    # ---- from the database ----

    def remember(
        self,
        measurements: Sequence[Measurement],
        *,
        spent: bool,
        reasons: Mapping[str, str] = NO_REASONS,
        as_probes: Mapping[str, bool] = NO_COUNTS,
    ) -> None:
        """Learns stored measurements, oldest first. spent: they belong to this study and count
        against its budget.

        reasons: why each was asked, as_probes: whether it counted as one, by its id, where that is
        known. Measurements of layouts that are no candidates, or of a rung that this study does not
        use, are named in `ignored`.
        """
        nothing = []
        for measurement in measurements:
            measured, layout = measurement.measured, measurement.job.layout
            row = None if layout is None else self.candidates.find(layout)
            rung = self.rungs.named(measured.rung)
            if row is None or (rung is None and measured.rung not in REALLY):
                self.ignored.append(measurement.id)
                continue
            counts = rung is None or (
                spent and as_probes.get(measurement.id, not self._payable(row))
            )
            if measured.failure != INTERRUPTED:
                self._learn(row, measured, rung, counts=counts)
                said = {
                    "measurement": measurement.id,
                    "rung": measured.rung,
                    "reason": reasons.get(measurement.id, "measured before"),
                }
                record = self.knowledge.records.get(row)
                if record is None:
                    nothing.append((row, {**said, "message": _nothing(measured)}))
                elif rung is None or record.rung not in REALLY:
                    self.trials.said[row] = said
                self._close_where_done(row)
            if spent:
                self._pay(measured, row, rung, counts=counts and measured.failure != INTERRUPTED)
        for row, attributes in nothing:
            self.trials.note(row, attributes)
        self.trials.rebuild(self.knowledge.records.values())

    # ---- asking ----

    def finished(self) -> str | None:
        """Why no more should be asked; None while measuring can pay and may be paid for."""
        if self.broken is not None:
            return f"no probe can run here: {self.broken}"
        spent, budget = self.spent, self.settings.budget
        if (
            self.knowledge.timed()
            and not self.knowledge.pending
            and (spent.probes >= budget.probes or self._unconfirmed() is None)
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
        if self._affordable()[1].any():
            return None
        if not self.settings.whole and not self.rungs.can_look():
            return (
                "the pool is smaller than "
                f"{counted(self.candidates.setting.num_gpus, 'GPU')}, and nothing on it could "
                "stand for a layout"
            )
        return (
            f"the {max(self.gpu_seconds_left(), 0.0):.3g} GPU-seconds left do not pay for another "
            "probe"
        )

    def ask(self) -> Asked | None:
        """The next probe; None when the budget has no room beside what is under way, or nothing is
        left to try.
        """
        self._settle()
        under_way = sum(asked.counts for asked in self._running.values())
        self.knowledge.whole_affordable, self.knowledge.affordable = self._affordable()
        if self.spent.probes + under_way >= self.settings.budget.probes:
            return None
        micro = self._worthwhile_micro()
        if micro is not None:
            return self._start(micro)
        leader = self._unconfirmed()
        decided = (
            leader is not None
            and self.knowledge.regret(seed=self.settings.seed, of=leader).expected_share
            <= self.settings.tolerance
        )
        last = self.spent.probes + under_way + 1 >= self.settings.budget.probes
        if leader is not None and (decided or last or not self._look_pays(beside=leader)):
            return self._confirm(leader)
        for _ in range(MOST_PASSED_OVER):
            if not self.trials.sampler.has_more():
                return None
            trial = self.trials.ask()
            pick = self.trials.sampler.picks[trial.number]
            choice = self._choice(pick.row, repeat=pick.repeat)
            if choice is not None:
                return self._open_trial(trial, pick, choice)
            self.knowledge.close(pick.row)
            self.trials.close(
                trial,
                TrialState.PRUNED,
                {"reason": "no way of looking at it fits the pool and the budget"},
            )
        return None

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
        measured, rung = result.measured, self.rungs.named(asked.rung)
        if measured.failure == INTERRUPTED:
            self._pay(measured, asked.row, rung, counts=False)
            self.give_up(asked)
            return []
        if measured.failure == BROKEN:
            self.broken = measured.message or measured.failure
            self._pay(measured, asked.row, rung, counts=False)
            self.give_up(asked, failure=BROKEN)
            return []
        del self._running[asked.number]
        if measured.failure == UNABLE:
            return self._passed_over(asked, measured)
        self._pay(measured, asked.row, rung, counts=asked.counts)
        trial, known_before = (
            self._open.pop(asked.number),
            self.rungs.looked_at(asked.row) or asked.row in self.knowledge.records,
        )
        ruled_out = self._learn(asked.row, measured, rung, counts=asked.counts)
        record = self.knowledge.records.get(asked.row)
        if record is not None:
            self.trials.finish(trial, record, {"measurement": result.id, "rung": asked.rung})
        else:
            self.trials.close(
                trial,
                TrialState.FAIL,
                {"measurement": result.id, "rung": asked.rung, "message": _nothing(measured)},
            )
        self._stale |= known_before
        self._close_where_done(asked.row)
        return ruled_out

    def _passed_over(self, asked: Asked, measured: Measured) -> list[int]:
        """A look that the pool cannot make: as if it had not been asked, but not asked again."""
        assert asked.row is not None, "a look is at a candidate"
        self.knowledge.forget(asked.row)
        self.rungs.pass_over(asked.row, asked.rung)
        self.trials.close(
            self._open.pop(asked.number),
            TrialState.PRUNED,
            {"rung": asked.rung, "reason": measured.message or UNABLE},
        )
        self._close_where_done(asked.row)
        return []

    def _close_where_done(self, row: int) -> None:
        """Nothing more can be known of a candidate that cannot be run, once every rung that can
        look at it has.
        """
        left = self.settings.budget.gpu_seconds - self.spent.gpu_seconds
        if not (self.settings.whole and self._costs()[row] <= left) and not self._rungs_left(row):
            self.knowledge.close(row)

    def give_up(self, asked: Asked, *, failure: str = INTERRUPTED) -> None:
        """The probe will not answer (interrupted, or its runner is gone): as if it had not been
        asked.
        """
        del self._running[asked.number]
        if asked.row is not None:
            self.knowledge.forget(asked.row)
        if asked.number in self._open:
            self.trials.close(self._open.pop(asked.number), TrialState.FAIL, {"failure": failure})
            self._stale = True

    def regret(self) -> Regret:
        """Expected regret of the current winner."""
        return self.knowledge.regret(seed=self.settings.seed)

    def gpu_seconds_left(self) -> float:
        """Not spent, and not what probes under way may use."""
        return (
            self.settings.budget.gpu_seconds
            - self.spent.gpu_seconds
            - sum(one.gpu_seconds_limit for one in self._running.values())
        )

    def optuna_study(self) -> optuna.Study:
        """The study with one trial a candidate, once nothing is under way."""
        self._settle()
        return self.trials.study

    # ---- parts ----

    def _settle(self) -> None:
        """Averages repeats into one trial a candidate; trials under way would lose their study, so
        not while there are any.
        """
        if self._stale and not self._open:
            self.trials.rebuild(self.knowledge.records.values())
            self._stale = False

    def _share_left(self) -> float:
        """GPU-seconds that one more probe may use, so that as many as may run side by side stay
        within the budget together.
        """
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

    def _asked(
        self, row: int, choice: fidelity.Choice, reason: str, *, repeat: bool = False
    ) -> Asked:
        self._next += 1
        rung = choice.rung
        return Asked(
            number=self._next,
            row=row,
            layout=self.candidates.batch.row(row),
            rung=rung.name,
            num_gpus=rung.num_gpus,
            reason=reason,
            counts=rung.name == FULL or choice.goes_on is None,
            expected_seconds=float(np.exp(self.knowledge.beliefs().log_seconds[row])),
            gpu_seconds=rung.gpu_seconds,
            gpu_seconds_limit=0.0,
            repeat=repeat,
        )

    def _open_trial(self, trial: optuna.Trial, pick: Pick, choice: fidelity.Choice) -> Asked:
        asked = self._asked(
            pick.row,
            choice,
            f"{pick.reason}; {choice.reason(self._full(pick.row))}",
            repeat=pick.repeat,
        )
        trial.set_user_attr("reason", asked.reason)
        self.trials.said[pick.row] = {"reason": asked.reason}
        self._open[asked.number] = trial
        return self._start(asked)

    def _unconfirmed(self) -> int | None:
        """The leader, where it has only been looked at and can be run."""
        winner = self.knowledge.beliefs().leader
        record = self.knowledge.records.get(winner)
        looked = (
            record is not None
            and record.rung not in REALLY
            and winner not in self.knowledge.pending
        )
        return winner if looked and self._payable(winner) else None

    def _look_pays(self, *, beside: int) -> bool:
        """Whether a look at the most promising candidate does, before the winner `beside` is run:
        it must leave enough for that.
        """
        beliefs = self.knowledge.beliefs()
        free = self.knowledge.untried()
        free[beside] = False
        rows = beliefs.promising(free, 1, risk_limit=self.settings.risk_limit)
        if not rows or float(beliefs.improvement(np.array(rows))[0]) < LEAST_LOOK_GAIN:
            return False
        choice = self._choice(rows[0], repeat=False)
        if choice is None or choice.rung.name == FULL:
            return False
        return choice.rung.gpu_seconds + self._full(beside).gpu_seconds <= self._share_left()

    def _confirm(self, row: int) -> Asked:
        choice = fidelity.direct(self._belief(row), self._full(row))
        pick = Pick(
            row=row, reason="it leads by what a look said, and has not run itself", repeat=True
        )
        return self._open_trial(self.trials.ask(pick), pick, choice)

    def _choice(self, row: int, *, repeat: bool) -> fidelity.Choice | None:
        """The rung that pays best; None where no way of looking at the candidate can be paid
        for.
        """
        full, belief, payable = self._full(row), self._belief(row), self._payable(row)
        if payable and (repeat or not self.knowledge.beliefs().measured):
            return fidelity.direct(belief, full)
        if repeat:
            return None

        def judged(rungs: Sequence[Rung]) -> fidelity.Choice:
            return (
                fidelity.choose_rung(belief, rungs, full)
                if payable
                else fidelity.look_alone(belief, rungs)
            )

        best = fidelity.direct(belief, full) if payable else None
        for rung in self._rungs_left(row):
            if best is not None and judged([self.rungs.ideal(rung, row)]).rate <= best.rate:
                continue
            looks = [
                look
                for look in self.rungs.looks(rung, row)
                if look.gpu_seconds <= self._share_left()
            ]
            found = judged(looks) if looks else None
            if found is not None and (best is None or found.rate > best.rate):
                best = found
        return best

    def _rungs_left(self, row: int) -> list[CheaperRung]:
        """The cheaper rungs that can still look at this candidate, while the study may look at
        anything.
        """
        spent = (
            self.spent.looks + self._looks_under_way()
            >= LOOKS_A_PROBE * self.settings.budget.probes
        )
        return [] if spent else self.rungs.left(row)

    def _open_looks(self, row: int) -> list[Rung]:
        return [look for rung in self._rungs_left(row) for look in self.rungs.looks(rung, row)]

    def _looks_under_way(self) -> int:
        return sum(asked.row is not None and not asked.counts for asked in self._running.values())

    def _belief(self, row: int) -> Belief:
        beliefs = self.knowledge.beliefs()
        rows = np.array([row])
        return Belief(
            gap=float(beliefs.log_seconds[row] - beliefs.best),
            sd=float(np.sqrt(beliefs.time.variance(rows)[0])),
            fits=1.0 - float(beliefs.risk(rows)[0]),
        )

    def _full(self, row: int) -> Rung:
        num_gpus = self.candidates.setting.num_gpus
        return Rung(
            name=FULL,
            num_gpus=num_gpus,
            gpu_seconds=float(self._costs()[row]),
            sd=0.0,
            shows_memory=True,
        )

    def _payable(self, row: int) -> bool:
        """Whether the layout itself can be run within what is left."""
        return self.settings.whole and bool(self._costs()[row] <= self._share_left())

    def _seconds(self) -> FloatColumn:
        """Expected seconds of a run of every candidate, (N,)."""
        return np.asarray(
            self.rungs.start_seconds()
            + self.settings.cost.steps * np.exp(self.knowledge.beliefs().log_seconds)
        )

    def _costs(self) -> FloatColumn:
        """Expected GPU-seconds of a probe of every candidate, (N,)."""
        return self.candidates.setting.num_gpus * self._seconds()

    def _affordable(self) -> tuple[BoolColumn, BoolColumn]:
        """What can be paid for, (N,) each: a run of the layout itself; that or, as far as can be
        told in advance, a look at it.
        """
        share = self._share_left()
        whole = np.asarray(self._costs() <= share) & self.settings.whole
        return whole, np.logical_or.reduce([whole, *self.rungs.affordable(share)])

    def _worthwhile_micro(self) -> Asked | None:
        """The micro-probe that tells most a GPU-second, if that is more than a probe of the most
        promising candidate would.

        Both by the same measure, what knowing it is expected to gain before anything else is
        measured.
        """
        open_probes = [
            probe for probe in self.settings.micro_probes if probe.name not in self._micro_done
        ]
        affordable = [probe for probe in open_probes if probe.gpu_seconds <= self._share_left()]
        if not affordable:
            return None
        rates = [self._micro_rate(probe) for probe in affordable]
        best = int(np.argmax(rates))
        gain = rates[best] * affordable[best].gpu_seconds
        candidate = self.knowledge.beliefs().promising(
            self.knowledge.untried(), 1, risk_limit=self.settings.risk_limit
        )
        if gain < LEAST_MICRO_GAIN or (candidate and self._whole_rate(candidate[0]) >= rates[best]):
            return None
        self._next += 1
        return Asked(
            number=self._next,
            row=None,
            layout=None,
            rung=MICRO,
            num_gpus=affordable[best].num_gpus,
            counts=False,
            expected_seconds=None,
            gpu_seconds=affordable[best].gpu_seconds,
            gpu_seconds_limit=0.0,
            micro=affordable[best],
            reason=f"{affordable[best].name}: could change the winner, worth {gain:.2%} "
            "of a step or "
            f"more, {rates[best]:.2e} a GPU-second",
        )

    def _micro_rate(self, probe: MicroProbe) -> float:
        """By its most telling look; all of them together tell at least that."""
        beliefs = self.knowledge.beliefs()
        values = [0.0]
        for look in probe.looks:
            effect, variance = beliefs.time.along(look.loading)
            values.append(fidelity.value_of_look(beliefs.log_seconds, effect, variance, look.sd))
        return max(values) / probe.gpu_seconds

    def _whole_rate(self, row: int) -> float:
        """Of a probe of this candidate, by what it tells about all; of the cheapest look at it
        where it cannot be run.
        """
        beliefs = self.knowledge.beliefs()
        effect = beliefs.time.with_row(row)
        rungs = [self._full(row)] if self._payable(row) else self._open_looks(row)
        rates = [
            fidelity.value_of_look(
                beliefs.log_seconds, effect, float(effect[row]), RUN_SD + rung.sd
            )
            / rung.gpu_seconds
            for rung in rungs
        ]
        return max(rates, default=0.0)

    def _learn(
        self, row: int, measured: Measured, rung: CheaperRung | None, *, counts: bool
    ) -> list[int]:
        if rung is None:
            return self.knowledge.learn(row, measured)
        self.rungs.learn(row, rung.name, failed=measured.status == "failed")
        return self.knowledge.learn(row, measured, rung_sd=rung.sd(row), counts=counts)

    def _pay(self, measured: Measured, row: int, rung: CheaperRung | None, *, counts: bool) -> None:
        """counts: against the budget of probes."""
        cost = (
            measured.gpu_seconds if measured.gpu_seconds is not None else float(self._costs()[row])
        )
        interrupted = measured.failure == INTERRUPTED
        if measured.gpu_seconds is not None and not interrupted and measured.step_seconds:
            num_gpus = self.candidates.setting.num_gpus
            self.rungs.learn_start(
                measured, measured.gpu_seconds, num_gpus=num_gpus, look=rung is not None
            )
        failures = self.spent.failures_in_a_row
        if counts:
            failures = failures + 1 if measured.status == "failed" else 0
        looks = self.spent.looks + (
            rung is not None and not counts and not interrupted and self.broken is None
        )
        self.spent = Spent(
            probes=self.spent.probes + counts,
            looks=looks,
            gpu_seconds=self.spent.gpu_seconds + cost,
            failures_in_a_row=failures,
        )

    def _last_failure(self) -> str:
        failed = [record for record in self.knowledge.records.values() if record.status == "failed"]
        return failed[-1].message if failed else "no message"


def _nothing(measured: Measured) -> str:
    """Why a look or a run left nothing to know of its layout."""
    return (
        f"{measured.failure or 'crash'}: {measured.message or ''}"
        if measured.status == "failed"
        else "it gave no step time"
    )
