"""Optuna's Gaussian process; it needs torch and scipy."""

from typing import TYPE_CHECKING

from planner.samplers.base import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def make(seed: int, startup: int) -> "BaseSampler":
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)


GP = Sampler(name="gp", make=make, needs=("torch", "scipy"))
