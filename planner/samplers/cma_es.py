"""Optuna's CMA-ES, an evolution strategy over numbers.

What is no number is random, and it does not look at memory: what does not fit is no better or worse
to it than what does.
"""

from typing import TYPE_CHECKING

from planner.samplers.base import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def make(seed: int, startup: int) -> "BaseSampler":
    import warnings
    from collections.abc import Sequence

    from optuna.samplers import CmaEsSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState

    class WithoutConstraints(CmaEsSampler):
        """Does not warn, trial by trial, that it leaves constraints out."""

        def after_trial(
            self,
            study: Study,
            trial: FrozenTrial,
            state: TrialState,
            values: Sequence[float] | None,
        ) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Constraints have been set")
                super().after_trial(study, trial, state, values)

    return WithoutConstraints(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)


CMA_ES = Sampler(name="cma-es", make=make, needs=("cmaes",), brought_by="the package cmaes")
