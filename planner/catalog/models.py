"""The catalogue of models: one YAML each in `models/`, in the format of a user's inline model.

Besides Hugging Face keys, each file has:
aliases: Hugging Face ids and older names.
source: where the shapes were published.
variants: the keys in which an alias differs from the rest; null: not known.
published_parameters: the publisher's count.
published_parameters_exact: true for the weights' own count, false for a rounded figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

import yaml

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
    variants: lower-case alias -> the keys in which it differs.
    """

    name: str
    keys: Mapping[str, object]
    aliases: tuple[str, ...]
    source: str
    published_parameters: int | None
    exact: bool
    notes: str
    variants: Mapping[str, Mapping[str, object]]


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    """Lower-case name -> catalogue name, sorted. No file is read for this."""
    folder = files("planner.catalog").joinpath("models")
    found = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    names = [name.removesuffix(".yaml") for name in found]
    return {name.lower(): name for name in names}


@cache
def _entry(name: str) -> ModelEntry:
    file = files("planner.catalog").joinpath(f"models/{name}.yaml")
    document = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
    published = document.get("published_parameters")
    return ModelEntry(
        name=name,
        keys={"name": name, **{key: value for key, value in document.items() if key not in _ABOUT}},
        aliases=tuple(document.get("aliases", ())),
        source=document["source"],
        published_parameters=None if published is None else int(published),
        exact=bool(document.get("published_parameters_exact", False)),
        notes=document.get("notes", ""),
        variants={alias.lower(): keys for alias, keys in document.get("variants", {}).items()},
    )


# libyaml's parser where it is built in: ten times faster
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=1)
def _names_and_aliases() -> dict[str, str]:
    """Lower-case name or alias -> catalogue name. Reads every file."""
    entries = [_entry(name) for name in _names().values()]
    return {
        **{alias.lower(): entry.name for entry in entries for alias in entry.aliases},
        **_names(),
    }


def _named(text: str) -> str | None:
    """The catalogue name that a text means; a name itself costs no reading of the other files."""
    typed = text.strip().lower()
    return _names().get(typed) or _names_and_aliases().get(typed)


def model_names() -> list[str]:
    return sorted(_names().values())


def is_model_name(text: str) -> bool:
    return _named(text) is not None


def model_entry(name: str) -> ModelEntry:
    """The catalogue's entry for a name or alias, in any case. Raises UnknownNameError."""
    found = _named(name)
    if found is None:
        raise UnknownNameError("model", name, _names_and_aliases(), "model")
    return _entry(found)


def model_keys(name: str) -> Mapping[str, object]:
    """Hugging Face keys of a name or alias, as an inline mapping would give them.

    Raises UnknownNameError.
    """
    entry = model_entry(name)
    return {**entry.keys, **entry.variants.get(name.strip().lower(), {})}
