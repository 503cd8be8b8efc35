"""Knowledge of a study: candidates, their measurements, and the posterior of the rest.

Samplers read it; only the study writes it.
Letters: N candidates, M rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.calibration.correlated import MEMORY, TIME, CorrelatedErrors
from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.search.fit import OOM_LIMIT
from planner.specs.measurement import BLAMELESS, Measured
from planner.study import normal, pruning
from planner.study.candidates import Candidates
from planner.study.regret import ExpectedRegret, expected_regret
from planner.study.surrogate import ErrorPosterior, Observation, condition

# judgement: one run against the next of the same layout on the same machines (clocks, placement);
# the spread of its steps comes on top
RUN_SD = 0.01
FULL_FIDELITY = ("probed", "published")  # the layout itself ran, in full
EMULATED = "emulated"  # single ranks of it ran
# error of an emulated rank's step besides run-to-run noise: its communication is predicted;
# judgement
EMULATED_SD = 0.06
MEMORY_RUN_SD = 0.002
TRUSTED_SD = 0.1  # judgement: an emulated result with a larger error makes no winner
# Judgements. Deviations of its prediction beyond which one run is not believed alone; share by
# which a run is slower than another of the same layout where something disturbed it.
FAR, DISTURBED = 4.0, 0.15
MEDIAN_VARIANCE = np.pi / 2.0  # of the median of n normal values, over sd^2 / n
RIVALS = 128  # candidates in the regret: those with the largest expected improvement
# rows whose bound is computed together; rows of them that are evaluated first
CHUNK, FIRST = 8192, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record of one measured candidate.

    log_seconds: of its fastest run. Disturbances (others on the network, clocks, a straggler) only
        slow a run, so a further run never raises it.
    variance: of all its runs together.
    mean_log_seconds: over its runs, weighted by their precision.
    runs: number of probes that gave a time.
    margin: measured (or attempted) over usable memory, less 1; None when unknown.
    fidelity: `probed` if the layout itself ran, else `emulated`.
    """

    row: int
    status: str
    log_seconds: float | None = None
    variance: float | None = None
    runs: int = 0
    margin: float | None = None
    message: str = ""
    fidelity: str = FULL_FIDELITY[0]
    mean_log_seconds: float | None = None

    @property
    def measured(self) -> bool:
        """Whether the layout itself ran and gave a time."""
        return self.fidelity in FULL_FIDELITY and self.log_seconds is not None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step in its fastest run."""
        return None if self.log_seconds is None else float(np.exp(self.log_seconds))

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean seconds of a step over its runs."""
        mean = self.log_seconds if self.mean_log_seconds is None else self.mean_log_seconds
        return None if mean is None else float(np.exp(mean))

    def with_run(self, log_seconds: float, variance: float) -> "Record":
        """The record with one more run before it: the fastest counts, and the mean of all."""
        assert self.log_seconds is not None, "a layout that ran has its time"
        assert self.variance is not None, "a time has a variance"
        precision = 1.0 / self.variance + 1.0 / variance
        mean = self.log_seconds if self.mean_log_seconds is None else self.mean_log_seconds
        return replace(
            self,
            log_seconds=min(log_seconds, self.log_seconds),
            variance=1.0 / precision,
            runs=1 + self.runs,
            mean_log_seconds=(mean / self.variance + log_seconds / variance) / precision,
        )


def noise_variance(measured: Measured) -> float:
    """Variance of a measured log step time around the layout's own.

    The sum of run-to-run noise, the noise of the median of its steps, and the error of emulation.
    """
    fidelity_sd = 0.0 if measured.rung in FULL_FIDELITY else EMULATED_SD
    variance = RUN_SD**2 + fidelity_sd**2
    if measured.step_seconds and measured.step_seconds_sd is not None:
        steps = max(measured.steps or 1, 1)
        variance += (
            MEDIAN_VARIANCE * (measured.step_seconds_sd / measured.step_seconds) ** 2 / steps
        )
    return float(variance)


def trusted(record: Record) -> bool:
    """Whether an emulated result is accurate enough to make a winner."""
    return record.variance is not None and record.variance <= TRUSTED_SD**2


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedResult:
    """Measurement of a candidate by emulated ranks.

    log_seconds, variance: of the layout's own step.
    memory: as an observation of the memory model's error; None if none was measured.
    """

    log_seconds: float
    variance: float
    memory: Observation | None
    margin: float | None


