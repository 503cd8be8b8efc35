"""The samplers that `search.sampler` names: one file each, one line each below."""

from planner.registry import Registry
from planner.samplers.base import Sampler
from planner.samplers.brute_force import BRUTE_FORCE
from planner.samplers.cma_es import CMA_ES
from planner.samplers.cost_model import COST_MODEL
from planner.samplers.gp import GP
from planner.samplers.nsga2 import NSGA2
from planner.samplers.random import RANDOM
from planner.samplers.tpe import TPE

SAMPLERS: Registry[Sampler] = Registry(
    COST_MODEL, TPE, GP, NSGA2, CMA_ES, RANDOM, BRUTE_FORCE, kind="sampler", field="search.sampler"
)
