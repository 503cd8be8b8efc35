"""Random layouts: a baseline."""

from planner.samplers.base import Sampler, of_optuna

RANDOM = Sampler(name="random", make=of_optuna("RandomSampler"))
