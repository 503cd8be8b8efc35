"""Layouts that a search found at one cluster size, simulated and rated."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner.calibration.intervals import TimeSpread, oom_probability
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import simulated_step_seconds
from planner.cost.run.whole_run import RunColumns, busy_seconds, run_columns
from planner.search.choice.preference import Weighed, spread_within_stack
from planner.search.fit import fitting
from planner.search.left_out import SampledTrial
from planner.search.shortlist import Screened
from planner.specs.job import Job
from planner.specs.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """Figures of N candidates that a plan weighs.

    batch: their layouts as columns.
    runs: whole runs.
    scores: what the objective minimises.
    oom: P(out of memory).
    expected: the scores plus the cost of running out of memory and of unproven mechanisms, if the
        simplest comes first.
    weighed: the mechanisms that they use.
    spread: the uncertainty of their step times against each other.
    """

    batch: LayoutBatch
    runs: RunColumns
    scores: FloatColumn
    oom: FloatColumn
    expected: FloatColumn
    weighed: Weighed
    spread: TimeSpread


@dataclass(slots=True, eq=False)  # two searches are never equal
class OneSize:
    """The search at one cluster size.

    candidates: (step seconds, device bytes, layout), fastest first.
    rating: of the candidates, once they are rated.
    first: the candidate to put first (`ranking`).
    num_stuck: layouts whose order cannot be simulated (`cost.refine`).
    sampled: what the sampler tried beyond enumeration, in its order.
    """

    pricer: Pricer
    screened: Screened
    num_layouts: int
    rejected: dict[str, int]
    candidates: list[tuple[float, float, Layout]] = field(default_factory=list)
    num_simulated: int = 0
    num_stuck: int = 0
    study: dict[str, object] | None = None
    rating: Rated | None = None
    first: int = 0
    sampled: tuple[SampledTrial, ...] = ()

    @property
    def rated(self) -> Rated:
        assert self.rating is not None, "candidates are rated before they are ranked"
        return self.rating

    @property
    def best_seconds(self) -> float:
        """Simulated step of the fastest candidate."""
        return self.candidates[0][0]

    def consider(self, batch: LayoutBatch) -> FloatColumn:
        """Simulates these layouts and adds those that fit to the candidates.

        Returns their step seconds, infinite where they do not fit.
        """
        if not len(batch):
            return np.zeros(0)
        prices = self.pricer.price(batch)
        step = simulated_step_seconds(self.pricer, batch, prices)
        self.num_stuck += int(np.isinf(step).sum())
        fits = fitting(self.pricer, prices.least_device_bytes) & np.isfinite(step)
        rows = np.flatnonzero(fits)
        self.candidates += zip(
            step[rows].tolist(),
            prices.device_bytes[rows].tolist(),
            batch.take(rows).layouts(),
            strict=True,
        )
        self.candidates.sort(key=by_step)
        self.num_simulated += len(batch)
        return np.where(fits, step, np.inf)


class PlanCandidate(NamedTuple):
    """A candidate of one size."""

    at_size: OneSize
    row: int

    @property
    def layout(self) -> Layout:
        return self.at_size.candidates[self.row][2]

    @property
    def score(self) -> float:
        """Value that the objective minimises."""
        return float(self.at_size.rated.scores[self.row])

    @property
    def expected(self) -> float:
        """The score with its expected extra costs."""
        return float(self.at_size.rated.expected[self.row])

    @property
    def supported(self) -> bool:
        return bool(self.at_size.rated.weighed.supported[self.row])

    @property
    def step_seconds(self) -> float:
        return self.at_size.candidates[self.row][0]

    @property
    def oom(self) -> float:
        return float(self.at_size.rated.oom[self.row])


def by_step(candidate: tuple[float, float, Layout]) -> float:
    """Step seconds, by which equal ones stay in the order in which they were found.

    A sum of the same numbers in another order differs in its last digits.
    """
    return float(f"{candidate[0]:.12g}")


def rejected(sizes: Iterable[OneSize]) -> Counter[str]:
    """Layouts left out at all sizes, by reason."""
    total = Counter[str]()
    for at_size in sizes:
        total.update(at_size.rejected)
    return total


def rate(job: Job, at_size: OneSize, *, several: bool) -> None:
    """Rates all candidates: whole runs, what the objective minimises, and their expected scores."""
    known: dict[Layout, tuple[float, float, Layout]] = {}
    for candidate in at_size.candidates:
        known.setdefault(candidate[2], candidate)
    at_size.candidates = list(known.values())
    batch, pricer = LayoutBatch.from_layouts(list(known)), at_size.pricer
    step, device = (np.array([candidate[i] for candidate in at_size.candidates]) for i in (0, 1))
    prices = pricer.price(batch)
    runs = run_columns(pricer, batch, step, busy_seconds(prices))
    scores = score_of(job.search.objective, runs, device, several=several)
    oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
    weighed = Weighed.of(batch, pricer)
    at_size.rating = Rated(
        batch=batch,
        runs=runs,
        scores=scores,
        oom=oom,
        expected=weighed.expected(scores, oom) if job.search.simplest_first else scores,
        weighed=weighed,
        spread=spread_within_stack(pricer, batch),
    )


def score_of(
    objective: str, runs: RunColumns, device_bytes: FloatColumn, *, several: bool
) -> FloatColumn:
    """Values that the objective minimises, (N,).

    throughput: step time; between several sizes seconds per token of the whole job after goodput.
    time: of the whole run.
    cost: USD of the whole run (GPU-hours if the GPUs are free).
    energy: joules per token.
    memory: device bytes.
    """
    if objective == "memory":
        return device_bytes
    if objective == "cost":
        return runs.bill.cost if np.all(runs.bill.cost > 0) else runs.bill.gpu_hours
    if objective == "energy":
        return runs.bill.joules / runs.tokens
    if objective == "time":
        return runs.wall_seconds
    return 1.0 / runs.tokens_per_second if several else runs.step_seconds
