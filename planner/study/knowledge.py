"""Knowledge of a study: candidates, their measurements, and the posterior that follows.

Samplers read it; only the study writes it.
Letters: N candidates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.calibration.correlated import MEMORY, TIME, CorrelatedErrors
from planner.columns import BoolColumn, FloatColumn
from planner.search.fit import OOM_LIMIT
from planner.specs.measurement import BLAMELESS, Measured
from planner.study import normal, pruning
from planner.study.candidates import Candidates
from planner.study.posterior import StudyPosterior, risk_of
from planner.study.records import (
    FULL_FIDELITY,
    EmulatedResult,
    EmulatedResults,
    Record,
    noise_variance,
    trusted,
)
from planner.study.surrogate import ErrorPosterior, Observation, condition

MEMORY_RUN_SD = 0.002
# Judgements. Deviations of its prediction beyond which one run is not believed alone; share by
# which a run is slower than another of the same layout where something disturbed it.
FAR, DISTURBED = 4.0, 0.15


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
        self.first: int | None = None  # to be measured before all others: the answer without probes
        self.first_measures = ""  # what that measures for the first time, as a clause
        self._posterior: StudyPosterior | None = None

    def observe(self, row: int, measured: Measured, *, counts: bool = True) -> list[int]:
        """Updates with one result; returns the rows that it rules out.

        counts: whether a failure is final, because the layout itself cannot be run.
        """
        self._posterior = None
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
        self._posterior = None
        along = tuple(loading)
        self.times.append(Observation(row=None, value=value, variance=variance, loading=along))

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
        return []

    def _exclude(self, row: int, reason: str) -> None:
        self.excluded[row] = reason
        self.barred[row] = True

    def posterior(self) -> StudyPosterior:
        if self._posterior is None:
            self._posterior = _conditioned(self)
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

    def untried(self) -> BoolColumn:
        """Candidates that have not run themselves and have an affordable evaluation, (N,)."""
        free = self.affordable & ~self.barred & ~self.refused
        known = [
            row
            for row, record in self.records.items()
            if record.fidelity in FULL_FIDELITY or record.status != "ok"
        ]
        free[known] = False
        return free

    def repeatable(self) -> list[Record]:
        """Candidates that ran and are affordable once more, fastest first.

        The fastest of all is left out: no further run changes that it is the fastest.
        """
        ran = [one for one in self.timed() if one.measured]
        return [one for one in ran[1:] if self.whole_affordable[one.row]]


def _conditioned(knowledge: Knowledge) -> StudyPosterior:
    prior = knowledge.candidates.prior.log_seconds
    time = condition(knowledge.time, knowledge.time_observations())
    memory = condition(knowledge.memory, knowledge.memory_observations())
    log_seconds = prior + time.mean
    timed, odd = knowledge.timed(), knowledge.odd()
    rows = [record.row for record in timed if not knowledge.barred[record.row]]
    leader = (
        min(rows, key=lambda row: float(log_seconds[row]))
        if rows
        else _first_that_fits(knowledge, memory, log_seconds)
    )
    ran = [record.row for record in timed if record.measured and record.row in rows]
    return StudyPosterior(
        fits=knowledge.fits,
        barred=knowledge.barred,
        log_share=knowledge.log_share,
        believed={
            row: one for row, one in knowledge.records.items() if one.measured and row not in odd
        },
        time=time,
        memory=memory,
        log_seconds=log_seconds,
        winner=ran[0] if ran else leader,
        leader=leader,
        measured=bool(rows),
    )


def _first_that_fits(knowledge: Knowledge, memory: ErrorPosterior, log_seconds: FloatColumn) -> int:
    """The fastest expected candidate that fits; the likeliest to fit if none does."""
    rows = np.flatnonzero(~knowledge.barred)
    rows = rows if len(rows) else np.arange(len(log_seconds))
    risk = risk_of(knowledge.log_share, memory)[rows]
    safe = rows[risk <= OOM_LIMIT]
    return int(safe[np.argmin(log_seconds[safe])]) if len(safe) else int(rows[np.argmin(risk)])


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
    sd = float(np.sqrt(posterior.variance[row]))
    mean = float(posterior.mean[row])
    a = np.array((least - mean) / sd)
    hazard = float(normal.density(a) / np.maximum(normal.upper_tail(a), 1e-300))
    shrunk = np.clip(1.0 - hazard * (hazard - float(a)), 1e-3, 1.0 - 1e-6)
    noise = sd**2 * shrunk / (1.0 - shrunk)
    value = mean + sd * hazard
    observed = (value * (1.0 / sd**2 + 1.0 / noise) - mean / sd**2) * noise
    return Observation(row=row, value=float(observed), variance=float(noise))
