"""Optuna's NSGA-II, an evolutionary sampler whose population is as large as the startup."""

from planner.samplers.base import Sampler, of_optuna

NSGA2 = Sampler(name="nsga2", make=of_optuna("NSGAIISampler", "population_size"))