class EmulatedResults:
    """Results of candidates that did not run themselves, the most accurate of each."""

    def __init__(self) -> None:
        self.results: dict[int, EmulatedResult] = {}
        self.squared_residuals: list[float] = []

    def add(self, row: int, result: EmulatedResult) -> None:
        """Takes in one; repeats share the same error."""
        if row not in self.results or self.results[row].variance > result.variance:
            self.results[row] = result

    def outrun(self, row: int, log_seconds: float, variance: float) -> None:
        """The layout itself ran: its result goes, and shows how far it was off."""
        result = self.results.pop(row, None)
        if result is not None:
            self.note(result.log_seconds - log_seconds, result.variance + variance)

    def note(self, difference: float, variance: float) -> None:
        self.squared_residuals.append(difference**2 / variance)

    def variance_inflation(self) -> float:
        """Factor on the variances of emulated results, at least 1.

        The mean squared residual of those whose layout ran later, over their variance. One
        accurate result counts in advance.
        """
        return max((1.0 + sum(self.squared_residuals)) / (1.0 + len(self.squared_residuals)), 1.0)

    def records(self) -> Iterator[Record]:
        """Each result as its candidate's record."""
        inflation = self.variance_inflation()
        for row, result in self.results.items():
            yield Record(
                row=row,
                status="ok",
                log_seconds=result.log_seconds,
                variance=result.variance * inflation,
                runs=1,
                margin=result.margin,
                fidelity=EMULATED,
            )

    def times(self, prior: FloatColumn) -> Iterator[Observation]:
        """As observations of the time model's error; prior (N,): log seconds that it predicts."""
        inflation = self.variance_inflation()
        for row, one in self.results.items():
            off = one.log_seconds - float(prior[row])
            yield Observation(row=row, value=off, variance=one.variance * inflation)

    def memories(self) -> Iterator[Observation]:
        return (one.memory for one in self.results.values() if one.memory is not None)


