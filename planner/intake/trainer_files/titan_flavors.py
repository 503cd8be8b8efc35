"""Finds the catalogue's model for a TorchTitan module and flavor."""

from functools import lru_cache

from planner.catalog.models import model_entry, model_names
from planner.intake.models import load_model
from planner.intake.trainer_files.statement import StatedModel
from planner.trainers.titan_models import FLAVORS, shape_of
from planner.trainers.titan_networks import differences


def model_of(module: str, flavor: str, assets: str = "") -> StatedModel:
    """The catalogue's model that a TorchTitan module and flavor stand for.

    Several may have the same shapes. The one that `assets` names (the folder of its tokenizer)
    comes first, then the one whose other fields differ least.
    """
    base = flavor.removesuffix("_flex").removesuffix("_varlen").removesuffix("_irope")
    known = (
        (shape, one.facts)
        for shape, one in FLAVORS.items()
        if (one.module, one.flavor) == (module, base)
    )
    shape, facts = next(known, (None, {}))
    named = [name for name, its in _shapes() if its == shape]
    if not named and (own := f"{module}-{base}".lower()) in model_names():
        return StatedModel(value=own)
    if not named:
        return StatedModel(
            value=None, lacking=f"the shapes of {module} {flavor} are not in the catalogue"
        )
    folder = assets.rstrip("/").rpartition("/")[2].lower()
    exact = [
        name
        for name in named
        if folder
        and any(alias.lower().endswith(folder) for alias in (*model_entry(name).aliases, name))
    ]
    return StatedModel(
        value=min(exact or named, key=lambda name: len(differences(load_model(name), facts)))
    )


@lru_cache(maxsize=1)
def _shapes() -> tuple[tuple[str, object], ...]:
    return tuple((name, shape_of(load_model(name))) for name in model_names())
