"""Optuna's tree-structured Parzen estimator."""

from typing import TYPE_CHECKING

from planner.samplers.base import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def make(seed: int, startup: int) -> "BaseSampler":
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, n_startup_trials=startup)


TPE = Sampler(name="tpe", make=make, warm_starts=4)
