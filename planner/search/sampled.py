"""Points beyond enumeration, priced: which of them run, and how long a step takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.columns import LayoutBatch
from planner.estimates import simulated_columns
from planner.rules import violations
from planner.search.fit import OOM_LIMIT
from planner.search.variations.beyond import Beyond, Point
from planner.specs.layout import Layout

MEMORY_CONSTRAINT = "device_over_usable"  # of a trial: positive where it does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrial:
    """One trial of a search on paper.

    step_seconds, oom_probability, device_bytes: simulated; None where the layout was not priced.
    refused: why it was not: the rule that it breaks, or the bound that it cannot beat, as a
        sentence.
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
    """The trials whose layouts fit, fastest first, and all trials in the order of the sampler."""

    fastest: tuple[SampledTrial, ...]
    trials: tuple[SampledTrial, ...]

    @property
    def num_trials(self) -> int:
        """How many layouts were sampled."""
        return len(self.trials)

    @property
    def num_refused(self) -> int:
        """How many of them broke a rule or could not beat the best by a bound."""
        return sum(trial.refused is not None for trial in self.trials)


@dataclass(slots=True, eq=False)
class Priced:
    """The points of one walk through `Beyond`, each layout priced once.

    best_seconds: of a step of the fastest layout that fits, so far.
    num_priced: layouts that were simulated.
    """

    beyond: Beyond
    best_seconds: float
    num_priced: int = 0
    known: dict[Layout, SampledTrial] = field(default_factory=dict)

    def at(self, points: Sequence[Point]) -> list[SampledTrial]:
        """Trials at these points, in their order.

        Before the simulation rules refuse layouts, and a lower bound of the step those that cannot
        be faster than the best so far.
        """
        layouts = [self.beyond.layout(point) for point in points]
        new = [layout for layout in dict.fromkeys(layouts) if layout not in self.known]
        pricer = self.beyond.pricer
        for layout in new:
            broken = violations(layout, pricer.model, pricer.cluster, pricer.training)
            if broken:
                said = f"{broken[0].field}={broken[0].value}: {broken[0].rule}"
                self.known[layout] = SampledTrial(layout=layout, refused=said)
        legal = [layout for layout in new if layout not in self.known]
        if legal:
            bounds = pricer.layout_lower_bounds(LayoutBatch.from_layouts(legal))
            for row in np.flatnonzero(bounds >= self.best_seconds):
                said = (
                    f"a step takes at least {bounds[row]:.4g} s by a lower bound; the best takes "
                    f"{self.best_seconds:.4g} s"
                )
                self.known[legal[row]] = SampledTrial(layout=legal[row], refused=said)
        self._simulate([layout for layout in legal if layout not in self.known])
        return [self.known[layout] for layout in layouts]

    def _simulate(self, layouts: Sequence[Layout]) -> None:
        if not layouts:
            return
        pricer = self.beyond.pricer
        columns = simulated_columns(pricer, list(layouts))
        for layout, (step, oom, share) in zip(layouts, columns, strict=True):
            if step == np.inf:
                self.known[layout] = SampledTrial(layout=layout, refused="cannot be simulated")
                continue
            trial = SampledTrial(
                layout=layout,
                step_seconds=step,
                oom_probability=oom,
                device_bytes=(1.0 + share) * pricer.cluster.usable_memory_bytes,
            )
            self.known[layout] = trial
            if trial.fits:
                self.best_seconds = min(self.best_seconds, step)
        self.num_priced += len(layouts)

    def fitting(self) -> list[SampledTrial]:
        """Each layout that was simulated and fits, fastest first."""
        fits = [trial for trial in self.known.values() if trial.fits]
        return sorted(fits, key=lambda trial: trial.step_seconds or np.inf)
