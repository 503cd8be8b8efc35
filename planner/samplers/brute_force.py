"""Every layout once, in random order."""

from typing import TYPE_CHECKING

from planner.samplers.base import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def make(seed: int, startup: int) -> "BaseSampler":
    """A sampler that repeats nothing until it has tried everything."""
    import warnings
    from collections.abc import Sequence

    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import BruteForceSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState

    class Everything(BruteForceSampler):
        """Does not stop the study: who asks for trials decides when to stop."""

        def after_trial(
            self,
            study: Study,
            trial: FrozenTrial,
            state: TrialState,
            values: Sequence[float] | None,
        ) -> None:
            """Nothing."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ExperimentalWarning)
        return Everything(seed=seed)


BRUTE_FORCE = Sampler(name="brute-force", make=make)
