"""Optuna's NSGA-II, an evolutionary sampler."""

from typing import TYPE_CHECKING

from planner.samplers.base import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def make(seed: int, startup: int) -> "BaseSampler":
    """An NSGA-II sampler whose population is as large as the startup."""
    from optuna.samplers import NSGAIISampler

    return NSGAIISampler(seed=seed, population_size=startup)


NSGA2 = Sampler(name="nsga2", make=make)
