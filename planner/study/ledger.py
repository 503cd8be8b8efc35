"""The ledger of a study: its budget and expenses."""

from dataclasses import dataclass, field

from planner.columns import BoolColumn
from planner.study.evaluations import MOST_FAILURES, ProbeCost
from planner.study.micro_probes import MicroProbe, ObservedEffect
from planner.study.regret import TOLERANCE
from planner.study.samplers import Pick
from planner.units import counted

# judgement: low-fidelity evaluations per probe; each costs little but is a launch to wait for
LOW_FIDELITY_PER_PROBE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Budget of a study.

    probes: runs of whole layouts.
    gpu_seconds: of everything, micro-probes and low-fidelity evaluations included.
    """

    probes: int = 5
    gpu_seconds: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Settings by which a study spends its budget.

    tolerance: expected regret at which it stops.
    whole: whether the pool can run the layouts themselves; otherwise there are only emulated
        ranks, and they count as probes.
    emulates: whether it can emulate ranks.
    refused (N,): candidates that the probe program cannot run.
    observed: effects of earlier kernel timings.
    gpu_seconds_before: spent on timing kernels before this study was resumed.
    first: row of number 1 on paper, measured before all others.
    first_measures: mechanisms that it measures for the first time, as a clause.
    isolating: measured next; with number 1 it isolates an unmeasured mechanism.
    """

    sampler: str = "cost-model"
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    tolerance: float = TOLERANCE
    cost: ProbeCost = field(default_factory=ProbeCost)
    whole: bool = True
    emulates: bool = False
    refused: BoolColumn | None = None
    micro_probes: tuple[MicroProbe, ...] = ()
    observed: tuple[ObservedEffect, ...] = ()
    gpu_seconds_before: float = 0.0
    first: int | None = None
    first_measures: str = ""
    isolating: Pick | None = None


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Expenses of a study so far, and its budget. Mutable.

    low_fidelity: low-fidelity evaluations that do not count as probes.
    failures_in_a_row: probes without numbers since the last one with numbers.
    by_row: GPU-seconds spent on each candidate.
    """

    budget: Budget
    probes: int = 0
    low_fidelity: int = 0
    gpu_seconds: float = 0.0
    failures_in_a_row: int = 0
    by_row: dict[int, float] = field(default_factory=dict)

    def gpu_seconds_left(self) -> float:
        return self.budget.gpu_seconds - self.gpu_seconds

    def probes_left(self) -> int:
        return self.budget.probes - self.probes

    def low_fidelity_left(self) -> bool:
        """Whether one more low-fidelity evaluation may run that does not count as a probe."""
        return self.low_fidelity < LOW_FIDELITY_PER_PROBE * self.budget.probes

    def pay(
        self,
        gpu_seconds: float,
        *,
        row: int | None = None,
        probe: bool = False,
        low_fidelity: bool = False,
        failed: bool = False,
    ) -> None:
        """Adds an evaluation to the expenses.

        row: the candidate; None for a micro-probe.
        probe, low_fidelity: whether it counts as one.
        """
        if row is not None:
            self.by_row[row] = self.by_row.get(row, 0.0) + gpu_seconds
        self.gpu_seconds += gpu_seconds
        self.low_fidelity += low_fidelity
        if probe:
            self.probes += 1
            self.failures_in_a_row = self.failures_in_a_row + 1 if failed else 0

    def exhausted(self, last_failure: str) -> str | None:
        """Why no probe may follow; None while the budget of probes lasts and they give numbers."""
        if self.probes >= self.budget.probes:
            return f"the budget of {counted(self.budget.probes, 'probe')} is spent"
        if self.failures_in_a_row >= MOST_FAILURES:
            failures = counted(self.failures_in_a_row, "probe")
            return f"{failures} in a row failed, the last with: {last_failure}"
        return None