class Knowledge:
    """The mutable state of a study: it follows from its candidates and the calls made, in order."""

    def __init__(self, candidates: Candidates) -> None:
        prior = candidates.prior
        count = len(candidates)
        self.candidates = candidates
        alike, none = candidates.groups, np.zeros((count, 0))
        self.time = CorrelatedErrors(sd=prior.sd, factor=prior.factor, groups=alike, weights=TIME)
        self.memory = CorrelatedErrors(
            sd=prior.memory_sd, factor=none, groups=alike, weights=MEMORY
        )
        self.log_share = -prior.memory_sd * normal.upper_quantile(prior.oom_probability)
        self.records: dict[int, Record] = {}
        self.times: list[Observation] = []
        self.memories: list[Observation] = []
        self.emulated = EmulatedResults()
        self.excluded: dict[int, str] = {}
        self.fits: BoolColumn = np.zeros(count, dtype=np.bool_)
        self.barred: BoolColumn = np.zeros(count, dtype=np.bool_)
        self.affordable: BoolColumn = np.ones(count, dtype=np.bool_)
        self.whole_affordable: BoolColumn = self.affordable
        self.refused: BoolColumn = np.zeros(count, dtype=np.bool_)
        self.pending: list[int] = []
        self.first: int | None = None  # to be measured before all others: the answer without probes
        self.first_measures = ""  # what that measures for the first time, as a clause
        self._posterior: StudyPosterior | None = None

    def expect(self, row: int) -> None:
        """An evaluation of this candidate is under way."""
        self.pending.append(row)
        self._touch()

    def forget(self, row: int) -> None:
        """The evaluation under way gave nothing: as if it had not been proposed."""
        if row in self.pending:
            self.pending.remove(row)
        self._touch()

    def observe(self, row: int, measured: Measured, *, counts: bool = True) -> list[int]:
        """Updates with one result; returns the rows that it rules out.

        counts: whether a failure is final, because the layout itself cannot be run.
        """
        self.forget(row)
        full = measured.rung in FULL_FIDELITY
        if measured.status == "oom":
            return self._ran_out(row, measured)
        if measured.status != "ok":
            return self._failed(row, measured, excludes=full) if full or counts else []
        residual = self.candidates.memory_residual(row, measured)
        if not full:
            self._observe_emulated(row, measured, residual)
            return []
        if residual is not None:
            self.memories.append(Observation(row=row, value=residual, variance=MEMORY_RUN_SD**2))
        if measured.step_seconds:
            self._observe_run(row, measured, noise_variance(measured), residual)
        size = self.candidates.size.global_batch_size
        self.fits |= pruning.at_most(self.candidates.batch, row, size).mask
        return []

    def observe_direction(self, loading: Sequence[float], value: float, variance: float) -> None:
        """Updates with a micro-probe: log of measured over predicted along shared directions.

        loading (Q,): weights of the columns of the prior's factor.
        """
        along = tuple(loading)
        self.times.append(Observation(row=None, value=value, variance=variance, loading=along))
        self._touch()

    def _observe_run(
        self, row: int, measured: Measured, variance: float, residual: float | None
    ) -> None:
        value = float(np.log(measured.step_seconds or 1.0))
        off = value - float(self.candidates.prior.log_seconds[row])
        self.times.append(Observation(row=row, value=off, variance=variance))
        self.emulated.outrun(row, value, variance)
        known = self.records.get(row)
        record = Record(row=row, status="ok", log_seconds=value, variance=variance, runs=1)
        if known is not None and known.measured:
            record = known.with_run(value, variance)
        margin = self._margin_of(row, residual)
        self.records[row] = replace(record, margin=margin, fidelity=measured.rung)
        self._update_emulated()

    def _observe_emulated(self, row: int, measured: Measured, residual: float | None) -> None:
        noise = MEMORY_RUN_SD**2
        memory = None if residual is None else Observation(row=row, value=residual, variance=noise)
        before = self.records.get(row)
        if not measured.step_seconds:
            self.memories += [memory] if memory is not None and before is None else []
            self._touch()
            return
        value, variance = float(np.log(measured.step_seconds)), noise_variance(measured)
        if before is not None and before.fidelity in FULL_FIDELITY:
            if before.log_seconds is not None and before.variance is not None:
                self.emulated.note(value - before.log_seconds, variance + before.variance)
                self._update_emulated()
            return
        result = EmulatedResult(
            log_seconds=value,
            variance=variance,
            memory=memory,
            margin=self._margin_of(row, residual),
        )
        self.emulated.add(row, result)
        self._update_emulated()

    def _update_emulated(self) -> None:
        """Sets the records of candidates that have only emulated results."""
        self.records.update((one.row, one) for one in self.emulated.records())
        self._touch()

    def _margin_of(self, row: int, residual: float | None) -> float | None:
        return None if residual is None else float(np.expm1(self.log_share[row] + residual))

    def odd(self) -> dict[int, float]:
        """The row whose only run took FAR deviations more than predicted, with that factor.

        Empty where a second layout is as slow: a machine is slow for all. One alone was disturbed,
        or the model misses something about it; it says nothing of others, and is to be run again.
        """
        prior = self.candidates.prior
        slow: dict[int, float] = {}
        for one in self.times:
            if one.row is not None and self.records[one.row].runs == 1:
                spread = prior.sd[one.row] ** 2 + (prior.factor[one.row] ** 2).sum() + one.variance
                if one.value > FAR * np.sqrt(spread):
                    slow[one.row] = float(np.exp(one.value))
        return slow if len(slow) == 1 else {}

    def time_observations(self) -> list[Observation]:
        """All observations of times: runs, directions, emulated results."""
        prior = self.candidates.prior.log_seconds
        return [*_believed(self.times, self.odd()), *self.emulated.times(prior)]

    def memory_observations(self) -> list[Observation]:
        """All observations of memory: runs and emulated results."""
        return [*self.memories, *self.emulated.memories()]

    def _ran_out(self, row: int, measured: Measured) -> list[int]:
        margin = _excess(measured, self.candidates.size.usable_bytes)
        self.emulated.results.pop(row, None)
        posterior = condition(self.memory, self.memory_observations())
        beyond = float(np.log1p(margin) - self.log_share[row])
        self.memories.append(_censored(posterior, row, beyond))
        self.records[row] = Record(
            row=row,
            status="oom",
            margin=margin,
            message=measured.message or "out of memory",
            fidelity=measured.rung,
        )
        order = pruning.at_least(self.candidates.batch, row, self.candidates.size.global_batch_size)
        larger = map(int, np.flatnonzero(order.mask & ~self.barred))
        ruled_out = [other for other in larger if other not in self.records]
        for other in ruled_out:
            why = order.reason(self.candidates.batch, other)
            self._exclude(other, f"candidate {row} ran out of memory, and here {why}")
        self._exclude(row, "ran out of memory")
        return ruled_out

    def _failed(self, row: int, measured: Measured, *, excludes: bool) -> list[int]:
        """Excludes the candidate if the layout itself failed.

        An emulation that failed, or a failure of the machine, does not exclude it and
        does not replace an earlier result.
        """
        kind = measured.failure or "crash"
        excludes = excludes and kind not in BLAMELESS
        if not excludes and row in self.records:
            return []
        self.emulated.results.pop(row, None)
        self.records[row] = Record(
            row=row,
            status="failed",
            message=f"{kind}: {measured.message or ''}",
            fidelity=measured.rung,
        )
        if excludes:
            self._exclude(row, f"failed: {kind}")
        self._touch()
        return []

    def _exclude(self, row: int, reason: str) -> None:
        self.excluded[row] = reason
        self.barred[row] = True
        self._touch()

    def _touch(self) -> None:
        self._posterior = None

    def posterior(self) -> "StudyPosterior":
        """The posterior now; evaluations under way are assumed to give what is expected."""
        if self._posterior is None:
            self._posterior = StudyPosterior.of(self)
        return self._posterior

    def timed(self) -> list[Record]:
        """Candidates timed by a believed run or emulated result, fastest first."""
        odd = self.odd()
        found = [
            one
            for one in self.records.values()
            if one.log_seconds is not None
            and (one.fidelity in FULL_FIDELITY or trusted(one))
            and one.row not in odd
        ]
        return sorted(found, key=lambda record: record.log_seconds or 0.0)

    def believed(self, row: int) -> Record | None:
        """The record of a layout that ran itself and whose time is believed."""
        record = self.records.get(row)
        return record if record is not None and record.measured and row not in self.odd() else None

    def untried(self) -> BoolColumn:
        """Candidates that have not run themselves and have an affordable evaluation, (N,)."""
        free = self.affordable & ~self.barred & ~self.refused
        known = [
            row
            for row, record in self.records.items()
            if record.fidelity in FULL_FIDELITY or record.status != "ok"
        ]
        free[[*known, *self.pending]] = False
        return free

    def repeatable(self) -> list[Record]:
        """Candidates that ran and are affordable once more, fastest first.

        The fastest of all is left out: no further run changes that it is the fastest.
        """
        ran = [one for one in self.timed() if one.measured]
        return [
            one for one in ran[1:] if self.whole_affordable[one.row] and one.row not in self.pending
        ]


