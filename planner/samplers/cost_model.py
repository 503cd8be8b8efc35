"""Expected improvement under the cost model's posterior, the default.

On paper the search enumerates; what it cannot enumerate is sampled by TPE.
"""

from planner.samplers.base import Sampler
from planner.samplers.tpe import TPE

COST_MODEL = Sampler(name="cost-model", make=TPE.make, by_posterior=True)
