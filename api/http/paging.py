"""Pages of lists that are in memory: the catalogue and what ships. Pages of tables are the stores'
own (`api.storage.common`).
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import TypeVar

from api.errors import fault

Item = TypeVar("Item")


def place_cursor(name: str) -> str:
    """Where the page after the item of this name starts."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def place_of(cursor: str) -> str:
    """The name of the item before the page. Raises SpecError."""
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (ValueError, binascii.Error):
        raise unknown_cursor(cursor) from None


def unknown_cursor(cursor: str) -> Exception:
    """The error for a cursor that names no place in the list."""
    return fault(
        "cursor",
        cursor,
        "is not a cursor that this service gave",
        "leave it out to start at the first",
    )


def page_of(
    items: Sequence[Item], name_of: Callable[[Item], str], cursor: str | None, limit: int
) -> tuple[list[Item], str | None]:
    """(items of the page, cursor of the next one; None on the last). Raises SpecError for a cursor
    of no item.
    """
    names = [name_of(item) for item in items]
    start = 0
    if cursor is not None:
        before = place_of(cursor)
        if before not in names:
            raise unknown_cursor(cursor)
        start = names.index(before) + 1
    end = start + limit
    return list(items[start:end]), place_cursor(names[end - 1]) if end < len(items) else None