def _believed(times: Sequence[Observation], odd: Mapping[int, float]) -> Iterator[Observation]:
    """Observations of runs and directions, wide where they are not believed."""
    fastest = dict[int, float]()
    for one in times:
        if one.row is not None:
            fastest[one.row] = min(one.value, fastest.get(one.row, np.inf))
    for one in times:
        off = 0.0 if one.row is None else one.value - fastest[one.row]
        if one.row in odd:
            off = one.value
        wide = one.row in odd or off > DISTURBED
        yield replace(one, variance=one.variance + off**2) if wide else one


def _excess(measured: Measured, usable_bytes: float) -> float:
    """Share of the usable memory by which a run exceeded it, at least 0.

    From the bytes allocated and requested, if the report names them.
    """
    extra = measured.model_extra or {}
    asked = (extra.get("attempted_bytes") or 0.0) + (
        extra.get("allocated_bytes") or measured.peak_allocated_bytes or 0.0
    )
    return max(float(asked) / usable_bytes - 1.0, 0.0)


def _censored(posterior: ErrorPosterior, row: int, least: float) -> Observation:
    """The normal observation with the same effect as 'the error of this row exceeds `least`'.

    It matches the first two moments. With m, v the posterior before it, a = (t - m) / sqrt(v)
    and h = phi(a) / Q(a): given > t the mean is m + sqrt(v) h, the variance v (1 - h (h - a)).
    """
    sd = float(np.sqrt(posterior.variance(np.array([row]))[0]))
    mean = float(posterior.mean[row])
    a = np.array((least - mean) / sd)
    hazard = float(normal.density(a) / np.maximum(normal.upper_tail(a), 1e-300))
    shrunk = np.clip(1.0 - hazard * (hazard - float(a)), 1e-3, 1.0 - 1e-6)
    noise = sd**2 * shrunk / (1.0 - shrunk)
    value = mean + sd * hazard
    observed = (value * (1.0 / sd**2 + 1.0 / noise) - mean / sd**2) * noise
    return Observation(row=row, value=float(observed), variance=float(noise))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPosterior:
    """The posterior of step time and memory of every candidate at one point of the study.

    log_seconds (N,): expected log step seconds, by measurements and model together.
    winner: the answer so far, the fastest layout that ran itself; the leader if none has.
    leader: the fastest expected of all measured ones, at any fidelity; before the first, the
        fastest expected that fits. Proposals are compared with it.
    best: expected log seconds of the leader, or of a faster candidate under way.
    measured: whether anything was measured.
    """

    knowledge: Knowledge
    time: ErrorPosterior
    memory: ErrorPosterior
    log_seconds: FloatColumn
    winner: int
    leader: int
    best: float
    measured: bool
    known_promising: dict[tuple[bytes, int, float], list[int]] = field(
        default_factory=dict, compare=False, repr=False
    )
    known_regrets: dict[int, ExpectedRegret] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, knowledge: Knowledge) -> "StudyPosterior":
        prior = knowledge.candidates.prior.log_seconds
        times = knowledge.time_observations()
        time = condition(knowledge.time, times)
        if knowledge.pending:
            believed = [
                Observation(row=row, value=float(time.mean[row]), variance=RUN_SD**2)
                for row in knowledge.pending
            ]
            time = condition(knowledge.time, [*times, *believed])
        memory = condition(knowledge.memory, knowledge.memory_observations())
        log_seconds = prior + time.mean
        timed = knowledge.timed()
        rows = [record.row for record in timed if not knowledge.barred[record.row]]
        leader = (
            min(rows, key=lambda row: float(log_seconds[row]))
            if rows
            else _first_that_fits(knowledge, memory, log_seconds)
        )
        ran = [record.row for record in timed if record.measured and record.row in rows]
        best = min(float(log_seconds[row]) for row in (leader, *knowledge.pending))
        return cls(
            knowledge=knowledge,
            time=time,
            memory=memory,
            log_seconds=log_seconds,
            winner=ran[0] if ran else leader,
            leader=leader,
            best=best,
            measured=bool(rows),
        )

    def expected_seconds(self, row: int) -> float:
        """Seconds of a step: as measured if that is believed, else from the posterior."""
        record = self.knowledge.believed(row)
        own = None if record is None else record.log_seconds
        return float(np.exp(self.log_seconds[row] if own is None else own))

    def deviation(self, row: int) -> float:
        """Standard deviation of the logarithm of `expected_seconds`."""
        record = self.knowledge.believed(row)
        own = None if record is None else record.variance
        return float(np.sqrt(self.time.variance(np.array([row]))[0] if own is None else own))

    def risk(self, rows: IntColumn) -> FloatColumn:
        """P(device memory > usable), (M,); 0 for what ran and what needs no more than that."""
        return np.where(self.knowledge.fits[rows], 0.0, _risk(self.knowledge, self.memory, rows))

    def improvement(self, rows: IntColumn) -> FloatColumn:
        """Expected improvement over the best in log seconds, about a share of the step, (M,).

        On condition that the layout fits.
        """
        return normal.expected_excess(
            self.log_seconds[rows] - self.best, np.sqrt(self.time.variance(rows))
        )

    def regret(self, *, seed: int = 0, of: int | None = None) -> ExpectedRegret:
        """Expected regret of the winner, or of row `of`, against all that are not ruled out.

        A candidate that ran enters with its own time and noise, not with its posterior.
        """
        compared = self.winner if of is None else of
        if compared not in self.known_regrets:
            rivals = self.promising(~self.knowledge.barred, RIVALS)
            rows = np.array([compared, *(row for row in rivals if row != compared)])
            mean, covariance = self.log_seconds[rows], self.time.covariance(rows)
            for index, row in enumerate(rows):
                record = self.knowledge.believed(int(row))
                if record is not None:
                    mean[index], covariance[index], covariance[:, index] = (
                        record.log_seconds,
                        0.0,
                        0.0,
                    )
                    covariance[index, index] = record.variance
            self.known_regrets[compared] = expected_regret(
                mean, covariance, 1.0 - self.risk(rows), 0, seed=seed
            )
        return self.known_regrets[compared]

    def promising(self, allowed: BoolColumn, count: int, *, risk_limit: float = 1.0) -> list[int]:
        """The allowed rows with the largest expected improvement x P(fits), best first.

        At most `count` of them, none with a risk of running out of memory above risk_limit.
        """
        key = (allowed.tobytes(), count, risk_limit)
        if key not in self.known_promising:
            self.known_promising[key] = self._promising(allowed, count, risk_limit)
        return self.known_promising[key]

    def _promising(self, allowed: BoolColumn, count: int, risk_limit: float) -> list[int]:
        """Exact, by two upper bounds of the value.

        Rows are visited in the order of a loose bound (variance before any observation, certain to
        fit) until it decides. Of these, only rows whose tighter bound (variance after a few
        observations) is high enough are evaluated.
        """
        rows = np.flatnonzero(allowed)
        if not len(rows):
            return []
        bound = normal.expected_excess(
            self.log_seconds[rows] - self.best, np.sqrt(self.time.widest()[rows])
        )
        chosen, values = np.zeros(0, dtype=np.int64), np.zeros(0)
        for order in _descending(bound):
            part = rows[order]
            ceiling = normal.expected_excess(
                self.log_seconds[part] - self.best, np.sqrt(self.time.at_most(part))
            )
            first = np.argsort(-ceiling, kind="stable")[:FIRST]
            chosen, values = self._best_of(chosen, values, part[first], count, risk_limit)
            ceiling[first] = -1.0
            least = values[-1] if len(values) == count else -0.5
            chosen, values = self._best_of(chosen, values, part[ceiling > least], count, risk_limit)
            if len(values) == count and bound[order].min() <= values[-1]:
                break
        return [int(row) for row in chosen]

    def _best_of(
        self, chosen: IntColumn, values: FloatColumn, more: IntColumn, count: int, risk_limit: float
    ) -> tuple[IntColumn, FloatColumn]:
        """The best `count` of the chosen rows and of more rows within the risk, with values."""
        risk = self.risk(more)
        value = np.where(risk <= risk_limit, self.improvement(more) * (1.0 - risk), -1.0)
        chosen, values = (
            np.concatenate([chosen, more[value >= 0]]),
            np.concatenate([values, value[value >= 0]]),
        )
        best = np.lexsort((chosen, -values))[:count]
        return chosen[best], values[best]


