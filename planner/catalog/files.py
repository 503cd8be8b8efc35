"""Reads the files of the catalogue: entries by kind and name, and tables.

A kind is a folder ("models", "gpus", "clusters"), an entry a YAML file of it in the format that
users write, by its name. Its `aliases` are other names of it, in any case.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

# libyaml's parser where it is built in: ten times faster
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def text_of(path: str) -> str:
    return files("planner.catalog").joinpath(path).read_text(encoding="utf-8")


def rows_of(table: str) -> list[list[str]]:
    """Cells of `<table>.tsv`, without its head."""
    lines = text_of(f"{table}.tsv").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


@cache
def names_of(kind: str) -> tuple[str, ...]:
    """Catalogue names, sorted. No file is read for this."""
    found = (item.name for item in files("planner.catalog").joinpath(kind).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


@cache
def document(kind: str, name: str) -> Mapping[str, Any]:
    return parsed(text_of(f"{kind}/{name}.yaml"))


def parsed(text: str) -> Mapping[str, Any]:
    """The mapping in a text of YAML."""
    found: Mapping[str, Any] = yaml.load(text, Loader=_LOADER)
    return found


@cache
def known_names(kind: str) -> Mapping[str, str]:
    """Every name of an entry as `plain` has it -> catalogue name. Reads every file."""
    aliases = {
        plain(alias): name
        for name in reversed(names_of(kind))
        for alias in document(kind, name).get("aliases", ())
    }
    return {**aliases, **{name: name for name in names_of(kind)}}


def plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def named(kind: str, text: str) -> str | None:
    """The catalogue name that a text means; a name itself costs no reading of the other files."""
    typed = plain(text)
    return typed if typed in names_of(kind) else known_names(kind).get(typed)
