"""The space around the best enumerated layouts that is too large to enumerate.

It joins what the exact searches of budgets and splits vary one at a time: how much is recomputed,
and which stage holds how many layers, in any chunk of any rank. A point is a vector of whole
numbers, so that a sampler, a random draw and a descent along coordinates walk the same space.
Letters: S stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import IntColumn, LayoutBatch
from planner.cost.pipeline import stages
from planner.cost.price import Pricer
from planner.schedules import SCHEDULES
from planner.specs.layout import Layout, format_ac, parse_ac

MOST_MOVED = 3  # layers off the first or the last rank; embedding and head weigh about one each
MOST_TILTED = 4  # layers moved from early ranks to late ones, or back
PERCENT = 100
DIALS = ("memory-budget", "block")  # modes that say how much is recomputed
NONE = "none"

Point = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """Variants of some layouts of one job.

    layouts: the layouts they start from, the best first.
    budgets, splits: whether recomputation and layers per stage may be varied.

    Parameters of a point, all whole numbers:
    layout: which of the layouts.
    recomputed: hundredths of what can be recomputed: of the memory budget, or of a stage's layers
        (block-N).
    first, last: layers moved off the first and the last pipeline rank, to the smallest others;
        negative ones move there.
    first_chunk, last_chunk: from which of the rank's stages, counted from the ends of the model.
    tilt: layers moved from the earlier ranks to the later ones, which hold fewer microbatches.
    """

    pricer: Pricer
    layouts: Sequence[Layout]
    budgets: bool
    splits: bool

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the largest value of every parameter that varies anything here."""
        found: dict[str, tuple[int, int]] = {}
        if len(self.layouts) > 1:
            found["layout"] = (0, len(self.layouts) - 1)
        if self.budgets and any(self._dial(layout) for layout in self.layouts):
            found["recomputed"] = (0, PERCENT)
        piped = [layout for layout in self.layouts if layout.pp > 1] if self.splits else []
        if piped:
            found |= {"first": (-MOST_MOVED, MOST_MOVED), "last": (-MOST_MOVED, MOST_MOVED)}
            chunks = max(layout.virtual_stages for layout in piped)
            if chunks > 1:
                found |= {"first_chunk": (0, chunks - 1), "last_chunk": (0, chunks - 1)}
            if max(layout.pp for layout in piped) > 2:
                found["tilt"] = (-MOST_TILTED, MOST_TILTED)
        return found

    @property
    def origins(self) -> list[dict[str, int]]:
        """The points that are the layouts themselves: a search starts from them."""
        ranges = self.ranges
        return [
            {
                name: {"layout": place, "recomputed": self._recomputed(layout)}.get(name, 0)
                for name in ranges
            }
            for place, layout in enumerate(self.layouts)
        ]

    def layout(self, point: Point) -> Layout:
        """The layout at this point. It may break a rule."""
        base = self.layouts[point.get("layout", 0)]
        update: dict[str, object] = {}
        if "recomputed" in point and self._dial(base):
            update["ac"] = self._mode(base, point["recomputed"])
        moves = [point.get(name, 0) for name in ("first", "last", "tilt")]
        if base.pp > 1 and any(moves):
            chunks = [point.get(name, 0) for name in ("first_chunk", "last_chunk")]
            sizes = self._moved(base, moves, chunks)
            if sizes is not None:
                update["layers_per_stage"] = sizes
        return base.model_copy(update=update)

    def _dial(self, layout: Layout) -> str | None:
        """The mode by which the trainer says how much this layout recomputes, if there is one."""
        known = self.pricer.rules.dials
        if "memory-budget" in known and layout.compile:
            return "memory-budget"
        return "block" if "block" in known else None

    def _mode(self, layout: Layout, percent: int) -> str:
        if self._dial(layout) == "memory-budget":
            return format_ac("memory-budget", 1.0 - percent / PERCENT) if percent else NONE
        layers = max(self._sizes(layout))
        count = round(percent / PERCENT * layers)
        return NONE if count == 0 else "full" if count >= layers else format_ac("block", count)

    def _recomputed(self, layout: Layout) -> int:
        kind, number = parse_ac(layout.ac)
        if kind == "memory-budget":
            return round((1.0 - number) * PERCENT)
        if kind == "block":
            return round(number / max(self._sizes(layout)) * PERCENT)
        return 0 if kind == NONE else PERCENT

    def _sizes(self, layout: Layout) -> tuple[int, ...]:
        batch = LayoutBatch.from_layouts([layout])
        return stages.layers_of_stages(batch, 0, self.pricer.model, self.pricer.rules)

    def _moved(
        self, layout: Layout, moves: Sequence[int], chunks: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Layers of each stage after the moves, or None if a stage would lose all."""
        sizes = np.array(self._sizes(layout))
        schedule = SCHEDULES[layout.pp_schedule]
        ranks = schedule.stage_rank(np.arange(len(sizes)), layout.pp, layout.virtual_stages)
        first, last, tilt = moves
        own = [np.flatnonzero(ranks == ranks[0]), np.flatnonzero(ranks == ranks[-1])[::-1]]
        ends = [
            int(of_rank[chunk % len(of_rank)]) for of_rank, chunk in zip(own, chunks, strict=True)
        ]
        inner = ~np.isin(ranks, [ranks[0], ranks[-1]])
        others = inner if inner.any() else np.ones(len(sizes), dtype=np.bool_)
        for stage, count in zip(ends, (first, last), strict=True):
            for place in _places(sizes, others & (np.arange(len(sizes)) != stage), count):
                sizes[stage] -= np.sign(count)
                sizes[place] += np.sign(count)
        early = ranks < layout.pp / 2
        for _ in range(abs(tilt)):
            giving, taking = (early, ~early) if tilt > 0 else (~early, early)
            sizes[int(np.argmax(np.where(giving, sizes, -1)))] -= 1
            sizes[int(np.argmin(np.where(taking, sizes, np.iinfo(np.int64).max)))] += 1
        return tuple(int(size) for size in sizes) if sizes.min() >= 1 else None


def _places(sizes: IntColumn, others: np.ndarray, count: int) -> Iterator[int]:
    """The stages that take `count` layers one by one, or give them if it is negative."""
    for _ in range(abs(count)):
        if count > 0:
            yield int(np.argmin(np.where(others, sizes, np.iinfo(np.int64).max)))
        else:
            yield int(np.argmax(np.where(others, sizes, -1)))
