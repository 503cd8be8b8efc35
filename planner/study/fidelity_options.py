"""The cheaper rungs of a study: which of them can still look at a candidate, what a look costs, and
what became of those before.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.specs.measurement import Measured
from planner.study.fidelity import Rung

# in a row; then it is the machine and not the layout, or the rung and not what it looked at
MOST_FAILURES = 3
# looks that cannot be had, without one that can between them; then the rung is dropped
MOST_UNABLE = 20
TINY = 1e-6  # seconds that a launch takes at least, so that nothing is free


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds that all GPUs of a run are held: start_seconds (launch, compile, first step) + steps
    x step seconds.

    start_seconds is a judgement until the first results replace it by their mean.
    """

    start_seconds: float = 60.0
    steps: int = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a cheaper rung looks at one candidate. num_gpus: held at once.  runs: one after the
    other.  step_seconds: of a step there.

    sd: error of what its log time says of the layout's, beyond run-to-run noise.
    """

    num_gpus: int
    runs: int
    step_seconds: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperRung:
    """A rung below the whole layout. ways: in which it can look at the candidate of a row; none
    where it cannot.

    least_gpus (N,): GPUs times runs of the cheapest look at a candidate, at least; infinite where
        there is none.
    shows_memory: tells whether the layout fits.
    """

    name: str
    ways: Callable[[int], Sequence[Way]]
    least_gpus: FloatColumn
    shows_memory: bool

    def sd(self, row: int) -> float:
        """What its time may be off by, where a measurement does not say that itself."""
        return max((way.sd for way in self.ways(row)), default=0.0)


class Rungs:
    """Mutable: one study's. starts, look_starts: seconds that runs of layouts, and of looks, took
    beside their steps.
    """

    def __init__(self, rungs: Sequence[CheaperRung], cost: ProbeCost) -> None:
        self.rungs, self.cost = tuple(rungs), cost
        self.starts: list[float] = []
        self.look_starts: list[float] = []
        self.failures: Counter[str] = Counter()
        self._unable: Counter[str] = Counter()
        self._looked: set[tuple[int, str]] = set()

    def named(self, name: str) -> CheaperRung | None:
        """The rung of this name; None for the layout itself and what this study does not use."""
        return next((rung for rung in self.rungs if rung.name == name), None)

    # ---- what became of looks ----

    def learn(self, row: int, name: str, *, failed: bool) -> None:
        """A look was had."""
        self._looked.add((row, name))
        self.failures[name] = self.failures[name] + 1 if failed else 0
        self._unable[name] = 0

    def pass_over(self, row: int, name: str) -> None:
        """The pool cannot make this look."""
        self._looked.add((row, name))
        self._unable[name] += 1

    def looked_at(self, row: int) -> bool:
        """By whatever rung, whatever came of it."""
        return any((row, rung.name) in self._looked for rung in self.rungs)

    def learn_start(
        self, measured: Measured, gpu_seconds: float, *, num_gpus: int, look: bool
    ) -> None:
        """Seconds that its runs took beside their steps, the same for each of them. num_gpus: of
        the layout.
        """
        extra: Mapping[str, Any] = measured.model_extra or {}
        runs = [
            (one["num_gpus"], one["step_seconds"] or 0.0) for one in extra.get("imitated_by") or ()
        ]
        runs = runs or [(1, one["step_seconds"] or 0.0) for one in extra.get("ranks") or ()]
        runs = runs or [(num_gpus, measured.step_seconds or 0.0)]
        rest = gpu_seconds - sum(held * self.cost.steps * seconds for held, seconds in runs)
        (self.look_starts if look else self.starts).append(
            float(max(rest / sum(held for held, _ in runs), 0.0))
        )

    # ---- what can be had ----

    def works(self, rung: CheaperRung) -> bool:
        """Whether it has not failed too often."""
        return self.failures[rung.name] < MOST_FAILURES and self._unable[rung.name] < MOST_UNABLE

    def can_look(self) -> bool:
        """Whether a rung that works can look at any candidate."""
        return any(self.works(rung) and np.isfinite(rung.least_gpus).any() for rung in self.rungs)

    def left(self, row: int) -> list[CheaperRung]:
        """Those that work and have not looked at this candidate yet, cheapest first."""
        working = [
            rung for rung in self.rungs if self.works(rung) and np.isfinite(rung.least_gpus[row])
        ]
        return sorted(
            (rung for rung in working if (row, rung.name) not in self._looked),
            key=lambda rung: float(rung.least_gpus[row]),
        )

    def affordable(self, gpu_seconds: float) -> list[BoolColumn]:
        """What each rung can look at for so much, as far as can be told in advance; (N,) each."""
        start = self.look_start_seconds()
        return [
            np.asarray(rung.least_gpus * start <= gpu_seconds)
            for rung in self.rungs
            if self.works(rung)
        ]

    def ideal(self, rung: CheaperRung, row: int) -> Rung:
        """A look that no way of this rung beats: without error, on the fewest GPUs, its steps for
        nothing. Known without pricing any.
        """
        least = float(rung.least_gpus[row])
        cost = least * self.look_start_seconds()
        return Rung(
            name=rung.name,
            num_gpus=int(least),
            gpu_seconds=cost,
            sd=0.0,
            shows_memory=rung.shows_memory,
        )

    def looks(self, rung: CheaperRung, row: int) -> list[Rung]:
        """The ways of this rung, with what they cost."""
        looks = []
        for way in rung.ways(row):
            cost = (
                way.num_gpus
                * way.runs
                * (self.look_start_seconds() + self.cost.steps * way.step_seconds)
            )
            looks.append(
                Rung(
                    name=rung.name,
                    num_gpus=way.num_gpus,
                    gpu_seconds=cost,
                    sd=way.sd,
                    shows_memory=rung.shows_memory,
                )
            )
        return looks

    def start_seconds(self) -> float:
        """Of the layouts themselves; looks start faster, so that they only tell that it takes
        longer than was thought.
        """
        if self.starts:
            return max(float(np.mean(self.starts)), TINY)
        return max([self.cost.start_seconds, *self.look_starts])

    def look_start_seconds(self) -> float:
        """Of looks; until there was one, of the layouts."""
        known = self.look_starts or self.starts
        return max(float(np.mean(known)), TINY) if known else self.cost.start_seconds