def _descending(values: FloatColumn) -> Iterator[IntColumn]:
    """Indices of the values in chunks, largest values first.

    Everything is sorted only if a second chunk is asked for.
    """
    if len(values) > CHUNK:
        first = np.argpartition(-values, CHUNK)
        yield first[:CHUNK]
        rest = first[CHUNK:]
        ordered = rest[np.argsort(-values[rest], kind="stable")]
    else:
        ordered = np.arange(len(values))
    for start in range(0, len(ordered), CHUNK):
        yield ordered[start : start + CHUNK]


def _risk(knowledge: Knowledge, memory: ErrorPosterior, rows: IntColumn) -> FloatColumn:
    distance = -(knowledge.log_share[rows] + memory.mean[rows])
    return normal.upper_tail(distance / np.sqrt(memory.variance(rows)))


def _first_that_fits(knowledge: Knowledge, memory: ErrorPosterior, log_seconds: FloatColumn) -> int:
    """The fastest expected candidate that fits; the likeliest to fit if none does."""
    rows = np.flatnonzero(~knowledge.barred)
    rows = rows if len(rows) else np.arange(len(log_seconds))
    risk = _risk(knowledge, memory, rows)
    safe = rows[risk <= OOM_LIMIT]
    return int(safe[np.argmin(log_seconds[safe])]) if len(safe) else int(rows[np.argmin(risk)])
