"""`planner-cli catalog`: the models, GPUs, clusters, schedules and defaults known by name."""

import json as encoder
from typing import Annotated, Any

import typer
import yaml

from planner.api.catalog import catalog_entry, catalog_list, kind_of
from planner.api.cli.output import make_console, say, show, show_json, tell
from planner.api.cli.typed import Json
from planner.api.input.text import read_mapping_file
from planner.api.own_entries import (
    KINDS,
    PREFIX,
    add_entry,
    full_name,
    named_entry,
    own_entry,
    own_line,
)
from planner.api.render.lists import catalog_table
from planner.api.wiring import wire
from planner.errors import fault


def command(
    kind: Annotated[str, typer.Argument(metavar="models|gpus|clusters|schedules|defaults")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None,
    add: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    own: bool = False,
    json: Json = False,
) -> None:
    """List what is known by name, or show one entry with its sources; keep entries of your own.

    kind: Part of the catalogue.
    name: One entry in full.
    add: Store this YAML or JSON (of a model also a config.json) as own/NAME; a next version where
        the name is known.
    own: List the entries that were added.
    """
    if add is not None:
        say(f"stored as {_added(kind, name, add)}")
        return
    if name is not None:
        entry = _own_entry(kind, name) if name.startswith("own/") else catalog_entry(kind, name)
        plain = encoder.loads(encoder.dumps(entry, default=str))
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)
        tell(entry, [text.rstrip()], json=json)
        return
    lines = _lines(kind, own=own)
    if json:
        show_json({"items": lines})
        return
    console = make_console()
    show(catalog_table(kind, lines, console.width), console)


def _lines(kind: str, *, own: bool) -> list[dict[str, Any]]:
    if not own:
        return catalog_list(kind)
    kind_of(kind)
    return [own_line(entry) for entry in wire().own_entries.list(kind)]


def _own_entry(kind: str, name: str) -> dict[str, Any]:
    kind_of(kind)
    found = named_entry(wire(), kind, name)
    if found is None:
        remedy = f"`planner-cli catalog {kind} --own` lists them"
        raise fault("name", name, "no entry of this name was added", remedy)
    return own_entry(found)


def _added(kind: str, name: str | None, path: str) -> str:
    if kind not in KINDS:
        raise fault("kind", kind, "takes no entries", f"use {', '.join(KINDS)}")
    wanted = None if name is None else name.removeprefix(PREFIX)
    return full_name(add_entry(wire(), kind, wanted, read_mapping_file(path, "--add")))
