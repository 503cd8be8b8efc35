"""The samplers that `search.sampler` names: a row of `SAMPLERS` each."""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.errors import fault
from planner.registry import Registry

if TYPE_CHECKING:  # Optuna is imported where a sampler is made
    from optuna.samplers import BaseSampler

STARTUP_TRIALS = 8  # trials at random before a sampler follows its model


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampler that `search.sampler` can name.

    make: an Optuna sampler from a seed and a number of startup trials. It samples what a search on
        paper cannot enumerate; in a study each sample becomes the nearest legal candidate.
    needs: modules that Optuna imports for it, and brought_by what to install for them.
    warm_starts: a study first probes so many of the cost model's best, different candidates.
    by_posterior: a study proposes by the posterior of the cost model instead of `make`.
    """

    name: str
    make: "Callable[[int, int], BaseSampler]"
    needs: tuple[str, ...] = ()
    brought_by: str = "the probe extra"
    warm_starts: int = 0
    by_posterior: bool = False

    def optuna_sampler(self, seed: int, startup: int = STARTUP_TRIALS) -> "BaseSampler":
        """The Optuna sampler. Raises SpecError where a module that it needs is not installed."""
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            rule = f"needs {' and '.join(self.needs)}; not installed: {', '.join(missing)}"
            remedy = f"install {self.brought_by}, or use cost-model or tpe"
            raise fault("search.sampler", self.name, rule, remedy)
        return self.make(seed, startup)


def _optuna(kind: str, startup: str = "", **options: object) -> "Callable[[int, int], BaseSampler]":
    """Maker of one of Optuna's samplers, from a seed and a number of startup trials.

    kind: its class.
    startup: its argument for the number of startup trials; "" where it has none.
    """

    def make(seed: int, trials: int) -> "BaseSampler":
        made: BaseSampler = getattr(importlib.import_module("optuna.samplers"), kind)(
            seed=seed, **({startup: trials} if startup else {}), **options
        )
        return made

    return make


def _cma_es(seed: int, startup: int) -> "BaseSampler":
    """Optuna's CMA-ES, an evolution strategy over numbers.

    What is no number is random, and it does not look at memory: what does not fit is no better or
    worse to it than what does.
    """
    from optuna.samplers import CmaEsSampler

    class WithoutConstraints(CmaEsSampler):
        """Does not warn, trial by trial, that it leaves constraints out."""

        def after_trial(self, *args: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Constraints have been set")
                super().after_trial(*args, **kwargs)

    return WithoutConstraints(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)


def _brute_force(seed: int, startup: int) -> "BaseSampler":
    """Every layout once, in random order."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import BruteForceSampler

    class Everything(BruteForceSampler):
        """Does not stop the study: who asks for trials decides when to stop."""

        def after_trial(self, *args: Any, **kwargs: Any) -> None:
            """Nothing."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ExperimentalWarning)
        return Everything(seed=seed)


TPE = Sampler(name="tpe", make=_optuna("TPESampler", "n_startup_trials"), warm_starts=4)
# expected improvement under the cost model's posterior; what a search on paper cannot enumerate is
# sampled by TPE
COST_MODEL = replace(TPE, name="cost-model", warm_starts=0, by_posterior=True)
GP = Sampler(
    name="gp",
    make=_optuna("GPSampler", "n_startup_trials", warn_independent_sampling=False),
    needs=("torch", "scipy"),
)
SAMPLERS: Registry[Sampler] = Registry(
    COST_MODEL,
    TPE,
    GP,
    Sampler(name="nsga2", make=_optuna("NSGAIISampler", "population_size")),
    Sampler(name="cma-es", make=_cma_es, needs=("cmaes",), brought_by="the package cmaes"),
    Sampler(name="random", make=_optuna("RandomSampler")),
    Sampler(name="brute-force", make=_brute_force),
    kind="sampler",
    field="search.sampler",
)
