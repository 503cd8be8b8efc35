"""Optuna's Gaussian process; it needs torch and scipy."""

from planner.samplers.base import Sampler, of_optuna

GP = Sampler(
    name="gp",
    make=of_optuna("GPSampler", "n_startup_trials", warn_independent_sampling=False),
    needs=("torch", "scipy"),
)
