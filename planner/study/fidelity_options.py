"""The low fidelities of a study: what each can still evaluate, at what cost, and past results.

Letters: N candidates.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.specs.measurement import Measured
from planner.study.fidelity import Evaluation

# failures in a row; more of them mean that the machine or the fidelity is broken, not the layout
MOST_FAILURES = 3
# evaluations in a row that the pool cannot make, before the fidelity is dropped
MOST_UNABLE = 20
TINY = 1e-6  # least seconds of a launch, so that nothing is free


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds that a run occupies all its GPUs: start_seconds + steps x step seconds.

    start_seconds: launch, compile and first step; a judgement until the mean of
        results replaces it.
    """

    start_seconds: float = 60.0
    steps: int = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityOption:
    """One way for a low fidelity to evaluate one candidate.

    num_gpus: used at once.
    runs: number of runs, one after the other.
    step_seconds: of a step of such a run.
    sd: error of its log time as a measure of the layout's, beyond run-to-run noise.
    """

    num_gpus: int
    runs: int
    step_seconds: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LowFidelity:
    """A fidelity below the layout itself.

    options: the ways to evaluate the candidate of a row; empty if it cannot be evaluated.
    least_gpus (N,): lower bound of GPUs x runs of an evaluation; infinite if there is none.
    shows_memory: whether it shows if the layout fits.
    """

    name: str
    options: Callable[[int], Sequence[FidelityOption]]
    least_gpus: FloatColumn
    shows_memory: bool

    def sd(self, row: int) -> float:
        """Error of its log time, for a measurement that does not state its own."""
        return max((option.sd for option in self.options(row)), default=0.0)


class Fidelities:
    """The low fidelities of one study. Mutable.

    starts, low_fidelity_starts: seconds besides the steps, of layouts' and of low-fidelity runs.
    """

    def __init__(self, every: Sequence[LowFidelity], cost: ProbeCost) -> None:
        self.every, self.cost = tuple(every), cost
        self.starts: list[float] = []
        self.low_fidelity_starts: list[float] = []
        self.failures: Counter[str] = Counter()
        self._unable: Counter[str] = Counter()
        self._evaluated: set[tuple[int, str]] = set()

    def named(self, name: str) -> LowFidelity | None:
        """The fidelity of this name; None for the layout itself and for one not in this study."""
        return next((fidelity for fidelity in self.every if fidelity.name == name), None)

    # ---- results -------------------------------------------------------------------------------

    def observe(self, row: int, name: str, *, failed: bool) -> None:
        """Records that this fidelity has evaluated the candidate."""
        self._evaluated.add((row, name))
        self.failures[name] = self.failures[name] + 1 if failed else 0
        self._unable[name] = 0

    def observe_unable(self, row: int, name: str) -> None:
        """Records that the pool cannot make this evaluation."""
        self._evaluated.add((row, name))
        self._unable[name] += 1

    def evaluated(self, row: int) -> bool:
        """Whether any fidelity has been tried on this candidate, whatever the result."""
        return any((row, fidelity.name) in self._evaluated for fidelity in self.every)

    def observe_start(
        self, measured: Measured, gpu_seconds: float, *, num_gpus: int, low_fidelity: bool
    ) -> None:
        """Records the seconds that each run took besides its steps. num_gpus: of the layout."""
        extra: Mapping[str, Any] = measured.model_extra or {}
        runs = [(1, one["step_seconds"] or 0.0) for one in extra.get("ranks") or ()]
        runs = runs or [(num_gpus, measured.step_seconds or 0.0)]
        rest = gpu_seconds - sum(held * self.cost.steps * seconds for held, seconds in runs)
        (self.low_fidelity_starts if low_fidelity else self.starts).append(
            float(max(rest / sum(held for held, _ in runs), 0.0))
        )

    # ---- what is possible ----------------------------------------------------------------------

    def works(self, fidelity: LowFidelity) -> bool:
        """Whether it has not failed too often."""
        return (
            self.failures[fidelity.name] < MOST_FAILURES
            and self._unable[fidelity.name] < MOST_UNABLE
        )

    def any_possible(self) -> bool:
        """Whether a fidelity that works can evaluate any candidate."""
        return any(
            self.works(fidelity) and np.isfinite(fidelity.least_gpus).any()
            for fidelity in self.every
        )

    def left(self, row: int) -> list[LowFidelity]:
        """Those that work and have not evaluated this candidate yet, cheapest first."""
        open_ones = [
            fidelity
            for fidelity in self.every
            if self.works(fidelity)
            and np.isfinite(fidelity.least_gpus[row])
            and (row, fidelity.name) not in self._evaluated
        ]
        return sorted(open_ones, key=lambda fidelity: float(fidelity.least_gpus[row]))

    def affordable(self, gpu_seconds: float) -> list[BoolColumn]:
        """Upper bound of what each fidelity can evaluate for this cost; a mask (N,) each."""
        start = self.low_fidelity_start_seconds()
        return [
            np.asarray(fidelity.least_gpus * start <= gpu_seconds)
            for fidelity in self.every
            if self.works(fidelity)
        ]

    def ideal(self, fidelity: LowFidelity, row: int) -> Evaluation:
        """An evaluation that no option of this fidelity beats, known without pricing any.

        It has no error, the fewest GPUs, and steps that take no time.
        """
        least = float(fidelity.least_gpus[row])
        return Evaluation(
            name=fidelity.name,
            num_gpus=int(least),
            gpu_seconds=least * self.low_fidelity_start_seconds(),
            sd=0.0,
            shows_memory=fidelity.shows_memory,
        )

    def evaluations(self, fidelity: LowFidelity, row: int, *, log_error: float) -> list[Evaluation]:
        """The options of this fidelity with their costs.

        log_error: log of the layout's expected over its predicted step seconds, which its
            low-fidelity runs share.
        """
        slower = float(np.exp(log_error))
        start = self.low_fidelity_start_seconds()
        return [
            Evaluation(
                name=fidelity.name,
                num_gpus=option.num_gpus,
                gpu_seconds=(
                    option.num_gpus
                    * option.runs
                    * (start + self.cost.steps * slower * option.step_seconds)
                ),
                sd=option.sd,
                shows_memory=fidelity.shows_memory,
            )
            for option in fidelity.options(row)
        ]

    def start_seconds(self) -> float:
        """Start of a run of the layout itself.

        Low-fidelity runs start faster: until a layout has run, they can only raise the estimate.
        """
        if self.starts:
            return max(float(np.mean(self.starts)), TINY)
        return max([self.cost.start_seconds, *self.low_fidelity_starts])

    def low_fidelity_start_seconds(self) -> float:
        """Start of a low-fidelity run; that of the layouts until there was one."""
        known = self.low_fidelity_starts or self.starts
        return max(float(np.mean(known)), TINY) if known else self.cost.start_seconds
