"""Recipes of Megatron-Bridge by the names under which its run_recipe.py finds them.

Source: planner/catalog/megatron_bridge_recipes.tsv, whose head says how it was made.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planner.catalog.files import rows_of

ENDING = "_pretrain_config"
YOURS = f"YOUR_RECIPE{ENDING}"  # run_recipe.py infers its mode from the ending


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """A pretraining recipe.

    since: megatron-core of the first release that has it.
    predicts: layers of multi-token prediction that its text sets.
    model: of our catalogue; "" where its own name leads to the recipe, or there is none.
    """

    name: str
    since: str
    predicts: int
    model: str


@cache
def recipes() -> Mapping[str, PretrainRecipe]:
    return {
        name: PretrainRecipe(name, since, int(predicts), "" if model == "-" else model)
        for name, since, predicts, model in rows_of("megatron_bridge_recipes")
    }


def recipe_of(model: str) -> PretrainRecipe | None:
    """The recipe of a model in any release; None where none is known."""
    listed = next((one for one in recipes().values() if one.model == model), None)
    plain = re.sub(r"[^a-z0-9]+", "_", model.lower().replace(".", ""))
    return listed or recipes().get(f"{plain}{ENDING}")


def beginnings() -> dict[str, str]:
    """Beginning of a recipe's name, letters and digits only -> our model, where names differ."""
    return {
        re.sub(r"[^a-z0-9]", "", one.name.partition("_pretrain_")[0]): one.model
        for one in recipes().values()
        if one.model
    }
