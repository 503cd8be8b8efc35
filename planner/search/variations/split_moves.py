"""Layers of stages: where a search for a split starts, and what it moves.

A split is layers of each stage, first stage first.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from planner.columns import FloatColumn
from planner.schedules import Schedule

AMOUNTS, SEVERAL = (1, 2, 4), 8  # layers moved at once, off a stage that has more than SEVERAL
ALL_PAIRS = 12  # stages up to which every single move is simulated

Split = tuple[int, ...]
Holders = tuple[tuple[int, ...], ...]
"""The stages of each rank."""


@lru_cache(maxsize=512)
def holders_of(schedule: Schedule, pp: int, virtual: int) -> Holders:
    rank_S = schedule.stage_rank(np.arange(pp * virtual), pp, virtual)
    return tuple(tuple(np.flatnonzero(rank_S == rank).tolist()) for rank in range(pp))


@lru_cache(maxsize=4096)
def sloped(split: Split, slope: float, holders: Holders) -> Split:
    """The split with `slope` layers more on each rank than on the one before it."""
    sizes, ranks = list(split), len(holders)
    wanted = np.round(slope * (np.arange(ranks) - (ranks - 1) / 2.0)).astype(np.int64)
    wanted[-1] -= wanted.sum()
    for here, more in zip(holders, wanted.tolist(), strict=True):
        for _ in range(abs(more)):
            if more > 0:
                sizes[_smallest(sizes, here)] += 1
            else:
                sizes[_sparest(sizes, here)] -= 1
    found = tuple(sizes)
    return found if possible(found) else split


def balanced(split: Split, holders: Holders, loads: FloatColumn) -> Split:
    """The split after moves of single layers from the busiest to the idlest rank.

    loads: seconds of each rank. A layer takes what the rank with least beside its layers shows.
    """
    sizes, seconds = list(split), loads.tolist()
    held = [sum(sizes[stage] for stage in here) for here in holders]
    layer = min(load / max(count, 1) for load, count in zip(seconds, held, strict=True))
    for _ in range(sum(sizes)):
        most, least = seconds.index(max(seconds)), seconds.index(min(seconds))
        giver = _sparest(sizes, holders[most])
        if seconds[least] + layer >= seconds[most] or not _spare(sizes, giver):
            break
        sizes[giver] -= 1
        sizes[_smallest(sizes, holders[least])] += 1
        seconds[most] -= layer
        seconds[least] += layer
    return tuple(sizes)


def _spare(sizes: Sequence[int], stage: int) -> int:
    return sizes[stage] - (0 < stage < len(sizes) - 1)


def _sparest(sizes: Sequence[int], stages: Sequence[int]) -> int:
    """The first of these stages with most to give away."""
    return max(stages, key=lambda stage: _spare(sizes, stage))


def _smallest(sizes: Sequence[int], stages: Sequence[int]) -> int:
    """The first of these stages with fewest layers."""
    return min(stages, key=lambda stage: sizes[stage])


def possible(split: Split) -> bool:
    """Whether every stage holds a layer; the embedding or the head alone make one too."""
    return min(split[0], split[-1]) >= 0 and min(split[1:-1], default=1) >= 1


def moved(split: Split, giver: int, taker: int, layers: int) -> Split:
    sizes = list(split)
    sizes[giver] -= layers
    sizes[taker] += layers
    return tuple(sizes)


def helpful_pairs(
    split: Split, holders: Holders, most: tuple[int, int], least: set[int]
) -> list[tuple[int, int, int]]:
    """(stage that gives, stage that takes, layers): off the busiest and the fullest rank.

    most: those two.
    least: the ranks that take.
    """
    found: dict[tuple[int, int, int], None] = {}
    for giving in most:
        giver = _sparest(split, holders[giving])
        for taking in sorted(least - {giving}):
            taker = _smallest(split, holders[taking])
            for layers in AMOUNTS if split[giver] > SEVERAL else AMOUNTS[:1]:
                found[giver, taker, layers] = None
    return list(found)


def all_pairs(split: Split) -> list[tuple[int, int, int]]:
    """Every single move; of a long pipeline those between its ends and extreme stages."""
    ends = {0, len(split) - 1, split.index(max(split)), split.index(min(split))}
    those = range(len(split)) if len(split) <= ALL_PAIRS else sorted(ends)
    return [(giver, taker, 1) for giver in those for taker in those if giver != taker]


@lru_cache(maxsize=512)
def even(layers: int, count: int) -> Split:
    """Layers over `count` stages, as evenly as they go."""
    return tuple(layers // count + (stage < layers % count) for stage in range(count))
