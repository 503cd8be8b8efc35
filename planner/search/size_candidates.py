"""Layouts that a search found at one cluster size, simulated and rated."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import simulated_step_seconds
from planner.cost.run.whole_run import RunColumns, busy_seconds, run_columns
from planner.search.choice.preference import Spreads, Weighed
from planner.search.fit import fitting
from planner.search.left_out import SampledTrial
from planner.search.shortlist import Screened
from planner.specs.job import Job
from planner.specs.layout import Layout


@dataclass(slots=True, eq=False)  # two searches are never equal
class OneSize:
    """The search at one cluster size.

    candidates: (step seconds, device bytes, layout), fastest first; the columns below are theirs.
    runs: whole runs.
    scores: what the objective minimises.
    oom: P(out of memory).
    expected: the scores plus the cost of running out of memory and of unproven mechanisms, if the
        simplest comes first.
    batch: their layouts as columns.
    weighed: the mechanisms that they use.
    spreads: the uncertainty of their step times against each other.
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
    runs: RunColumns | None = None
    scores: FloatColumn = field(default_factory=lambda: np.zeros(0))
    oom: FloatColumn = field(default_factory=lambda: np.zeros(0))
    expected: FloatColumn = field(default_factory=lambda: np.zeros(0))
    batch: LayoutBatch | None = None
    weighed: Weighed | None = None
    spreads: Spreads | None = None
    first: int = 0
    sampled: tuple[SampledTrial, ...] = ()

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
        """What the objective minimises."""
        return float(self.at_size.scores[self.row])

    @property
    def expected(self) -> float:
        """The score with its expected extra costs."""
        return float(self.at_size.expected[self.row])

    @property
    def supported(self) -> bool:
        weighed = self.at_size.weighed
        return weighed is None or bool(weighed.supported[self.row])

    @property
    def step_seconds(self) -> float:
        return self.at_size.candidates[self.row][0]

    @property
    def oom(self) -> float:
        """P(out of memory)."""
        return float(self.at_size.oom[self.row])


def by_step(candidate: tuple[float, float, Layout]) -> float:
    """Step seconds, by which equal ones stay in the order in which they were found.

    A sum of the same numbers in another order differs in its last digits.
    """
    return float(f"{candidate[0]:.12g}")


def rate(job: Job, at_size: OneSize, *, several: bool) -> None:
    """Rates all candidates: whole runs, what the objective minimises, and their expected scores."""
    known: dict[Layout, tuple[float, float, Layout]] = {}
    for candidate in at_size.candidates:
        known.setdefault(candidate[2], candidate)
    at_size.candidates = list(known.values())
    batch = LayoutBatch.from_layouts(list(known))
    step, device = (np.array([candidate[i] for candidate in at_size.candidates]) for i in (0, 1))
    prices = at_size.pricer.price(batch)
    at_size.runs = run_columns(at_size.pricer, batch, step, busy_seconds(prices))
    at_size.oom = oom_probability(
        at_size.pricer.profile, at_size.pricer.cluster, prices.least_device_bytes
    )
    at_size.scores = score_of(job.search.objective, at_size.runs, device, several=several)
    at_size.batch, at_size.spreads = batch, Spreads(at_size.pricer, batch)
    at_size.weighed = Weighed.of(batch, at_size.pricer)
    at_size.expected = at_size.scores
    if job.search.simplest_first:
        at_size.expected = at_size.weighed.expected(at_size.scores, at_size.oom)


def score_of(
    objective: str, runs: RunColumns, device_bytes: FloatColumn, *, several: bool
) -> FloatColumn:
    """What the objective minimises, (N,).

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
