"""Pages of lists in memory: the catalogue. Pages of tables: `planner.api.storage.paging`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from planner.api.storage.paging import decoded, encoded, unknown_cursor

Item = TypeVar("Item")


def page_of(
    items: Sequence[Item], name_of: Callable[[Item], str], cursor: str | None, limit: int
) -> tuple[list[Item], str | None]:
    """(items of the page, cursor of the next one; None on the last).

    A cursor is the name of the item before the page. Raises SpecError for one of no item.
    """
    names = [name_of(item) for item in items]
    start = 0
    if cursor is not None:
        before = decoded(cursor)
        if before not in names:
            raise unknown_cursor(cursor)
        start = names.index(before) + 1
    end = start + limit
    return list(items[start:end]), encoded(names[end - 1]) if end < len(items) else None
