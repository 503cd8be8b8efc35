"""Pages of stored lists: newest first by (created_at, id), which later rows never disturb."""

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Engine, select, tuple_
from sqlalchemy.orm import load_only

from planner.api.storage.common import all_readable, is_id, plain_text
from planner.api.storage.records import Page
from planner.api.storage.transactions import reading
from planner.errors import fault

MAX_PAGE = 200
Item = TypeVar("Item")


def read_page(
    engine: Engine,
    table: Any,
    item_of: Callable[[Any], Item],
    cursor: str | None,
    limit: int,
    *,
    wanted: Any = None,
    columns: Sequence[str] = (),
) -> Page[Item]:
    """At most `limit` rows after the cursor, each as `item_of` makes it. Raises SpecError.

    Rows that this version cannot read are left out.

    wanted: a filter, whose fields that are not None are the values of columns of the same names.
    columns: names of those to load; all where none is given.
    """
    check_limit(limit)
    query = select(table).order_by(table.created_at.desc(), table.id.desc())
    if columns:
        query = query.options(load_only(*(getattr(table, name) for name in columns)))
    for name in () if wanted is None else [field.name for field in fields(wanted)]:
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(getattr(table, name) == plain_text(value))
    if cursor is not None:
        query = query.where(tuple_(table.created_at, table.id) < tuple_(*read_cursor(cursor)))
    with reading(engine) as session:
        rows = session.scalars(query.limit(limit + 1)).all()
        last = rows[limit - 1] if len(rows) > limit else None
        return Page(
            items=list(all_readable(rows[:limit], item_of)),
            next_cursor=None if last is None else cursor_of(last.created_at, last.id),
        )


def every(read: Callable[[str | None], Page[Item]]) -> Iterator[Item]:
    """All items of a list, page after page. read: gives the page after a cursor."""
    cursor = None
    while True:
        page = read(cursor)
        yield from page.items
        if (cursor := page.next_cursor) is None:
            return


def check_limit(limit: int) -> None:
    """Raises SpecError for a page that is empty or too long."""
    if not 1 <= limit <= MAX_PAGE:
        raise fault("limit", limit, f"must be 1 to {MAX_PAGE}", "ask for more pages instead")


def cursor_of(created_at: datetime, row_id: str) -> str:
    """Where the page after this row starts."""
    return encoded(f"{created_at.isoformat()}|{row_id}")


def read_cursor(cursor: str) -> tuple[datetime, str]:
    """(created_at, id) of the row before the page. Raises SpecError."""
    moment, _, row_id = decoded(cursor).partition("|")
    try:
        created_at = datetime.fromisoformat(moment)
    except ValueError:
        raise unknown_cursor(cursor) from None
    if created_at.tzinfo is None or not row_id or not is_id(row_id):
        raise unknown_cursor(cursor)
    return created_at, row_id


def encoded(place: str) -> str:
    """A place in a list as a cursor, which a URL can hold."""
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def decoded(cursor: str) -> str:
    """The place that a cursor names. Raises SpecError."""
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (ValueError, binascii.Error):
        raise unknown_cursor(cursor) from None


def unknown_cursor(cursor: str) -> Exception:
    """The error for a cursor that names no place in the list."""
    rule, remedy = "is not a cursor that this service gave", "leave it out to start at the first"
    return fault("cursor", cursor, rule, remedy)
