"""The results of a replayed study, and the names of strategies and truths in tables."""

from dataclasses import dataclass

MEASURED, OWN = "measured sweeps", "own GPU grid"
"""Truths that are the same for every seed; all others are generated."""
OURS, TRIVIAL, KNOWING = "cost-model", "best-first", "cost-model, family known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One strategy on one hidden truth.

    regret (PROBES,): after each probe, infinite before the first success.
    to_goal: probes until the regret is at most GOAL; PROBES + 1 if never.
    gpu_seconds, oom: GPU time, and probes out of memory, until then.
    """

    strategy: str
    kind: str
    truth: str
    seed: int
    regret: tuple[float, ...]
    to_goal: int
    gpu_seconds: float
    probes: int
    oom: int

    @property
    def generated(self) -> bool:
        """Whether the truth differs from seed to seed."""
        return self.kind not in (MEASURED, OWN)
