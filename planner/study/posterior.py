"""What a study knows: candidates, what was measured of them, what that says about the rest.
Samplers read it, the loop writes it.

Letters: N candidates, M rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.calibration.correlated import MEMORY, TIME, Field
from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.search.screen import OOM_LIMIT
from planner.specs.measurement import Measured
from planner.study import normal, pruning
from planner.study.candidates import MEMORY_KINDS, Candidates
from planner.study.regret import Regret, expected_regret
from planner.study.surrogate import Posterior, Seen, condition

# Judgement: one run against the next of the same layout on the same machines (clocks, placement);
#     the spread of its steps comes on top.
RUN_SD = 0.01
REALLY = ("probed", "published")  # rungs on which the layout itself ran, all of it
# by a smaller layout; its failures and its memory running out say nothing of this one
IMITATED = "imitated"
MEMORY_RUN_SD = 0.002
MOST_CLAIMED = 10.0  # a relative error beyond it is no error but a mistake
TRUSTED_SD = 0.1  # judgement: a look that may be off by more than this makes no winner
MEDIAN_VARIANCE = np.pi / 2.0  # of the median of n normal values, over sd^2 / n
RIVALS = 128  # candidates looked at for the regret: those with the largest expected improvement
# rows whose bound is looked at together; those of them that are worked out at once
CHUNK, FIRST = 8192, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of one measured candidate. log_seconds: of its fastest run, for what disturbs a
    run (others on the network, clocks, a straggler) only slows it; so no further run makes it
    slower.

    variance: of what all its runs say.  mean_log_seconds: over its runs, weighted by their
        precision.
    runs: how many probes gave a time.  margin: measured (or attempted) memory over usable, less 1;
    None when unknown.  rung: `probed` where the layout itself ran, else how it was looked at.
    """

    row: int
    status: str
    log_seconds: float | None
    variance: float | None
    runs: int
    margin: float | None
    message: str
    rung: str = REALLY[0]
    mean_log_seconds: float | None = None

    @property
    def measured(self) -> bool:
        """Whether the layout itself ran and gave a time."""
        return self.rung in REALLY and self.log_seconds is not None

    @property
    def step_seconds(self) -> float | None:
        """Of a step in its fastest run."""
        return None if self.log_seconds is None else float(np.exp(self.log_seconds))

    @property
    def mean_step_seconds(self) -> float | None:
        """Of a step over its runs; that of the one run where there is but one."""
        mean = self.log_seconds if self.mean_log_seconds is None else self.mean_log_seconds
        return None if mean is None else float(np.exp(mean))


def noise_variance(measured: Measured, rung_sd: float = 0.0) -> float:
    """Variance of a measured log step time around the layout's own: from run to run, of the median
    of its steps, and of the rung.

    What was extrapolated says its error itself, noise included.
    """
    own = claimed_error(measured, "step_seconds")
    if own is not None:
        return max(own, RUN_SD) ** 2
    variance = RUN_SD**2 + rung_sd**2
    if measured.step_seconds and measured.step_seconds_sd is not None:
        steps = max(measured.steps or 1, 1)
        variance += (
            MEDIAN_VARIANCE * (measured.step_seconds_sd / measured.step_seconds) ** 2 / steps
        )
    return float(variance)


def claimed_error(measured: Measured, quantity: str) -> float | None:
    """The relative standard error that a measurement claims of a quantity; None where it was read
    and not extrapolated.
    """
    errors = (measured.model_extra or {}).get("relative_error")
    error = errors.get(quantity) if isinstance(errors, Mapping) else None
    if (
        not isinstance(error, int | float)
        or isinstance(error, bool)
        or not 0.0 <= error < MOST_CLAIMED
    ):
        return None
    return float(error)


def trusted(record: Record) -> bool:
    """Whether a look is good enough to make a winner."""
    return record.variance is not None and record.variance <= TRUSTED_SD**2


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """What a cheaper rung said of a candidate. log_seconds, variance: as the layout's own, by its
    own word. memory: what it says of it.
    """

    rung: str
    log_seconds: float
    variance: float
    memory: Seen | None
    margin: float | None


