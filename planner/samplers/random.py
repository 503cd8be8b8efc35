"""Random layouts: a baseline."""

from typing import TYPE_CHECKING

from planner.samplers.base import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def make(seed: int, startup: int) -> "BaseSampler":
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


RANDOM = Sampler(name="random", make=make)
