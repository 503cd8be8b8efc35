"""What the samplers of a search on paper tried."""

from dataclasses import dataclass

from planner.search.bounds import OOM_LIMIT
from planner.specs.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrial:
    """One trial of a search on paper.

    step_seconds, oom_probability, device_bytes: simulated; None where a rule refused the layout.
    refused: that rule, as a sentence.
    """

    layout: Layout
    step_seconds: float | None = None
    oom_probability: float | None = None
    device_bytes: float | None = None
    refused: str | None = None

    @property
    def fits(self) -> bool:
        """Whether it is likely enough to fit."""
        return self.oom_probability is not None and self.oom_probability <= OOM_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Sampled layouts that fit, fastest first, and all trials in the order of the sampler."""

    layouts: tuple[Layout, ...]
    trials: tuple[SampledTrial, ...]

    @property
    def num_trials(self) -> int:
        """How many layouts were sampled."""
        return len(self.trials)
