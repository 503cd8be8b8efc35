"""The catalogue of models, in the format of a user's inline model.

Besides Hugging Face keys, each file has:
aliases: Hugging Face ids and older names.
source: where the shapes were published.
variants: the keys in which an alias differs from the rest; null: not known.
published_parameters: the publisher's count.
published_parameters_exact: true for the weights' own count, false for a rounded figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planner.catalog.files import document, known_names, named, names_of, plain
from planner.errors import UnknownNameError

_ABOUT = frozenset(
    {"aliases", "source", "published_parameters", "published_parameters_exact", "notes", "variants"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One file of the catalogue.

    keys: Hugging Face keys of the shapes, with `name`.
    published_parameters: elements as the publisher counts them; None where nothing is published.
    exact: whether that figure is the weights' own count rather than a rounded one.
    variants: plain alias -> the keys in which it differs.
    """

    name: str
    keys: Mapping[str, object]
    aliases: tuple[str, ...]
    source: str
    published_parameters: int | None
    exact: bool
    notes: str
    variants: Mapping[str, Mapping[str, object]]


@cache
def _entry(name: str) -> ModelEntry:
    found = document("models", name)
    published = found.get("published_parameters")
    return ModelEntry(
        name=name,
        keys={"name": name, **{key: value for key, value in found.items() if key not in _ABOUT}},
        aliases=tuple(found.get("aliases", ())),
        source=found["source"],
        published_parameters=None if published is None else int(published),
        exact=bool(found.get("published_parameters_exact", False)),
        notes=found.get("notes", ""),
        variants={plain(alias): keys for alias, keys in found.get("variants", {}).items()},
    )


def model_names() -> list[str]:
    return list(names_of("models"))


def is_model_name(text: str) -> bool:
    return named("models", text) is not None


def model_entry(name: str) -> ModelEntry:
    """The catalogue's entry for a name or alias, in any case. Raises UnknownNameError."""
    found = named("models", name)
    if found is None:
        raise UnknownNameError("model", name, known_names("models"), "model")
    return _entry(found)


def model_keys(name: str) -> Mapping[str, object]:
    """Hugging Face keys of a name or alias, as an inline mapping would give them.

    Raises UnknownNameError.
    """
    entry = model_entry(name)
    return {**entry.keys, **entry.variants.get(plain(name), {})}
