"""The precision in which routed experts compute."""

import numpy as np

from planner.columns import IntColumn, LayoutBatch
from planner.precision import PRECISIONS, Recipe, column


def expert_precision(batch: LayoutBatch, recipes: tuple[Recipe, ...]) -> IntColumn:
    """Precision code of the grouped products, (N,): 16 bits where the recipe leaves them there."""
    high = PRECISIONS.names.index("bf16")
    own = np.array(
        [PRECISIONS.names.index(recipe.experts) if recipe.experts else high for recipe in recipes]
    )[batch.precision]
    refused = (column("experts_alone", batch.precision, recipes) > 0) & (batch.pp * batch.cp > 1)
    return np.asarray(np.where(refused, high, own))
