"""NVIDIA's recipes by precision: defaults for settings that a job does not give."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from planner.columns import BoolColumn, LayoutBatch
from planner.precision import PRECISIONS
from planner.rules.base import Context
from planner.specs.layout import MOE_DISPATCHERS
from planner.trainers.recipes import ExpertRecipe, expert_recipe


@lru_cache(maxsize=256)
def recipes(c: Context) -> Mapping[int, ExpertRecipe]:
    """NVIDIA's recipes for the job's model, by index of the precision; empty without any.

    One that drops tokens captures experts too, which a job without a capacity cannot.
    """
    if not c.model.is_moe:
        return {}
    found = {
        index: expert_recipe(c.model, c.cluster, c.training, name, newest=True)
        for index, name in enumerate(PRECISIONS)
    }
    drops = c.training.moe_capacity_factor is not None
    return {index: one for index, one in found.items() if one and one.drops <= drops}


def runs_as(x: LayoutBatch, precision: int, recipe: ExpertRecipe) -> BoolColumn:
    """Layouts with the recipe's precision and dispatcher, (N,)."""
    alike = x.moe_dispatcher == MOE_DISPATCHERS.index(recipe.dispatcher)
    return np.asarray((x.ep > 1) & alike & (x.precision == precision))
