"""Finds the catalogue's name of a model: by its shapes, or by TorchTitan's module and flavor."""

import re
from collections.abc import Mapping
from functools import lru_cache

from planner.catalog.models import model_entry, model_names
from planner.intake.models import load_model, read_model
from planner.intake.trainer_files.statement import StatedModel
from planner.specs.model import ModelSpec
from planner.specs.network import NETWORK_FIELDS
from planner.trainers.titan_models import FLAVORS, shape_of
from planner.trainers.titan_networks import differences

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
    own = called(hint)
    return StatedModel(value=own if own in same else same[0])


def by_hint(keys: Mapping[str, object], *, leave_open: frozenset[str], hint: str) -> str | None:
    """The catalogue's one model that has these keys, apart from the fields left open.

    None where there are several and the hint does not decide.
    """
    same = _same(keys, hint, leave_open)
    own = called(hint)
    kinds = {_comparable(load_model(name), frozenset()) for name in same}
    return own if own in same else same[0] if len(kinds) == 1 else None


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


def called(text: str) -> str | None:
    """The catalogue's model of this name or Hugging Face id, also of somebody's copy of it."""
    known = {
        _plain(one): name for name in model_names() for one in (*model_entry(name).aliases, name)
    }
    return known.get(_plain(text))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.rpartition("/")[2].lower())


@lru_cache(maxsize=512)
def _comparable(model: ModelSpec, leave_open: frozenset[str]) -> tuple[tuple[str, object], ...]:
    return tuple(
        (name, value) for name, value in model.model_dump().items() if name not in OPEN | leave_open
    )


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