class Knowledge:
    """Mutable: one study's. All of it follows from the candidates and the calls made, in order."""

    def __init__(self, candidates: Candidates) -> None:
        prior = candidates.prior
        count = len(candidates)
        self.candidates = candidates
        self.time = Field(sd=prior.sd, factor=prior.factor, groups=candidates.groups, weights=TIME)
        self.memory = Field(
            sd=prior.memory_sd,
            factor=np.zeros((count, 0)),
            groups=candidates.groups,
            weights=MEMORY,
        )
        self.log_share = -prior.memory_sd * normal.upper_quantile(prior.oom_probability)
        self.records: dict[int, Record] = {}
        self.times: list[Seen] = []
        self.memories: list[Seen] = []
        self.looks: dict[int, dict[str, LookedAt]] = {}
        self.surprises: list[float] = []
        self.excluded: dict[int, str] = {}
        self.fits: BoolColumn = np.zeros(count, dtype=np.bool_)
        self.barred: BoolColumn = np.zeros(count, dtype=np.bool_)
        self.affordable: BoolColumn = np.ones(count, dtype=np.bool_)
        self.whole_affordable: BoolColumn = self.affordable
        self.closed: BoolColumn = np.zeros(count, dtype=np.bool_)
        self.pending: list[int] = []
        self.first: int | None = None  # to be measured before all others: the answer without probes
        self._beliefs: Beliefs | None = None
        self._regrets: dict[int, Regret] = {}

    # ---- learning ----

    def expect(self, row: int) -> None:
        """A probe of this candidate is under way."""
        self.pending.append(row)
        self._touch()

    def forget(self, row: int) -> None:
        """The probe came to nothing (interrupted): as if it had not been asked."""
        if row in self.pending:
            self.pending.remove(row)
        self._touch()

    def close(self, row: int) -> None:
        """The candidate is not to be asked again, although nothing speaks against it (no rung that
        is left can be paid for).
        """
        self.closed[row] = True
        self._touch()

    def learn(
        self, row: int, measured: Measured, *, rung_sd: float = 0.0, counts: bool = True
    ) -> list[int]:
        """One probe's result; returns the rows that it rules out.

        rung_sd: how far the time of a cheaper rung may be from the layout's own beyond noise, where
            it does not say that itself.
        counts: a failure is the last word on this layout, because it cannot be run itself.
        """
        self.forget(row)
        really = measured.rung in REALLY
        if measured.status == "oom" and measured.rung != IMITATED:
            return self._ran_out(row, measured)
        if measured.status != "ok":
            return self._failed(row, measured, excludes=really) if really or counts else []
        residual = self.candidates.memory_residual(row, measured)
        if not really:
            self._looked(row, measured, noise_variance(measured, rung_sd), residual)
            return []
        if residual is not None:
            self.memories.append(Seen(row=row, value=residual, variance=MEMORY_RUN_SD**2))
        if measured.step_seconds:
            self._timed(row, measured, noise_variance(measured), residual)
        self.fits |= pruning.at_most(
            self.candidates.batch, row, self.candidates.setting.global_batch_size
        ).mask
        return []

    def learn_direction(self, loading: Sequence[float], value: float, variance: float) -> None:
        """A micro-probe: log of measured over predicted along shared directions; loading (Q,) of
        the prior's factor.
        """
        self.times.append(Seen(row=None, value=value, variance=variance, loading=tuple(loading)))
        self._touch()

    def _timed(self, row: int, measured: Measured, variance: float, residual: float | None) -> None:
        value = float(np.log(measured.step_seconds or 1.0))
        self.times.append(
            Seen(
                row=row,
                value=value - float(self.candidates.prior.log_seconds[row]),
                variance=variance,
            )
        )
        # the layout itself stands for itself, and shows what its looks were worth
        for look in self.looks.pop(row, {}).values():
            self.surprises.append((look.log_seconds - value) ** 2 / (look.variance + variance))
        before = self.records.get(row)
        fastest, mean, runs = value, value, 1
        if (
            before is not None
            and before.measured
            and before.log_seconds is not None
            and before.variance is not None
        ):
            precision = 1.0 / before.variance + 1.0 / variance
            mean_before = (
                before.log_seconds if before.mean_log_seconds is None else before.mean_log_seconds
            )
            mean = (mean_before / before.variance + value / variance) / precision
            fastest, variance, runs = (
                min(value, before.log_seconds),
                1.0 / precision,
                1 + before.runs,
            )
        self.records[row] = Record(
            row=row,
            status="ok",
            log_seconds=fastest,
            variance=variance,
            runs=runs,
            margin=self._margin_of(row, residual),
            message="",
            rung=measured.rung,
            mean_log_seconds=mean,
        )
        self._weigh_looks()

    def _looked(
        self, row: int, measured: Measured, variance: float, residual: float | None
    ) -> None:
        """The best look of a rung counts: the same look again would be wrong in the same way."""
        error = max((claimed_error(measured, kind) or 0.0 for kind in MEMORY_KINDS), default=0.0)
        memory = (
            None
            if residual is None
            else Seen(row=row, value=residual, variance=MEMORY_RUN_SD**2 + error**2)
        )
        before = self.records.get(row)
        if not measured.step_seconds:
            self.memories += [memory] if memory is not None and before is None else []
            self._touch()
            return
        value = float(np.log(measured.step_seconds))
        if before is not None and before.rung in REALLY:
            if before.log_seconds is not None and before.variance is not None:
                self.surprises.append(
                    (value - before.log_seconds) ** 2 / (variance + before.variance)
                )
                self._weigh_looks()
            return
        look = LookedAt(
            rung=measured.rung,
            log_seconds=value,
            variance=variance,
            memory=memory,
            margin=self._margin_of(row, residual),
        )
        known = self.looks.setdefault(row, {})
        if measured.rung not in known or known[measured.rung].variance > variance:
            known[measured.rung] = look
        self._weigh_looks()

    def doubt(self) -> float:
        """By how much the variance that looks claim is too small: mean square of what they were off
        by where the layout ran later, over what they claimed, with one look's worth of trust in
        advance; at least 1.
        """
        return max((1.0 + sum(self.surprises)) / (1.0 + len(self.surprises)), 1.0)

    def _weigh_looks(self) -> None:
        """The records of what has only been looked at, by the best look and today's doubt."""
        for row, looks in self.looks.items():
            best = min(looks.values(), key=lambda look: look.variance)
            variance = best.variance * self.doubt()
            self.records[row] = Record(
                row=row,
                status="ok",
                log_seconds=best.log_seconds,
                variance=variance,
                runs=len(looks),
                margin=best.margin,
                message="",
                rung=best.rung,
            )
        self._touch()

    def _margin_of(self, row: int, residual: float | None) -> float | None:
        return None if residual is None else float(np.expm1(self.log_share[row] + residual))

    def seen_times(self) -> list[Seen]:
        """All that is known of times: of runs, of directions, and of looks at what has not run."""
        prior, doubt = self.candidates.prior.log_seconds, self.doubt()
        looks = [
            Seen(
                row=row, value=look.log_seconds - float(prior[row]), variance=look.variance * doubt
            )
            for row, by_rung in self.looks.items()
            for look in by_rung.values()
        ]
        return [*self.times, *looks]

    def seen_memories(self) -> list[Seen]:
        """All that is known of memory, in the same way."""
        return [
            *self.memories,
            *(
                look.memory
                for by_rung in self.looks.values()
                for look in by_rung.values()
                if look.memory is not None
            ),
        ]

    def _ran_out(self, row: int, measured: Measured) -> list[int]:
        margin = self.margin(row, measured)
        self.looks.pop(row, None)
        self.memories.append(self._censored(row, float(np.log1p(margin))))
        self.records[row] = Record(
            row=row,
            status="oom",
            log_seconds=None,
            variance=None,
            runs=0,
            margin=margin,
            message=measured.message or "out of memory",
            rung=measured.rung,
        )
        order = pruning.at_least(
            self.candidates.batch, row, self.candidates.setting.global_batch_size
        )
        ruled_out = [
            int(other)
            for other in np.flatnonzero(order.mask & ~self.barred)
            if int(other) not in self.records
        ]
        for other in ruled_out:
            self._exclude(
                other,
                f"candidate {row} ran out of memory, and here "
                f"{order.reason(self.candidates.batch, other)}",
            )
        self._exclude(row, "ran out of memory")
        return ruled_out

    def _failed(self, row: int, measured: Measured, *, excludes: bool) -> list[int]:
        """Excluded where it was the layout itself that failed, not a look at it; what answered
        before outlives a look that failed.
        """
        if not excludes and row in self.records:
            return []
        kind = measured.failure or "crash"
        self.looks.pop(row, None)
        self.records[row] = Record(
            row=row,
            status="failed",
            log_seconds=None,
            variance=None,
            runs=0,
            margin=None,
            message=f"{kind}: {measured.message or ''}",
            rung=measured.rung,
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
        self._beliefs, self._regrets = None, {}

    def margin(self, row: int, measured: Measured) -> float:
        """By how much of the usable memory it ran out: held and asked for where the report says so,
        else the prediction; at least 0.
        """
        extra = measured.model_extra or {}
        asked = (extra.get("attempted_bytes") or 0.0) + (
            extra.get("allocated_bytes") or measured.peak_allocated_bytes or 0.0
        )
        return max(float(asked) / self.candidates.setting.usable_bytes - 1.0, 0.0)

    def _censored(self, row: int, log_margin: float) -> Seen:
        """The observation that says what 'log memory share > log_margin' says, by its first two
        moments.

        Belief N(m, v), a = (t - m) / sqrt(v), h = phi(a) / Q(a): given > t the mean is m + sqrt(v)
        h, the variance v (1 - h (h - a)).
        """
        posterior = condition(self.memory, self.seen_memories())
        sd = float(np.sqrt(posterior.variance(np.array([row]))[0]))
        mean = float(self.log_share[row] + posterior.mean[row])
        a = np.array((log_margin - mean) / sd)
        hazard = float(normal.density(a) / np.maximum(normal.upper_tail(a), 1e-300))
        shrunk = np.clip(1.0 - hazard * (hazard - float(a)), 1e-3, 1.0 - 1e-6)
        noise = sd**2 * shrunk / (1.0 - shrunk)
        value = mean + sd * hazard
        observed = (value * (1.0 / sd**2 + 1.0 / noise) - mean / sd**2) * noise
        return Seen(row=row, value=float(observed - self.log_share[row]), variance=float(noise))

    # ---- what follows ----

    def beliefs(self) -> "Beliefs":
        """What is believed now; probes under way are taken to come out as expected."""
        if self._beliefs is None:
            self._beliefs = Beliefs.of(self)
        return self._beliefs

    def timed(self) -> list[Record]:
        """Candidates whose time is known, by a run or a look that can be trusted, fastest first."""
        found = [
            one
            for one in self.records.values()
            if one.log_seconds is not None and (one.rung in REALLY or trusted(one))
        ]
        return sorted(found, key=lambda record: record.log_seconds or 0.0)

    def untried(self) -> BoolColumn:
        """Candidates that have not run themselves and can be paid for, by whatever rung, (N,)."""
        free = self.affordable & ~self.barred & ~self.closed
        known = [
            row
            for row, record in self.records.items()
            if record.rung in REALLY or record.status != "ok"
        ]
        free[[*known, *self.pending]] = False
        return free

    def repeatable(self) -> list[Record]:
        """Candidates that ran themselves and could be run and paid for once more, fastest first.

        Without the fastest of all: no further run changes that it is.
        """
        ran = [one for one in self.timed() if one.measured]
        return [
            one for one in ran[1:] if self.whole_affordable[one.row] and one.row not in self.pending
        ]

    def regret(self, *, seed: int = 0, of: int | None = None) -> Regret:
        """Of the winner, or of another row, against all candidates that are not ruled out.

        What ran stands for itself in it: by its own time and noise, whatever is expected from
            others.
        """
        beliefs = self.beliefs()
        compared = beliefs.winner if of is None else of
        if compared not in self._regrets:
            rivals = [row for row in beliefs.promising(~self.barred, RIVALS) if row != compared]
            rows = np.array([compared, *rivals])
            mean, covariance = beliefs.log_seconds[rows], beliefs.time.covariance(rows)
            for place, row in enumerate(rows):
                record = self.records.get(int(row))
                if record is not None and record.measured:
                    mean[place], covariance[place], covariance[:, place] = (
                        record.log_seconds,
                        0.0,
                        0.0,
                    )
                    covariance[place, place] = record.variance
            self._regrets[compared] = expected_regret(
                mean, covariance, 1.0 - beliefs.risk(rows), 0, seed=seed
            )
        return self._regrets[compared]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """A snapshot. log_seconds (N,): expected log step seconds, measurements and model together.

    winner: the answer so far: the fastest of the layouts that ran themselves; where none has, the
        leader.
    leader: the fastest expected of all that was measured in whatever way (what is asked next is
    judged by it), else the fastest expected that fits.  measured: whether anything was measured.
    best: expected log seconds of the leader, or of something under way that should be faster.
    """

    knowledge: Knowledge
    time: Posterior
    memory: Posterior
    log_seconds: FloatColumn
    winner: int
    leader: int
    best: float
    measured: bool
    known_promising: dict[tuple[bytes, int, float], list[int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, knowledge: Knowledge) -> "Beliefs":
        """From everything learnt so far."""
        prior = knowledge.candidates.prior.log_seconds
        times = knowledge.seen_times()
        time = condition(knowledge.time, times)
        if knowledge.pending:
            believed = [
                Seen(row=row, value=float(time.mean[row]), variance=RUN_SD**2)
                for row in knowledge.pending
            ]
            time = condition(knowledge.time, [*times, *believed])
        memory = condition(knowledge.memory, knowledge.seen_memories())
        log_seconds = prior + time.mean
        timed = knowledge.timed()
        rows = [record.row for record in timed if not knowledge.barred[record.row]]
        leader = (
            min(rows, key=lambda row: float(log_seconds[row]))
            if rows
            else _first_that_fits(knowledge, memory, log_seconds)
        )
        ran = [
            record.row for record in timed if record.measured and not knowledge.barred[record.row]
        ]
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
        """Of a step: of what ran itself as it was measured, else by measurements and model
        together.
        """
        record = self.knowledge.records.get(row)
        own = record.log_seconds if record is not None and record.measured else None
        return float(np.exp(self.log_seconds[row] if own is None else own))

    def deviation(self, row: int) -> float:
        """Standard deviation of the logarithm of that."""
        record = self.knowledge.records.get(row)
        own = record.variance if record is not None and record.measured else None
        return float(np.sqrt(self.time.variance(np.array([row]))[0] if own is None else own))

    def risk(self, rows: IntColumn) -> FloatColumn:
        """P(device memory > usable) of these rows; 0 for what ran and what needs no more than
        it.
        """
        return np.where(self.knowledge.fits[rows], 0.0, _risk(self.knowledge, self.memory, rows))

    def improvement(self, rows: IntColumn) -> FloatColumn:
        """Expected improvement over the best in log seconds (about a share of the step), if it
        fits; (M,).
        """
        return normal.expected_excess(
            self.log_seconds[rows] - self.best, np.sqrt(self.time.variance(rows))
        )

    def promising(self, allowed: BoolColumn, count: int, *, risk_limit: float = 1.0) -> list[int]:
        """The `count` allowed rows with the largest expected improvement times probability of
        fitting, best first, within the risk.
        """
        key = (allowed.tobytes(), count, risk_limit)
        if key not in self.known_promising:
            self.known_promising[key] = self._promising(allowed, count, risk_limit)
        return self.known_promising[key]

    def _promising(self, allowed: BoolColumn, count: int, risk_limit: float) -> list[int]:
        """Exact: rows are looked at in the order of an upper bound (variance before any
        observation, certain to fit) until it decides, and worked out where a closer bound (variance
        after a few observations) does not.
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
        """The best `count` of those chosen so far and of more rows within the risk, best first,
        with their values.
        """
        risk = self.risk(more)
        value = np.where(risk <= risk_limit, self.improvement(more) * (1.0 - risk), -1.0)
        chosen, values = (
            np.concatenate([chosen, more[value >= 0]]),
            np.concatenate([values, value[value >= 0]]),
        )
        best = np.lexsort((chosen, -values))[:count]
        return chosen[best], values[best]


def _descending(values: FloatColumn) -> Iterator[IntColumn]:
    """Places of the values in chunks, no value larger than any of the chunk before; all is sorted
    only if more than one is wanted.
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


def _risk(knowledge: Knowledge, memory: Posterior, rows: IntColumn) -> FloatColumn:
    distance = -(knowledge.log_share[rows] + memory.mean[rows])
    return normal.upper_tail(distance / np.sqrt(memory.variance(rows)))


def _first_that_fits(knowledge: Knowledge, memory: Posterior, log_seconds: FloatColumn) -> int:
    """The fastest expected among those that are likely to fit; the likeliest to fit where none
    is.
    """
    rows = np.flatnonzero(~knowledge.barred)
    rows = rows if len(rows) else np.arange(len(log_seconds))
    risk = _risk(knowledge, memory, rows)
    safe = rows[risk <= OOM_LIMIT]
    return int(safe[np.argmin(log_seconds[safe])]) if len(safe) else int(rows[np.argmin(risk)])
