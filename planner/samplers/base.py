"""The declaration of a sampler of `search.sampler`."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.errors import fault

if TYPE_CHECKING:  # Optuna is imported where a sampler is made
    from optuna.samplers import BaseSampler

STARTUP_TRIALS = 8  # trials at random before a sampler follows its model


def of_optuna(
    kind: str, startup: str = "", **options: object
) -> "Callable[[int, int], BaseSampler]":
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
