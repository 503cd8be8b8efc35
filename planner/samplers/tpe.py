"""Optuna's tree-structured Parzen estimator."""

from planner.samplers.base import Sampler, of_optuna

TPE = Sampler(name="tpe", make=of_optuna("TPESampler", "n_startup_trials"), warm_starts=4)
