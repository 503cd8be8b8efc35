"""Records of measured candidates, and results of those that were only emulated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn
from planner.specs.measurement import Measured
from planner.study.surrogate import Observation

# judgement: one run against the next of the same layout on the same machines (clocks, placement);
# the spread of its steps comes on top
RUN_SD = 0.01
FULL_FIDELITY = ("probed", "published")  # the layout itself ran, in full
EMULATED = "emulated"  # single ranks of it ran
# error of an emulated rank's step besides run-to-run noise: its communication is predicted;
# judgement
EMULATED_SD = 0.06
TRUSTED_SD = 0.1  # judgement: an emulated result with a larger error makes no winner
MEDIAN_VARIANCE = np.pi / 2.0  # of the median of n normal values, over sd^2 / n


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
        """Adds one observation; repeats share the same error."""
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
