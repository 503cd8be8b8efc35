"""Changes settings in a user's TOML; comments, order, unknown keys and spacing stay as they are."""

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import Comment, Table, Whitespace

from planner.export.base import Value


def edit_toml(text: str, changes: Mapping[str, Value | None]) -> str:
    """The text with these dotted settings set, or removed where the value is None.

    An existing setting is changed in place. A new one goes to the end of its table, and a new table
    to the end of the file.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    document = tomlkit.parse(text)
    for key, value in changes.items():
        *tables, name = key.split(".")
        if value is None:
            holder = _find(document, tables)
            if holder is not None and name in holder:
                del holder[name]
        else:
            _set(document, tables, name, value)
    edited = tomlkit.dumps(document)
    return edited if newline == "\n" else edited.replace("\r\n", "\n").replace("\n", newline)


def _find(document: Any, tables: list[str]) -> Any:
    for name in tables:
        if name not in document:
            return None
        document = document[name]
    return document


def _set(document: Any, tables: list[str], name: str, value: Value) -> None:
    holder = document
    for index, table in enumerate(tables):
        if table not in holder:
            _new_table(holder, tables[index:], name, value)
            return
        holder = holder[table]
    if name in holder:
        holder[name] = value
    else:
        _append(holder, name, value)


def _new_table(holder: Any, tables: list[str], name: str, value: Value) -> None:
    if isinstance(holder, tomlkit.TOMLDocument) and holder.body:
        if not tomlkit.dumps(holder).endswith("\n"):
            holder.add(tomlkit.nl())
        holder.add(tomlkit.nl())
    first = inner = tomlkit.table()
    for table in tables[1:]:
        inner[table] = tomlkit.table()
        inner = inner[table]
    inner[name] = value
    if not isinstance(holder, tomlkit.TOMLDocument):
        inner.add(tomlkit.nl())
    holder[tables[0]] = first


def _append(holder: Any, name: str, value: Value) -> None:
    """Adds a setting after the last one of the table.

    Comments and blank lines behind it stay behind it, since they belong to what follows.
    """
    body = holder.value.body if isinstance(holder, Table) else []
    last = max((index for index, (key, _) in enumerate(body) if key is not None), default=-1)
    trailing = [item for _, item in body[last + 1 :]]
    if last < 0 or not all(isinstance(item, Comment | Whitespace) for item in trailing):
        holder[name] = value
        return
    del body[last + 1 :]
    holder[name] = value
    for item in trailing:
        holder.add(item)
