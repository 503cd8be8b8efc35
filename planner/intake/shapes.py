"""Shapes that were read from a trainer's arguments, named where the catalogue has the same ones."""

from collections.abc import Mapping
from functools import lru_cache

from planner.catalog.models import load_model, model_names
from planner.intake.said import ModelSaid
from planner.specs.model import ModelSpec

# Fields that say nothing about what one step computes, or that arguments of a trainer leave open.
OPEN = frozenset({"name", "max_position_embeddings"})


def named(keys: Mapping[str, object], *, leave_open: frozenset[str] = frozenset(), hint: str = "") -> ModelSaid:
    """The catalogue's name for a model of these Hugging Face keys, else the keys themselves, called `hint` where it says one.

    leave_open: fields that are not compared.  hint: decides between equals.  Raises SpecError for keys that make no model.
    """
    model = ModelSpec.from_user({"name": hint or "your-model", **keys})
    compared = _comparable(model, leave_open)
    same = [name for name in model_names() if _comparable(load_model(name), leave_open) == compared]
    if not same:
        return ModelSaid(value={"name": hint or "your-model", **keys})
    return ModelSaid(value=next((name for name in same if name == hint), same[0]))


@lru_cache(maxsize=512)
def _comparable(model: ModelSpec, leave_open: frozenset[str]) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for name, value in model.model_dump().items() if name not in OPEN | leave_open)
