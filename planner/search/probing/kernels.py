"""Micro-probes of a study: the kernels that its candidates run and no timing covers yet, and what a timing says of the cost model.

A kernel timed alone is measured / predicted; the calibration's principal directions say how far the prediction may be off, kernel by
kernel, and the same directions move the step times of candidates. So a timing is an observation along them. Letters: D directions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.coverage import Gap, Shape, Use, choose, probe_seconds, uses
from planner.calibration.intervals import moved_pricers
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.search.probing.candidates import Candidates
from planner.search.probing.fidelity import Look, MicroProbe, Observed
from planner.search.screen import OOM_LIMIT

LOOKED_AT = 32  # candidates whose kernels are worth timing: the fastest expected; judgement
BUDGET_GPU_SECONDS = 20.0  # of timed kernels in one launch; judgement
MOST_KERNELS = 100  # of one launch; judgement
# A kernel alone against the same kernel inside a step (clocks, caches, neighbours), and against what the model's curves can follow: bf16
# products are met within 2 to 10%. Judgement: the upper end.
ALONE_SD = 0.10
LEAST_LOADING = 0.01  # a kind of kernel that no direction moves by this much tells nothing
ALONE, TOGETHER = "kernels", "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One kernel, timed. seconds: median of its runs."""

    shape: Shape
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a study's fastest candidates. used: with predicted seconds.  moved: seconds of each under each of D directions."""

    used: Mapping[Shape, Use]
    moved: tuple[Mapping[Shape, float], ...]
    stretch: float

    @classmethod
    def of(cls, pricer: Pricer, candidates: Candidates) -> "Kernels":
        """Those of the LOOKED_AT fastest candidates that fit."""
        rows = np.flatnonzero(candidates.prior.oom_probability <= OOM_LIMIT)[:LOOKED_AT]
        batch = candidates.batch.take(rows if len(rows) else np.arange(1))
        moved = tuple(_seconds(one, batch) for one in moved_pricers(pricer))
        used = {use.shape: use for use in uses(pricer, batch) if use.seconds > 0}
        return cls(used=used, moved=moved, stretch=pricer.calibration.stretch(pricer.training.trainer))

    def look(self, name: str, shapes: Iterable[Shape]) -> Look:
        """What timings of these shapes say together, each by its share of a step. loading: last of all 0, for what all layouts share."""
        known = [shape for shape in shapes if shape in self.used]
        loading = [self.stretch * self._mean(known, self._shift(seconds)) for seconds in self.moved]
        return Look(name=name, loading=(*loading, 0.0), sd=ALONE_SD)

    def observed(self, timings: Sequence[Timing]) -> tuple[Observed, ...]:
        """What these timings say, by kind of kernel; other shapes than the candidates' say nothing, the newest of a shape counts."""
        seconds = {timing.shape: timing.seconds for timing in timings if timing.seconds > 0}
        found = []
        for name, shapes in _by_kind(shape for shape in seconds if shape in self.used).items():
            look = self.look(name, shapes)
            ratio = self._mean(shapes, lambda shape: float(np.log(seconds[shape] / self.used[shape].seconds)))
            if _tells(look):
                found.append(Observed(look=look, log_ratio=ratio))
        return tuple(found)

    def probes(self, covered: Sequence[Shape], *, num_gpus: int, start_seconds: float) -> tuple[MicroProbe, ...]:
        """The launches that would cover what is not: kernels of one GPU, and collectives between as many as there are."""
        chosen = choose(self.used.values(), covered, budget_seconds=BUDGET_GPU_SECONDS, num_gpus=num_gpus)[:MOST_KERNELS]
        made = []
        for name, gaps in ((ALONE, [gap for gap in chosen if not _shared(gap)]), (TOGETHER, [gap for gap in chosen if _shared(gap)])):
            kinds = _by_kind(gap.use.shape for gap in gaps)
            looks = tuple(look for kind, shapes in kinds.items() if _tells(look := self.look(kind, shapes)))
            if looks:
                gpus = max(gap.use.shape.num_gpus for gap in gaps)
                seconds = start_seconds + sum(probe_seconds(gap.use) for gap in gaps)
                made.append(MicroProbe(name=name, looks=looks, gpu_seconds=gpus * seconds, kernels=tuple(gap.use.shape for gap in gaps)))
        return tuple(made)

    def _shift(self, seconds: Mapping[Shape, float]) -> Callable[[Shape], float]:
        return lambda shape: float(np.log(seconds.get(shape, self.used[shape].seconds) / self.used[shape].seconds))

    def _mean(self, shapes: Sequence[Shape], of: Callable[[Shape], float]) -> float:
        shares = np.array([max(self.used[shape].share, 1e-12) for shape in shapes])
        return float(shares @ np.array([of(shape) for shape in shapes]) / shares.sum())


def _seconds(pricer: Pricer, batch: LayoutBatch) -> dict[Shape, float]:
    return {use.shape: use.seconds for use in uses(pricer, batch) if use.seconds > 0}


def _by_kind(shapes: Iterable[Shape]) -> dict[str, list[Shape]]:
    """By kind, operation and dtype: "gemm bf16", "collective all-gather"."""
    found: dict[str, list[Shape]] = {}
    for shape in shapes:
        words = (shape.kind, shape.name, "" if shape.kind == "collective" else shape.dtype)
        found.setdefault(" ".join(filter(None, words)), []).append(shape)
    return found


def _shared(gap: Gap) -> bool:
    return gap.use.shape.kind == "collective"


def _tells(look: Look) -> bool:
    return max(map(abs, look.loading)) >= LEAST_LOADING
