"""Finds the catalogue's name for model shapes that were read from a trainer's arguments."""

from collections.abc import Mapping
from functools import lru_cache

from planner.catalog.models import model_entry, model_names
from planner.intake.models import load_model, read_model
from planner.intake.trainer_files.statement import StatedModel
from planner.specs.model import ModelSpec
from planner.specs.network import NETWORK_FIELDS

# Fields that shapes do not depend on, or that a trainer's arguments leave open. Network fields are
# compared where the keys set them. Shared experts count by their width together.
OPEN = frozenset({"name", "max_position_embeddings", "n_shared_experts"}) | NETWORK_FIELDS


def named(keys: Mapping[str, object], *, hint: str = "") -> StatedModel:
    """The catalogue's name for a model with these Hugging Face keys, else the keys themselves.

    hint: a name, an alias or its last part. It decides between models with equal shapes, and
        names a model that the catalogue does not have.
    Raises SpecError for keys that make no model.
    """
    same = _same(keys, hint, frozenset())
    if not same:
        return StatedModel(value={"name": hint or "your-model", **keys})
    return StatedModel(value=next((name for name in same if _is_called(name, hint)), same[0]))


def by_hint(keys: Mapping[str, object], *, leave_open: frozenset[str], hint: str) -> str | None:
    """The catalogue's one model that has these keys, apart from the fields left open.

    None where there are several and the hint does not decide.
    """
    same = _same(keys, hint, leave_open)
    called = [name for name in same if _is_called(name, hint)]
    kinds = {_comparable(load_model(name), frozenset()) for name in same}
    return called[0] if called else same[0] if len(kinds) == 1 else None


def _same(keys: Mapping[str, object], hint: str, leave_open: frozenset[str]) -> list[str]:
    model = read_model({"name": hint or "your-model", **keys})
    compared = _comparable(model, leave_open)
    network = [field for field in NETWORK_FIELDS.intersection(keys) if keys[field] is not None]
    return [
        name
        for name in model_names()
        if _comparable(load_model(name), leave_open) == compared
        and all(getattr(load_model(name), field) == getattr(model, field) for field in network)
    ]


def _is_called(name: str, hint: str) -> bool:
    names = (name, *(alias.rpartition("/")[2] for alias in model_entry(name).aliases))
    return bool(hint) and hint.lower() in (known.lower() for known in names)


@lru_cache(maxsize=512)
def _comparable(model: ModelSpec, leave_open: frozenset[str]) -> tuple[tuple[str, object], ...]:
    return tuple(
        (name, value) for name, value in model.model_dump().items() if name not in OPEN | leave_open
    )
